"""Moves blocks between ranks: every plane of state, only the bytes that must move.

All ranks compute the same list of moves; each packs what it gives, one uneven all-to-all carries
it, and each builds its new local tensors from what it keeps and what came in. The old tensors stay
untouched until the caller has verified the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ntp_core.plan import Plan
from ntp_core.reshard import Move, moves
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.shards import Shard, Shards, shards_of

Planes = list[list[torch.Tensor]]  # plane -> local tensor of each shard


@dataclass(frozen=True, slots=True)
class Transferred:
    """New local tensors, the bytes this rank received and sent, and whether all due bytes came."""

    planes: Planes
    bytes_received: int
    bytes_sent: int
    complete: bool


def transfer(comm: Comm, shards: Shards, planes: Planes, new: Plan) -> Transferred:
    """The planes of this rank's shards under `new`. Every rank of the world takes part.

    Never raises for what a peer sent: the caller verifies, and rolls back when told incomplete.
    """
    target = shards_of(shards.model, new, shards.rank)
    fresh = [
        [torch.zeros(shard.shape, dtype=old[i].dtype) for i, shard in enumerate(target)]
        for old in planes
    ]
    _keep(shards.shards, target, planes, fresh)
    return _exchange(comm, shards, planes, moves(shards.plan, new, shards.model), target, fresh)


def copy_blocks(comm: Comm, shards: Shards, planes: Planes, todo: list[Move]) -> Transferred:
    """Overwrite blocks in place with those of another holder; the plan stays."""
    return _exchange(comm, shards, planes, todo, shards.shards, planes)


def _exchange(
    comm: Comm,
    shards: Shards,
    source: Planes,
    todo: Sequence[Move],
    target: list[Shard],
    into: Planes,
) -> Transferred:
    rank = comm.rank
    sends = [
        _pack(shards, source, [m for m in todo if m.src == rank and m.dst == g]) for g in comm.world
    ]
    received = comm.all_to_all(sends)
    complete = True
    for g, data in zip(comm.world, received, strict=True):
        mine = [m for m in todo if m.src == g and m.dst == rank]
        complete = _unpack(target, into, mine, data) and complete
    total_in, total_out = sum(t.numel() for t in received), sum(t.numel() for t in sends)
    return Transferred(into, total_in, total_out, complete)


def _pack(shards: Shards, planes: Planes, todo: list[Move]) -> torch.Tensor:
    parts = [
        view.contiguous().reshape(-1).view(torch.uint8)
        for m in todo
        for tensors in planes
        for view in shards.shards[m.tensor].views(tensors[m.tensor], m.block)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _keep(old: list[Shard], new: list[Shard], source: Planes, target: Planes) -> None:
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        for block in sorted(set(a.blocks) & set(b.blocks)):
            for p in range(len(source)):
                pairs = zip(a.views(source[p][i], block), b.views(target[p][i], block), strict=True)
                for have, want in pairs:
                    want.copy_(have)


def _unpack(target: list[Shard], planes: Planes, todo: list[Move], data: torch.Tensor) -> bool:
    """Write what came from one rank; False when its size is not what was due."""
    views = [
        view
        for m in todo
        for tensors in planes
        for view in target[m.tensor].views(tensors[m.tensor], m.block)
    ]
    if sum(v.numel() * v.element_size() for v in views) != data.numel():
        return False
    start = 0
    for view in views:
        size = view.numel() * view.element_size()
        # clone: a slice of bytes may not be aligned for the element type
        view.copy_(data[start : start + size].clone().view(view.dtype).view(view.shape))
        start += size
    return True
