"""Gradient sync by segments: each group of owners sums its pieces in one fused buffer.

All groups run in one global order (sorted by ranks), so that communicators cannot wait for each
other in a circle. Tensors that every rank holds whole (norm gains) are counted once per replica:
its first rank adds them, the others add zero, and one sum over the world gives all the same bits.
"""

from __future__ import annotations

import torch

from ntp_core.runtime.comm import Comm, Ranks
from ntp_core.runtime.shards import Placement, Shards
from ntp_core.segments import sync_groups

Span = tuple[int, int, int]  # shard, local start, local stop


class GradientSync:
    """Sums gradients over replicas under one plan. Build a new one for each plan."""

    def __init__(self, comm: Comm, shards: Shards) -> None:
        self._comm = comm
        self._shards = shards
        self._groups = [(ranks, spans) for ranks, spans in _spans(shards) if len(ranks) > 1]
        self._whole = [i for i, s in enumerate(shards.shards) if s.spec.kind is None]
        self._counts = shards.plan.place(shards.rank)[1] == 0

    def run(self) -> None:
        """Replace each gradient by its sum over replicas."""
        for ranks, spans in self._groups:
            self._sum([self._view(s) for s in spans], ranks)
        if len(self._shards.plan.replicas) > 1 and self._whole:
            grads = [self._grad(i) for i in self._whole]
            if not self._counts:
                for grad in grads:
                    grad.zero_()
            self._sum(grads, self._comm.world)

    def _sum(self, views: list[torch.Tensor], ranks: Ranks) -> None:
        flat = torch.cat([v.reshape(-1) for v in views])
        self._comm.all_reduce(flat, ranks)
        start = 0
        for view in views:
            view.copy_(flat[start : start + view.numel()].view(view.shape))
            start += view.numel()

    def _grad(self, index: int) -> torch.Tensor:
        param = self._shards.params[index]
        if param.grad is None:  # an empty share, or a tensor that this batch did not use
            param.grad = torch.zeros_like(param)
        return param.grad

    def _view(self, span: Span) -> torch.Tensor:
        index, start, stop = span
        return self._grad(index).narrow(self._shards.shards[index].spec.dim, start, stop - start)


def groups_of(placement: Placement) -> list[Ranks]:
    """All groups that a plan needs, replicas included; every rank creates them before use."""
    replicas = [r.ranks for r in placement.plan.replicas]
    return replicas + [g.ranks for g in sync_groups(placement.plan, placement.model)]


def _spans(shards: Shards) -> list[tuple[Ranks, list[Span]]]:
    """This rank's groups and the local spans that each sums, in the global order."""
    mine = []
    for group in sync_groups(shards.plan, shards.model):
        if shards.rank not in group.ranks:
            continue
        spans = [
            (p.tensor, start, stop)
            for p in group.pieces
            for start, stop in shards.shards[p.tensor].spans(p.blocks)
        ]
        mine.append((group.ranks, spans))
    return mine
