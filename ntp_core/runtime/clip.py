"""One clip coefficient for the whole job, with the loss and control words in the same sum.

Replicas that summed the norm each in its own order would drift apart within tens of steps. Here the
squares of each block come from one rank only (replica 0 speaks), are shared by one sum in which all
others add zero, and every rank adds them up in the same order: the same bits everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex, counted_blocks
from ntp_core.runtime.shards import Shards


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
        speaks = shards.plan.place(shards.rank)[0] == 0
        self._counted = counted_blocks(shards) if speaks else [()] * len(shards.shards)

    def share(self, loss_sum: float, control: int) -> Shared:
        """Sum over the world. Every rank takes part; gradients must be synced already."""
        vector = torch.zeros(2 + self._index.total, dtype=torch.float64)
        vector[0], vector[1] = loss_sum, control
        for i, (shard, param) in enumerate(self._shards):
            if self._counted[i] and param.grad is not None:
                self._squares(vector, i, shard.spec.dim, param.grad)
        self._comm.all_reduce(vector, self._comm.world)
        # math.fsum is exact and so does not depend on order either.
        norm = math.sqrt(math.fsum(vector[2:].tolist()))
        return Shared(float(vector[0]), norm, int(vector[1]))

    def scale(self, factor: float) -> None:
        """Multiply all gradients of this rank."""
        for param in self._shards.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def _squares(self, vector: torch.Tensor, i: int, dim: int, grad: torch.Tensor) -> None:
        shard = self._shards.shards[i]
        squares = grad.double().square()
        others = [d for d in range(squares.dim()) if d != dim]
        lines = squares.sum(others) if others else squares
        for block in self._counted[i]:
            spans = shard.spans((block,))
            vector[2 + self._index.start[i] + block] = sum(lines[a:z].sum() for a, z in spans)
