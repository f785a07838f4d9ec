"""AdamW for uneven shards: fp32 masters of low-precision parameters, and state kept once (ZeRO-1).

With `zero` a block's optimizer state lives on one rank of the job, its keeper (`ntp_core.keepers`).
The keeper updates the block and sends the new parameters to the other ranks that hold it. AdamW is
elementwise, so the bits are those of an optimizer that is not sharded (arXiv 1910.02054, stage 1).

With a low-precision `param_dtype` the truth is the fp32 master; a parameter is its master rounded
to nearest even, always, and is written nowhere else (arXiv 1710.03740).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from ntp_core.errors import RanksDisagree
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.shards import KeptPlacement, Placement, Shard, Shards, set_grad_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Of what type parameters and gradients are, and who keeps the optimizer's state.

    Attributes:
        param_dtype: of parameters; other than float32 they get float32 masters.
        grad_dtype: in which gradients are accumulated over micro-batches and summed over replicas.
            float32 rounds each sum at 2^-24; bfloat16 halves the bytes but rounds each addition at
            2^-8, so that the result depends on the number of micro-batches and replicas.
        zero: keep the state of each block once in the job, not once per replica.
    """

    param_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    zero: bool = False


class PlaneAdamW(torch.optim.Optimizer):
    """AdamW over a rank's shards; follows them through changes of the plan.

    Parameters are cast to `options.param_dtype` here; masters start as they were before.

    Args:
        groups: as of `torch.optim.AdamW`: dicts with "params" and own settings.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        shards: Shards,
        comm: Comm,
        options: StateOptions,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, settings)
        self.shards = shards
        self.options = options
        self.has_master = options.param_dtype != torch.float32
        self.state_names = ("master",) * self.has_master + ("exp_avg", "exp_avg_sq")
        self._comm = comm
        self._index = {id(p): i for i, p in enumerate(shards.params)}
        self._exchange: Exchange | None = None
        self._placement = self._place()
        for i, param in enumerate(shards.params):
            self._start(i, param)

    @property
    def placement(self) -> Placement:
        """Which blocks' state this rank keeps under the plan in force."""
        if self._placement.plan is not self.shards.plan:
            self._placement = self._place()
        return self._placement

    @property
    def is_dealt(self) -> bool:
        """State is kept once in the job, and parameters come from their keepers."""
        return isinstance(self.placement, KeptPlacement) and self.placement.is_dealt

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update from the gradients; with dealt state every rank of the world takes part."""
        assert closure is None, "gradients are synced before a step, it cannot compute them anew"
        kept = self.placement.shards
        for group in self.param_groups:
            for param in group["params"]:
                i = self._index[id(param)]
                self._update(self.shards.shards[i], kept[i], param, group)
        if self._exchange is not None:
            self._exchange.run([p.data for p in self.shards.params])

    def _place(self) -> Placement:
        shards, self._exchange = self.shards, None
        if not self.options.zero:
            return shards
        kept = KeptPlacement(shards.model, shards.plan, shards.rank)
        if kept.is_dealt:
            self._exchange = Exchange(self._comm, shards, kept)
        return kept

    def _start(self, i: int, param: nn.Parameter) -> None:
        mine = pick(self.shards.shards[i], self.placement.shards[i], param.data)
        state = self.state[param]
        state["step"] = torch.tensor(0.0)
        if self.has_master:
            state["master"] = mine.to(torch.float32, copy=True)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(mine, dtype=torch.float32)
        param.data = param.data.to(self.options.param_dtype)
        set_grad_dtype(param, self.options.grad_dtype)

    def _update(
        self, shard: Shard, kept: Shard, param: nn.Parameter, group: dict[str, Any]
    ) -> None:
        state = self.state[param]
        if not kept.blocks:  # nothing of it here; the count goes on, for blocks that may come
            state["step"] += 1
            return
        if param.grad is None:
            return
        own = state["master"] if self.has_master else pick(shard, kept, param.data)
        beta1, beta2 = group["betas"]
        adamw(
            [own],
            [pick(shard, kept, param.grad).to(torch.float32)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        put(shard, kept, param.data, own)


class Exchange:
    """Sends each block from its keeper to the other ranks that hold it, under one plan."""

    def __init__(self, comm: Comm, shards: Shards, kept: KeptPlacement) -> None:
        self._comm = comm
        self._shards = shards.shards
        self._sends = {g: self._rows(kept, shards, shards.rank, g) for g in comm.world}
        self._receives = {g: self._rows(kept, shards, g, shards.rank) for g in comm.world}

    def run(self, params: list[torch.Tensor]) -> None:
        """Bring this rank's parameters up to date. Every rank of the world takes part."""
        sends = [self._pack(params, self._sends[g]) for g in self._comm.world]
        for g, data in zip(self._comm.world, self._comm.all_to_all(sends), strict=True):
            self._unpack(params, self._receives[g], data, g)

    def _rows(
        self, kept: KeptPlacement, shards: Shards, src: int, dst: int
    ) -> list[tuple[int, torch.Tensor]]:
        """(tensor, local rows here) of what `src` keeps and `dst` holds too."""
        if src == dst:
            return []
        found = []
        for i, (keeps, holds) in enumerate(zip(kept.held, shards.held, strict=True)):
            both = tuple(sorted(set(keeps[src]) & set(holds[dst])))
            if both:
                found.append((i, self._shards[i].rows(both)))
        return found

    def _pack(
        self, params: list[torch.Tensor], rows: list[tuple[int, torch.Tensor]]
    ) -> torch.Tensor:
        parts = [
            params[i].index_select(self._shards[i].spec.dim, at).reshape(-1).view(torch.uint8)
            for i, at in rows
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _unpack(
        self,
        params: list[torch.Tensor],
        rows: list[tuple[int, torch.Tensor]],
        data: torch.Tensor,
        src: int,
    ) -> None:
        start = 0
        for i, at in rows:
            shape, dim = list(params[i].shape), self._shards[i].spec.dim
            shape[dim] = len(at)
            size = torch.Size(shape).numel() * params[i].element_size()
            part = data[start : start + size]
            if len(part) != size:
                raise RanksDisagree(
                    f"rank {src} sent {len(data)} bytes of new parameters, at least "
                    f"{start + size} were due; all ranks must be under the same plan"
                )
            # clone: a slice of bytes may not be aligned for the element type
            params[i].index_copy_(dim, at, part.clone().view(params[i].dtype).view(shape))
            start += size


def pick(shard: Shard, part: Shard, tensor: torch.Tensor) -> torch.Tensor:
    """The blocks of `part` out of a local tensor of `shard`; the tensor itself when it is all."""
    if part.blocks == shard.blocks:
        return tensor
    return tensor.index_select(shard.spec.dim, shard.rows(part.blocks))


def put(shard: Shard, part: Shard, into: torch.Tensor, own: torch.Tensor) -> None:
    """Write the blocks of `part` into a local tensor of `shard`, rounded to its type."""
    if part.blocks == shard.blocks:
        if own is not into:
            into.copy_(own)
        return
    into.index_copy_(shard.spec.dim, shard.rows(part.blocks), own.to(into.dtype))


def cast_errors(optimizer: PlaneAdamW) -> dict[str, int]:
    """Tensors some of whose parameters are not their master rounded: name -> elements, here.

    Between steps there must be none; one that changed at rest shows here without a second replica.
    """
    if not optimizer.has_master:
        return {}
    found = {}
    shards, kept = optimizer.shards, optimizer.placement.shards
    for shard, part, param in zip(shards.shards, kept, shards.params, strict=True):
        held = pick(shard, part, param.data).view(torch.int16)
        right = optimizer.state[param]["master"].to(param.dtype).view(torch.int16)
        wrong = int((held != right).sum())
        if wrong:
            found[shard.spec.name] = wrong
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state on this rank, masters included, step counts left out."""
    tensors = [t for state in optimizer.state.values() for n, t in state.items() if n != "step"]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
