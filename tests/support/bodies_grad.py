"""Bodies about gradients alone: the sum over replicas, and the shared norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ntp_core.observe import Op
from ntp_core.plan import Plan
from ntp_core.runtime.clip import GradientClip, Shared
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.shards import Shards
from ntp_core.runtime.sync import GradientSync, groups_of
from ntp_core.units import ModelUnits
from tests.support.logical import Whole, cut
from tests.support.recording_observer import RecordingObserver, calls_of

Wholes = list[Mapping[str, torch.Tensor]]  # by replica


def _shards(comm: Comm, model: ModelUnits, plan: Plan, grads: Mapping[str, torch.Tensor]) -> Shards:
    local = cut(plan, model, comm.rank, grads)
    params = {n: nn.Parameter(torch.zeros_like(g)) for n, g in local.items()}
    for name, param in params.items():
        if param.numel():  # an empty share may come without a gradient
            param.grad = local[name].clone()
    return Shards(model, plan, comm.rank, params)


def sync(
    comm: Comm, model: ModelUnits, plans: list[Plan], grads: list[Wholes]
) -> list[tuple[Whole, int]]:
    """For each plan: this rank's gradients after the sync, and the bytes it summed for it."""
    answers = []
    for plan, by_replica in zip(plans, grads, strict=True):
        shards = _shards(comm, model, plan, by_replica[plan.place(comm.rank)[0]])
        comm.ensure_groups(groups_of(shards))
        observer = RecordingObserver()
        comm.observer = observer
        GradientSync(comm, shards).run()
        begins = calls_of(observer.calls, "collective_begin")
        assert all(op == Op.ALL_REDUCE for op, *_ in begins)
        after = {s.spec.name: torch.zeros_like(p) if p.grad is None else p.grad for s, p in shards}
        answers.append((after, sum(num_bytes for *_, num_bytes in begins)))
    return answers


def clip(
    comm: Comm, model: ModelUnits, plans: list[Plan], grads: Mapping[str, torch.Tensor]
) -> list[Shared]:
    """For each plan what the sum told this rank; rank r gives the loss 2^-r and control bit r."""
    answers = []
    for plan in plans:
        shards = _shards(comm, model, plan, grads)
        answers.append(GradientClip(comm, shards).share(2.0**-comm.rank, 1 << comm.rank))
    return answers


def clip_scale(
    comm: Comm, model: ModelUnits, plan: Plan, grads: Mapping[str, torch.Tensor], factor: float
) -> Whole:
    """This rank's gradients after scaling."""
    shards = _shards(comm, model, plan, grads)
    GradientClip(comm, shards).scale(factor)
    return {s.spec.name: torch.zeros_like(p) if p.grad is None else p.grad for s, p in shards}
