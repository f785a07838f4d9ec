"""One clip coefficient for the whole job, with the loss and control words in the same sum.

Replicas that summed the norm each in its own order would drift apart within tens of steps. Here the
squares of each block come from one rank only (replicas speak for tensors in turn), are shared by
one sum in which all others add zero, and every rank adds them up in the same order: the same bits
everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex
from ntp_core.runtime.shards import Shard, Shards


@dataclass(frozen=True, slots=True)
class Shared:
    """What every rank learns in this sum: the job's loss sum, gradient norm, control word."""

    loss_sum: float
    norm: float
    control: int


class GradientClip:
    """Shares the norm under one plan. Build a new one for each plan."""

    def __init__(self, comm: Comm, shards: Shards) -> None:
        self._comm = comm
        self._shards = shards
        self._index = BlockIndex(shards.model)
        replica, replicas = shards.plan.place(shards.rank)[0], len(shards.plan.replicas)
        self._slots = [
            self._slots_of(shard, blocks) if blocks and shard.index % replicas == replica else None
            for shard, blocks in zip(shards.shards, shards.counted(), strict=True)
        ]
        mine = zip(self._slots, shards.params, strict=True)
        largest = max((p.numel() for slots, p in mine if slots is not None), default=0)
        self._room = torch.empty(largest, dtype=torch.float64)  # squares of one gradient

    def share(self, loss_sum: float, control: int) -> Shared:
        """Sum over the world. Every rank takes part; gradients must be synced already."""
        vector = self.vector(loss_sum, control)
        self._comm.all_reduce(vector, self._comm.world)
        return self.shared(vector)

    def vector(self, loss_sum: float, control: int) -> torch.Tensor:
        """This rank's part of the sum, float64; gradients must be synced already."""
        vector = torch.zeros(3 + self._index.total, dtype=torch.float64)
        for slots, (shard, param) in zip(self._slots, self._shards, strict=True):
            if slots is not None and param.grad is not None:
                vector.index_add_(0, slots, self._squares(param.grad, shard.spec.dim))
        vector[0], vector[1], vector[2] = loss_sum, control, 0.0
        return vector

    def shared(self, vector: torch.Tensor) -> Shared:
        """What the sum of all vectors says."""
        # math.fsum is exact and so does not depend on order either.
        norm = math.sqrt(math.fsum(vector[3:].tolist()))
        return Shared(float(vector[0]), norm, int(vector[1]))

    def scale(self, factor: float) -> None:
        """Multiply all gradients of this rank."""
        for param in self._shards.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def _squares(self, grad: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum of squares of each line along the cut dim."""
        squares = self._room[: grad.numel()].view(grad.shape).copy_(grad).square_()
        others = [d for d in range(squares.dim()) if d != dim]
        return squares.sum(others) if others else squares

    def _slots_of(self, shard: Shard, blocks: tuple[int, ...]) -> torch.Tensor:
        """Where each line of a local tensor is added up: its block's place, or one for the rest."""
        slots = torch.full((shard.shape[shard.spec.dim],), 2, dtype=torch.int64)
        for block in blocks:
            for a, z in shard.spans((block,)):
                slots[a:z] = 3 + self._index.start[shard.index] + block
        return slots
