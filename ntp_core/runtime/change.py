"""An allocation change at a step boundary: plan A to plan B in a running job, or back to A.

    quiesce   all ranks stand at the same step with the same plans (digests and epoch compared)
    regroup   groups of the new plan are created
    transfer  only missing blocks move; new tensors are built beside the old ones
    verify    fingerprint of every block and plane before = after, over all replicas
    resume    the new tensors are adopted; or rollback: they are dropped, plan A stays

The old state is untouched until every rank knows that the new one is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ntp_core.errors import RanksDisagree
from ntp_core.observe import ChangePhase, ChangeStatus
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.reshard import elements_lower_bound, moves_between
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex
from ntp_core.runtime.optim.planes import (
    Plane,
    adopt_state,
    copies_agree,
    optimizer_steps,
    plane_bytes,
    planes_of,
    shared_fingerprints,
)
from ntp_core.runtime.parallel_model import ParallelModel
from ntp_core.runtime.shards import KeptPlacement, Placement
from ntp_core.runtime.sync.modes import SyncMode, groups_of
from ntp_core.runtime.transfer import Transferred, transfer

Vectors = npt.NDArray[np.int64]  # [copies, blocks]


class Changer:
    """Carries out proposals on one rank."""

    def __init__(
        self,
        comm: Comm,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int,
        mode: SyncMode = SyncMode.SEGMENTS,
    ) -> None:
        self._comm = comm
        self._model = model
        self._optimizer = optimizer
        self._seed = seed
        self._index = BlockIndex(model.units)
        self._mode = mode
        comm.ensure_groups(groups_of(model.shards, mode))

    def apply(self, proposal: Proposal, step: int, adopt: Callable[[Plan], None]) -> bool:
        """Change to the proposal's plan; False when it was rolled back. Every rank takes part.

        Args:
            step: last committed step.
            adopt: called with the new plan once its tensors are in place.
        """
        old, new = self._model.shards.plan, proposal.plan
        observer = self._comm.observer
        observer.change_begin(new.epoch, proposal.reason, old.digest, new.digest, step)
        if self._comm.rank == 0:
            self._tell_prelude(proposal)
        with self._phase(new.epoch, ChangePhase.QUIESCE):
            agree(self._comm, [step, old.epoch, *_words(old.digest), *_words(new.digest)])
        placement = Placement(self._model.units, new, self._comm.rank)
        with self._phase(new.epoch, ChangePhase.REGROUP):
            self._comm.ensure_groups(groups_of(placement, self._mode))
        planes = planes_of(self._model.shards, self._optimizer)
        steps = optimizer_steps(self._comm, self._optimizer)
        before = self._fingerprints(planes)
        moved = self._transfer(planes, new)
        with self._phase(new.epoch, ChangePhase.VERIFY):
            after = self._fingerprints(moved.planes)
            silent = copies_agree(moved.planes, after, self._index, seed=self._seed)
            total, whole = self._totals(moved, silent)
        bound = _bytes_lower_bound(planes, moved.planes)  # now: `planes` follow the plan in force
        good = whole and all(_is_kept(*pair) for pair in zip(before, after, strict=True))
        with self._phase(new.epoch, ChangePhase.RESUME if good else ChangePhase.ROLLBACK):
            if good:
                self._commit(new, moved.planes, steps, adopt)
        observer.change_end(
            new.epoch,
            ChangeStatus.COMMITTED if good else ChangeStatus.ROLLED_BACK,
            total,
            bound,
            sum(v.size for v in after) if good else 0,
        )
        return good

    def _transfer(self, planes: list[Plane], new: Plan) -> Transferred:
        begin = time.monotonic_ns()
        moved = transfer(self._comm, planes, new)
        self._comm.observer.change_phase(
            new.epoch, ChangePhase.TRANSFER, begin, time.monotonic_ns(), moved.bytes_received
        )
        return moved

    def _fingerprints(self, planes: list[Plane]) -> list[Vectors]:
        return shared_fingerprints(self._comm, planes, self._index, seed=self._seed)

    def _totals(self, moved: Transferred, silent: bool) -> tuple[int, bool]:
        """Bytes received by all ranks, and whether all came whole, unspoken copies too."""
        is_good = moved.complete and silent
        words = torch.tensor([moved.bytes_received, int(not is_good)], dtype=torch.int64)
        self._comm.all_reduce(words, self._comm.world)
        return int(words[0]), int(words[1]) == 0

    def _commit(
        self, new: Plan, planes: list[Plane], steps: int, adopt: Callable[[Plan], None]
    ) -> None:
        self._model.adopt(new, planes[0].tensors)
        adopt_state(self._model.shards, self._optimizer, planes[1:], steps)
        adopt(new)

    def _tell_prelude(self, proposal: Proposal) -> None:
        """Detection and decision happened elsewhere, by the wall clock."""
        now, offset = time.monotonic_ns(), time.time_ns() - time.monotonic_ns()
        if proposal.detected_unix_ns and proposal.decided_unix_ns:
            detected, decided = (
                max(0, min(t - offset, now))
                for t in (proposal.detected_unix_ns, proposal.decided_unix_ns)
            )
            tell, epoch = self._comm.observer.change_phase, proposal.plan.epoch
            tell(epoch, ChangePhase.DETECT, detected, decided, 0)
            tell(epoch, ChangePhase.DECIDE, decided, now, 0)

    @contextmanager
    def _phase(self, epoch: int, phase: ChangePhase) -> Iterator[None]:
        begin = time.monotonic_ns()
        yield
        self._comm.observer.change_phase(epoch, phase, begin, time.monotonic_ns(), 0)


def agree(comm: Comm, words: list[int]) -> None:
    """Raises RanksDisagree on every rank unless all ranks hold the same words."""
    both = torch.tensor([words, [-w for w in words]], dtype=torch.int64)
    comm.all_reduce(both, comm.world, dist.ReduceOp.MAX)
    if not torch.equal(both[0], -both[1]):
        raise RanksDisagree(
            f"ranks do not stand at the same step and plan: largest {both[0].tolist()}, "
            f"smallest {(-both[1]).tolist()}, here {words} (step, epoch, plan digests)"
        )


def _is_kept(before: Vectors, after: Vectors) -> bool:
    """Every replica's content is what it was; all the same where replicas come or go."""
    if before.shape == after.shape:
        return bool((before == after).all())
    return bool((before == before[0]).all() and (after == before[0]).all())


def _bytes_lower_bound(old: list[Plane], new: list[Plane]) -> int:
    """Bytes that any change to these shares must move, over all planes and ranks.

    A plane that the job holds once has no choice of units left: what its keepers lack must move.
    """
    total = 0
    for a, b in zip(old, new, strict=True):
        model = a.placement.model
        if isinstance(a.placement, KeptPlacement):
            todo = moves_between(a.placement.held, b.placement.held, model)
            total += sum(m.numel for m in todo) * plane_bytes(a)
        else:
            bound = elements_lower_bound(a.placement.plan, b.placement.plan, model)
            total += bound * plane_bytes(a)
    return total


def _words(digest: str) -> tuple[int, int]:
    """16 hex digits as two words that survive a change of sign."""
    return int(digest[:8], 16), int(digest[8:], 16)
