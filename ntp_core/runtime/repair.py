"""Puts right what a comparison found wrong: the named blocks come back from a healthy holder.

Told to the observer as an allocation change of the same plan under the next epoch, so that it is
traced, verified and counted like any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ntp_core.observe import Blame, ChangePhase, ChangeStatus, Observer, Reason
from ntp_core.plan import Plan
from ntp_core.reshard import Move
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.compare import Comparison, Difference, ReplicaCheck
from ntp_core.runtime.optim.planes import Plane, plane_bytes
from ntp_core.runtime.shards import Shards
from ntp_core.runtime.transfer import copy_blocks
from ntp_core.units import block_numel

MAX_TOLD = 32
"""Differences told to the observer in one step; a fault in a whole tensor has one per block."""


def repair(
    comm: Comm,
    shards: Shards,
    planes: Sequence[Plane],
    found: Comparison,
    check: ReplicaCheck,
    step: int,
) -> Plan | None:
    """Copy right bits over wrong ones and compare again. Every rank takes part.

    Bits that changed at rest are the parameters' alone. A block that the majority outvotes was
    computed wrongly, so its optimizer state comes too, where more than one rank keeps it.

    Args:
        planes: parameters first.
        step: the step in which the difference was found; it is not committed yet.

    Returns:
        The plan under its next epoch, or None when nothing tells which bits are right: then the
        job goes on and the observer has been told so.
    """
    observer, plan = comm.observer, shards.plan
    if comm.is_leader:
        _tell(observer, plan, found, check, step)
    todo: dict[Blame, list[Move]] = {Blame.AT_REST: [], Blame.MAJORITY: []}
    for d in found.differences:
        if (move := _move(d, shards, check)) is not None:
            todo[d.blame].append(move)
    if not any(todo.values()):
        return None
    new = plan.with_epoch(plan.epoch + 1)
    observer.change_begin(new.epoch, Reason.REPAIR, plan.digest, new.digest, step - 1)
    begin = time.monotonic_ns()
    replicated = [p for p in planes if p.placement is planes[0].placement]
    moved = copy_blocks(comm, planes[:1], todo[Blame.AT_REST]).bytes_received
    moved += copy_blocks(comm, replicated, todo[Blame.MAJORITY]).bytes_received
    observer.change_phase(new.epoch, ChangePhase.TRANSFER, begin, time.monotonic_ns(), moved)
    begin = time.monotonic_ns()
    left = check.compare().differences
    total = torch.tensor([moved], dtype=torch.int64)
    comm.all_reduce(total, comm.world)
    observer.change_phase(new.epoch, ChangePhase.VERIFY, begin, time.monotonic_ns(), 0)
    bound = sum(m.numel for m in todo[Blame.AT_REST]) * plane_bytes(planes[0])
    bound += sum(m.numel for m in todo[Blame.MAJORITY]) * sum(map(plane_bytes, replicated))
    status = ChangeStatus.FAILED if left else ChangeStatus.COMMITTED
    observer.change_end(new.epoch, status, int(total), bound, 0 if left else check.index.total)
    return new


def _tell(
    observer: Observer, plan: Plan, found: Comparison, check: ReplicaCheck, step: int
) -> None:
    for d in found.differences[:MAX_TOLD]:
        tensor, block = check.index.tensor_of(d.block_index)
        replica = -1 if d.rank is None else plan.place(d.rank)[0]
        rank = -1 if d.rank is None else d.rank
        observer.divergence(step, d.blame, replica, rank, tensor, block)


def _move(d: Difference, shards: Shards, check: ReplicaCheck) -> Move | None:
    if d.blame is Blame.UNDECIDED or d.rank is None or d.source is None:
        return None
    tensor, block = check.index.tensor_of(d.block_index)
    spec = shards.model.tensors[tensor]
    numel = (
        spec.numel
        if spec.kind is None
        else block_numel(spec, shards.model.counts[spec.kind], block)
    )
    return Move(tensor, block, d.source, d.rank, numel)
