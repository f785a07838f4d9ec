"""Moves blocks between ranks: every plane of state, only the bytes that must move.

All ranks compute the same list of moves; each packs what it gives, one uneven all-to-all carries
it, and each builds its new local tensors from what it keeps and what came in. The old tensors stay
untouched until the caller has verified the new ones; one of which nothing changes is taken over as
it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ntp_core.plan import Plan
from ntp_core.reshard import Move, moves_between
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.optim.planes import Plane
from ntp_core.runtime.shards import Placement


@dataclass(frozen=True, slots=True)
class Transferred:
    """New local tensors, the bytes this rank received and sent, and whether all due bytes came."""

    planes: list[Plane]
    bytes_received: int
    bytes_sent: int
    complete: bool


@dataclass(frozen=True, slots=True)
class _Task:
    """What moves of one plane: out of `source`, into `target`."""

    source: Plane
    target: Plane
    todo: Sequence[Move]


def transfer(
    comm: Comm,
    planes: Sequence[Plane],
    new: Plan,
    holders: Collection[int] | None = None,
    turn: int = 0,
) -> Transferred:
    """These planes under the plan `new`. Every rank of the world takes part.

    Never raises for what a peer sent: the caller verifies, and rolls back when told incomplete.

    Args:
        holders: who may give; default: all.
        turn: grows with each try; another one takes blocks from other holders.
    """
    known: dict[int, tuple[Placement, tuple[Move, ...]]] = {}
    tasks = []
    for plane in planes:
        here = plane.placement
        if id(here) not in known:
            there = here.under(new)
            givers = set(comm.world if holders is None else holders)
            held = [{g: b for g, b in of.items() if g in givers} for of in here.held]
            known[id(here)] = there, moves_between(held, there.held, here.model, turn)
        there, todo = known[id(here)]
        tensors = [
            old
            if a.blocks == b.blocks
            else torch.empty(b.shape, dtype=old.dtype, device=old.device)
            for a, b, old in zip(here.shards, there.shards, plane.tensors, strict=True)
        ]
        tasks.append(_Task(plane, Plane(plane.name, there, tensors), todo))
        _keep(tasks[-1])
    return _exchange(comm, tasks)


def copy_blocks(comm: Comm, planes: Sequence[Plane], todo: Sequence[Move]) -> Transferred:
    """Overwrite blocks in place with those of another holder; the plan stays."""
    return _exchange(comm, [_Task(p, p, todo) for p in planes])


def _exchange(comm: Comm, tasks: list[_Task]) -> Transferred:
    sends = [_pack(tasks, comm.rank, g) for g in comm.world]
    received = comm.all_to_all(sends)
    complete = True
    for g, data in zip(comm.world, received, strict=True):
        complete = _unpack(tasks, g, comm.rank, data) and complete
    total_in, total_out = sum(t.numel() for t in received), sum(t.numel() for t in sends)
    return Transferred([t.target for t in tasks], total_in, total_out, complete)


def _pack(tasks: list[_Task], src: int, dst: int) -> torch.Tensor:
    parts = [
        view.contiguous().reshape(-1).view(torch.uint8)
        for t in tasks
        for m in t.todo
        if (m.src, m.dst) == (src, dst)
        for view in t.source.placement.shards[m.tensor].views(t.source.tensors[m.tensor], m.block)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _keep(task: _Task) -> None:
    """Copy the blocks that are here before and after."""
    source, target = task.source, task.target
    pairs = zip(source.placement.shards, target.placement.shards, strict=True)
    for i, (a, b) in enumerate(pairs):
        if target.tensors[i] is source.tensors[i]:
            continue
        for block in sorted(set(a.blocks) & set(b.blocks)):
            views = b.views(target.tensors[i], block)
            for have, want in zip(a.views(source.tensors[i], block), views, strict=True):
                want.copy_(have)


def _unpack(tasks: list[_Task], src: int, dst: int, data: torch.Tensor) -> bool:
    """Write what came from one rank; False when its size is not what was due."""
    views = [
        view
        for t in tasks
        for m in t.todo
        if (m.src, m.dst) == (src, dst)
        for view in t.target.placement.shards[m.tensor].views(t.target.tensors[m.tensor], m.block)
    ]
    if sum(v.numel() * v.element_size() for v in views) != data.numel():
        return False
    start = 0
    for view in views:
        size = view.numel() * view.element_size()
        part = data[start : start + size]
        if part.storage_offset() % view.element_size():
            part = part.clone()  # not aligned for the element type
        view.copy_(part.view(view.dtype).view(view.shape))
        start += size
    return True
