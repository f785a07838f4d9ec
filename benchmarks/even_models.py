"""The same even tensor-parallel stack three times: ours, PyTorch's DTensor, and as little as works.

Decoder layers (RMSNorm, rotary attention, SwiGLU) over 2 replicas of 2 ranks; all three start with
the same weights and see the same input, so that their losses must agree. What differs is how
layers are cut and how gradients are summed.

Legend: B batch, T positions, D width, H heads here, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ntp_core.cost import Work
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.engine import Engine, StepOptions
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import LlamaLayer, rotary_tables, rotate
from ntp_core.runtime.shards import Shards
from ntp_core.runtime.sync.modes import SyncOptions, gradient_sync, groups_of
from ntp_core.units import ModelUnits, UnitKind

A, M = UnitKind.ATTENTION, UnitKind.MLP
CONFIG = LlamaConfig(layers=4, width=256, heads=8, kv_heads=8, ffn=1024)
BATCH, SEQ, LR, DEGREE, REPLICAS = 2, 64, 1e-4, 2, 2
ROW_CUT = ("q", "k", "v", "gate", "up")
Step = Callable[[], float]


def whole_weights() -> dict[str, torch.Tensor]:
    """The weights of all layers by name, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for t in _units().tensors:
        drawn = 0.05 * torch.randn(t.shape, generator=generator)
        weights[t.name] = torch.ones(t.shape) if len(t.shape) == 1 else drawn
    return weights


def input_of(replica: int) -> torch.Tensor:
    """The replica's input."""
    generator = torch.Generator().manual_seed(1 + replica)
    return torch.randn(BATCH, SEQ, CONFIG.width, generator=generator)


def ours(comm: Comm, *, engine: bool = False) -> Step:
    """A step with our layers and sync; with `engine` all that the engine does beside them."""
    units = _units()
    layouts = {A: Layout.contiguous((4, 4)), M: Layout.contiguous((32, 32))}
    replicas = [ReplicaPlan(ranks=r, layouts=layouts, batch=1) for r in ((0, 1), (2, 3))]
    plan = Plan.build(units.counts, replicas)
    model = _Ours(units, plan, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    x = input_of(plan.place(comm.rank)[0])
    if engine:
        made = Engine(
            model, optimizer, comm, Work(unit={A: 1.0, M: 1.0}), StepOptions(check_every=0)
        )
        return lambda: (
            made.train_step([x], model.loss, tokens=1, global_tokens=x.numel()).loss / REPLICAS
        )
    comm.ensure_groups(groups_of(model.shards))
    sync = gradient_sync(comm, model.shards, SyncOptions())

    def step() -> float:
        optimizer.zero_grad()
        loss = model.loss(x) / x.numel()
        sync.arm()
        loss.backward()  # type: ignore[no-untyped-call]
        sync.run()
        optimizer.step()
        return float(loss.detach())

    return step


def dtensor(rank: int) -> Step:
    """A step with `parallelize_module`, and one all-reduce of all local gradients."""
    mesh = init_device_mesh("cpu", (REPLICAS, DEGREE), mesh_dim_names=("dp", "tp"))
    layers = nn.ModuleList(_Plain(CONFIG.heads // DEGREE) for _ in range(CONFIG.layers))
    _load(layers, whole_weights())
    styles: dict[str, Any] = {n: ColwiseParallel() for n in ROW_CUT}
    styles |= {"o": RowwiseParallel(), "down": RowwiseParallel()}
    for layer in layers:
        parallelize_module(layer, mesh["tp"], styles)
    cut = [p for p in layers.parameters() if isinstance(p, DTensor)]
    whole = [p for p in layers.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": whole}], lr=LR, fused=True)
    return _plain_step(layers, optimizer, mesh["dp"].get_group(), rank)


def minimal(rank: int) -> Step:
    """A step with four all-reduces a layer written out, and one of all gradients."""
    tp = [dist.new_group(list(range(2 * r, 2 * r + 2))) for r in range(REPLICAS)][rank // DEGREE]
    dp = [dist.new_group([i, i + 2]) for i in range(DEGREE)][rank % DEGREE]
    layers = nn.ModuleList(_Plain(CONFIG.heads // DEGREE, tp) for _ in range(CONFIG.layers))
    mine = {n: _cut(n, w, rank % DEGREE) for n, w in whole_weights().items()}
    _load(layers, mine)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LR, fused=True)
    return _plain_step(layers, optimizer, dp, rank)


def _plain_step(
    layers: nn.ModuleList, optimizer: torch.optim.Optimizer, dp: Any, rank: int
) -> Step:
    x, rotary = input_of(rank // DEGREE), rotary_tables(SEQ, CONFIG)
    params = list(layers.parameters())
    flat = torch.empty(sum(_local(p).numel() for p in params))
    places = [
        part.view_as(_local(p))
        for part, p in zip(flat.split([_local(p).numel() for p in params]), params, strict=True)
    ]

    def step() -> float:
        optimizer.zero_grad()
        out = x
        for layer in layers:
            out = layer(out, rotary)
        loss = out.square().sum() / x.numel()
        loss.backward()
        grads = [_local(p.grad) for p in params if p.grad is not None]
        torch._foreach_copy_(places, grads)
        dist.all_reduce(flat, group=dp)
        torch._foreach_copy_(grads, places)
        optimizer.step()
        return float(loss.detach())

    return step


class _Ours(nn.Module):
    """`LlamaLayer`s on this rank; satisfies `ParallelModel`."""

    def __init__(self, units: ModelUnits, plan: Plan, comm: Comm) -> None:
        super().__init__()
        replica, tp_rank = plan.place(comm.rank)
        r = plan.replicas[replica]
        self.units = units
        self.group = TensorParallelGroup(comm, r.ranks)
        heads, columns = (r.layouts[k].shares[tp_rank] for k in (A, M))
        self.layers = nn.ModuleList(
            LlamaLayer(CONFIG, heads, columns, self.group) for _ in range(CONFIG.layers)
        )
        self.shards = Shards(units, plan, comm.rank, dict(self.named_parameters()))
        whole = whole_weights()
        for shard, param in self.shards:
            param.data = _cut(shard.spec.name, whole[shard.spec.name], tp_rank)
        self._rotary = rotary_tables(SEQ, CONFIG)

    def loss(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Sum of squares of the stack's output."""
        for layer in self.layers:
            x_BTD = layer(x_BTD, self._rotary)
        return x_BTD.square().sum()

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """The plan stays."""


class _Sum(torch.autograd.Function):
    """All-reduce forward in place, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Copy(torch.autograd.Function):
    """Nothing forward, all-reduce backward in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Plain(nn.Module):
    """The layer on `nn.Linear`; with a group it sums by hand, without one DTensor does."""

    def __init__(self, heads: int, group: Any = None) -> None:
        super().__init__()
        d, f = CONFIG.width, CONFIG.ffn
        width = d if group is None else heads * CONFIG.head_dim
        f = f if group is None else f // DEGREE
        self.heads, self.group = heads, group
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(d, CONFIG.norm_eps) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(d, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, d, bias=False)
        self.gate, self.up = (nn.Linear(d, f, bias=False) for _ in range(2))
        self.down = nn.Linear(f, d, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        h = self._enter(self.attn_norm(x_BTD))
        b, t, _ = h.shape
        q, k, v = (
            f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True
        )
        x_BTD = x_BTD + self._leave(self.o(attended.transpose(1, 2).flatten(2)))
        h = self._enter(self.mlp_norm(x_BTD))
        out: torch.Tensor = x_BTD + self._leave(self.down(F.silu(self.gate(h)) * self.up(h)))
        return out

    def _enter(self, h: torch.Tensor) -> Any:
        return h if self.group is None else _Copy.apply(h, self.group)

    def _leave(self, out: torch.Tensor) -> Any:
        return out if self.group is None else _Sum.apply(out, self.group)


def _units() -> ModelUnits:
    """Units of the layers alone: no embedding, no last norm."""
    whole = CONFIG.units()
    tensors = tuple(t for t in whole.tensors if t.layer >= 0)
    return ModelUnits(counts={k: whole.counts[k] for k in (A, M)}, tensors=tensors)


def _cut(name: str, weight: torch.Tensor, tp_rank: int) -> torch.Tensor:
    kind = name.split(".")[2]
    if kind.endswith("norm"):
        return weight.clone()
    return weight.chunk(DEGREE, 0 if kind in ROW_CUT else 1)[tp_rank].clone()


def _load(layers: nn.ModuleList, weights: dict[str, torch.Tensor]) -> None:
    for name, param in layers.named_parameters():
        param.data.copy_(weights[f"layers.{name}"])


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def all_close(losses: Iterable[float], first: float) -> bool:
    """The arms compute the same."""
    return all(abs(x - first) <= 1e-4 * abs(first) for x in losses)
