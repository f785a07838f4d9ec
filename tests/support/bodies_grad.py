"""Bodies about gradients alone: the sum over replicas, and the shared norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ntp_core.observe import Op
from ntp_core.plan import Plan
from ntp_core.runtime.clip import GradientClip, Shared
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.shards import Shards
from ntp_core.runtime.sync.modes import SyncOptions, gradient_sync, groups_of
from ntp_core.units import ModelUnits
from tests.support.logical import Whole, cut
from tests.support.recording_observer import RecordingObserver, calls_of

Local = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Synced:
    """What one rank saw of one sync.

    Attributes:
        grads: its gradients afterwards; zeros where it has none.
        without: names of the parameters that have no gradient afterwards.
        sums, exchanges: bytes of each all-reduce and each all-to-all, in order of their ends.
    """

    grads: Whole
    sums: list[int]
    exchanges: list[int]
    without: set[str]


def _shards(
    comm: Comm, model: ModelUnits, plan: Plan, local: Local, frozen: Collection[str] = ()
) -> Shards:
    params = {n: nn.Parameter(torch.zeros_like(g), n not in frozen) for n, g in local.items()}
    return Shards(model, plan, comm.rank, params)


def _backward(shards: Shards, grads: Local, unused: Collection[str]) -> None:
    """Gradients `grads` by a real backward; an empty or unused parameter gets none."""
    used = [
        (param * grads[s.spec.name]).sum()
        for s, param in shards
        if param.numel() and s.spec.name not in unused
    ]
    if used:
        torch.stack(used).sum().backward()  # type: ignore[no-untyped-call]


def _after(shards: Shards) -> Whole:
    return {
        s.spec.name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for s, p in shards
    }


def sync(
    comm: Comm,
    model: ModelUnits,
    plans: list[Plan],
    grads: list[list[Local]],
    options: SyncOptions,
    unused: tuple[tuple[str, ...], ...] = (),
    micro_batches: int = 1,
    times: int = 1,
    frozen: tuple[str, ...] = (),
) -> list[Synced]:
    """For each plan: what this rank saw of the sync of `grads[plan][rank]`.

    Args:
        unused: for each rank the parameters that its loss does not use.
        micro_batches: the gradients come in as many equal parts.
        times: steps, all alike; the last one is told.
        frozen: parameters that are not trained, on any rank.
    """
    answers = []
    for plan, by_rank in zip(plans, grads, strict=True):
        mine = {n: g / micro_batches for n, g in by_rank[comm.rank].items()}
        shards = _shards(comm, model, plan, mine, frozen)
        comm.ensure_groups(groups_of(shards, options.mode))
        sync = gradient_sync(comm, shards, options)
        for _ in range(times):
            comm.observer = observer = RecordingObserver()
            for param in shards.params:
                param.grad = None
            for number in range(micro_batches):
                if number == micro_batches - 1:
                    sync.arm()
                left_out = (*frozen, *(unused[comm.rank] if unused else ()))
                _backward(shards, mine, left_out)
            sync.run()
        sync.close()
        begins = calls_of(observer.calls, "collective_begin")
        ends = calls_of(observer.calls, "collective_end")
        assert [b[:3] for b in begins] == [e[:3] for e in ends]
        sums, exchanges = (
            [num_bytes for op, *_, num_bytes in begins if op == wanted]
            for wanted in (Op.ALL_REDUCE, Op.ALL_TO_ALL)
        )
        assert len(begins) == len(sums) + len(exchanges)
        without = {s.spec.name for s, p in shards if p.grad is None}
        answers.append(Synced(_after(shards), sums, exchanges, without))
    return answers


def clip(
    comm: Comm, model: ModelUnits, plans: list[Plan], grads: Mapping[str, torch.Tensor]
) -> list[Shared]:
    """For each plan what the sum told this rank; rank r gives the loss 2^-r and control bit r."""
    answers = []
    for plan in plans:
        local = cut(plan, model, comm.rank, grads)
        shards = _shards(comm, model, plan, local)
        _backward(shards, local, ())
        answers.append(GradientClip(comm, shards).share(2.0**-comm.rank, 1 << comm.rank))
    return answers


def clip_scale(
    comm: Comm, model: ModelUnits, plan: Plan, grads: Mapping[str, torch.Tensor], factor: float
) -> Whole:
    """This rank's gradients after scaling."""
    local = cut(plan, model, comm.rank, grads)
    shards = _shards(comm, model, plan, local)
    _backward(shards, local, ())
    GradientClip(comm, shards).scale(factor)
    return _after(shards)
