"""A small attention model cut by query heads, with copies of KV heads, and its oracle.

Pre-norm attention layers with a gain on single query and key heads, residual, squared error: just
what has blocks that units share and whole tensors with partial gradients. The oracle is the whole
model in plain torch, in float64, with torch's own optimizer.

Legend: B batch, T positions, D width, H query heads, K KV heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ntp_core.cost import Work
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.layers import TensorParallelGroup, copy_to_group, sum_over_group
from ntp_core.runtime.shards import Shards, init_shard, shards_of
from ntp_core.units import ModelUnits, TensorSpec, UnitKind

A = UnitKind.ATTENTION
WORK = Work(unit={A: 1.0})
LAYERS, D, E, T = 2, 12, 4, 5
LR = 1e-2
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """How many query heads, and how many of them share a KV head."""

    heads: int = 6
    sharing: int = 3

    def units(self) -> ModelUnits:
        """One unit a query head."""
        kv = self.heads // self.sharing
        tensors: list[TensorSpec] = []
        for i in range(LAYERS):
            rows = {"q": (self.heads, 1), "k": (kv, self.sharing), "v": (kv, self.sharing)}
            tensors += [
                TensorSpec(name=f"{i}.norm", shape=(D,), layer=i),
                *(
                    TensorSpec(name=f"{i}.{n}", shape=(c * E, D), kind=A, layer=i, sharing=s)
                    for n, (c, s) in rows.items()
                ),
                TensorSpec(name=f"{i}.q_norm", shape=(E,), layer=i, partial_grad=True),
                TensorSpec(name=f"{i}.k_norm", shape=(E,), layer=i, partial_grad=True),
                TensorSpec(name=f"{i}.o", shape=(D, self.heads * E), kind=A, layer=i, dim=1),
            ]
        return ModelUnits(counts={A: self.heads}, tensors=tuple(tensors))


def plan_of(heads: Heads, layouts: list[Layout], batches: tuple[int, ...]) -> Plan:
    """Consecutive ranks, replica after replica."""
    replicas, first = [], 0
    for layout, batch in zip(layouts, batches, strict=True):
        ranks = tuple(range(first, first + len(layout.runs)))
        replicas.append(ReplicaPlan(ranks=ranks, layouts={A: layout}, batch=batch))
        first += len(ranks)
    return Plan.build({A: heads.heads}, replicas)


def batch_of(step: int, first: int, count: int) -> Batch:
    """Sequences of a step's global batch with what they should become, each drawn by its number."""
    drawn = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + number)
        drawn.append(torch.randn(2, T, D, generator=generator))
    return torch.stack(drawn)[:, 0], torch.stack(drawn)[:, 1]


class CopiesModel(nn.Module):
    """One rank's part; satisfies `ParallelModel`."""

    def __init__(self, heads: Heads, group: TensorParallelGroup, plan: Plan, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.units = heads.units()
        self.group = group
        self.names = [t.name for t in self.units.tensors]
        params = {t.name: nn.Parameter(torch.empty(0)) for t in self.units.tensors}
        for i, shard in enumerate(shards_of(self.units, plan, rank)):
            params[self.names[i]].data = init_shard(shard, 3, 0.3)
        self.weights = nn.ParameterList(params.values())
        self.shards = Shards(self.units, plan, rank, params)

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take the local tensors of a new plan."""
        self.shards.adopt(plan, tensors)
        self.group.ranks = plan.replicas[plan.place(self.shards.rank)[0]].ranks

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Half the squared error, summed."""
        x_BTD, wanted = batch
        w = dict(zip(self.names, self.shards.params, strict=True))
        for i in range(LAYERS):
            h = copy_to_group(_rms(x_BTD) * w[f"{i}.norm"], self.group)
            x_BTD = x_BTD + sum_over_group(self._attend(h, w, i), self.group)
        return 0.5 * (x_BTD - wanted).square().sum(dtype=torch.float64)

    def _attend(self, h: torch.Tensor, w: dict[str, nn.Parameter], i: int) -> torch.Tensor:
        plan, rank = self.shards.plan, self.shards.rank
        replica, tp_rank = plan.place(rank)
        mine = plan.replicas[replica].layout(A).units(tp_rank)
        if not mine:  # the gains on heads get no gradient at all
            return F.linear(h[..., :0], w[f"{i}.o"])
        blocks = sorted({u // self.heads.sharing for u in mine})
        of_head = torch.tensor([blocks.index(u // self.heads.sharing) for u in mine])
        q = _rms(F.linear(h, w[f"{i}.q"]).unflatten(-1, (-1, E))) * w[f"{i}.q_norm"]
        k = _rms(F.linear(h, w[f"{i}.k"]).unflatten(-1, (-1, E))) * w[f"{i}.k_norm"]
        v = F.linear(h, w[f"{i}.v"]).unflatten(-1, (-1, E))
        scores = torch.einsum("bthe,bshe->bhts", q, k[:, :, of_head]).softmax(-1)
        out = torch.einsum("bhts,bshe->bthe", scores, v[:, :, of_head])
        return F.linear(out.flatten(-2), w[f"{i}.o"])


class DenseCopies:
    """The whole model in one process."""

    def __init__(self, heads: Heads) -> None:
        plan = plan_of(heads, [Layout.contiguous((heads.heads,))], (1,))
        whole = CopiesModel(heads, None, plan, 0)  # type: ignore[arg-type]
        self.heads = heads
        self.weights = {
            n: p.detach().double().requires_grad_()
            for n, p in zip(whole.names, whole.shards.params, strict=True)
        }
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=LR, foreach=False)
        self.step = 0

    def train_step(self, global_batch: int) -> float:
        """One step; the loss per position before it."""
        self.step += 1
        x, wanted = (t.double() for t in batch_of(self.step, 0, global_batch))
        self.optimizer.zero_grad()
        w, repeat = self.weights, self.heads.sharing
        for i in range(LAYERS):
            h = _rms(x) * w[f"{i}.norm"]
            q, k, v = ((h @ w[f"{i}.{n}"].T).unflatten(-1, (-1, E)).transpose(1, 2) for n in "qkv")
            q, k = _rms(q) * w[f"{i}.q_norm"], _rms(k) * w[f"{i}.k_norm"]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            out = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            x = x + out.transpose(1, 2).flatten(2) @ w[f"{i}.o"].T
        loss = 0.5 * (x - wanted).square().sum() / (global_batch * T)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
