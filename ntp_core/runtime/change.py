"""An allocation change at a step boundary: plan A to plan B in a running job, or back to A.

    quiesce   all ranks stand at the same step with the same plans (digests and epoch compared)
    regroup   groups of the new plan are created
    transfer  only missing blocks move; new tensors are built beside the old ones
    verify    fingerprint of every block and plane before = after, over all replicas; what came
              damaged is fetched again from other holders
    resume    the new tensors are adopted; or rollback: they are dropped, plan A stays

The old state is untouched until every rank knows that the new one is right. Ranks of plan A may be
gone, then the others give what they held; ranks may be new, then they hold nothing of plan A.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ntp_core.errors import PeerLost, RanksDisagree
from ntp_core.faults import When
from ntp_core.observe import ChangePhase, ChangeStatus
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.runtime.change_check import Vectors, bytes_lower_bound, is_kept, known_of
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex
from ntp_core.runtime.elastic.absent import Absent
from ntp_core.runtime.elastic.decision import Decisions
from ntp_core.runtime.optim.planes import (
    Plane,
    adopt_state,
    copies_agree,
    optimizer_steps,
    own_fingerprints,
    planes_of,
    share_fingerprints,
)
from ntp_core.runtime.parallel_model import ParallelModel
from ntp_core.runtime.shards import Placement
from ntp_core.runtime.sync.modes import SyncMode, groups_of
from ntp_core.runtime.transfer import Transferred, transfer

MAX_TRIES = 3
"""Transfers of one change before it is rolled back."""

At = Callable[[When], None]


class Changer:
    """Carries out proposals on one rank.

    Args:
        decisions: of this rank; a change is one.
        at: told of the points of a change at which deliberate faults may strike.
    """

    def __init__(
        self,
        comm: Comm,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int,
        mode: SyncMode = SyncMode.SEGMENTS,
        decisions: Decisions | None = None,
        at: At = lambda when: None,
    ) -> None:
        self._comm = comm
        self._model = model
        self._optimizer = optimizer
        self._seed = seed
        self._index = BlockIndex(model.units)
        self._mode = mode
        self._decisions = decisions or Decisions()
        self._at = at
        comm.ensure_groups(groups_of(model.shards, mode))

    def apply(
        self,
        proposal: Proposal,
        step: int,
        adopt: Callable[[Plan], None],
        present: Plan | None = None,
        holders: Collection[int] | None = None,
    ) -> bool:
        """Change to the proposal's plan; False when it was rolled back. Every rank takes part.

        Args:
            step: last committed step.
            adopt: called with the new plan once its tensors are in place.
            present: plan A, where this rank is new to it; default: the plan of the model.
            holders: ranks that hold what plan A gave them; default: all members it names. A rank
                that died and is back under its number does not.
        """
        old, new = present or self._model.shards.plan, proposal.plan
        self._comm.observer.change_begin(new.epoch, proposal.reason, old.digest, new.digest, step)
        try:
            return self._apply(proposal, step, adopt, old, holders or old.ranks)
        except (PeerLost, RanksDisagree):
            if not self._decisions.is_pending:  # otherwise it is not known yet
                self._fail(new.epoch)
            raise

    def _fail(self, epoch: int) -> None:
        self._comm.observer.change_end(epoch, ChangeStatus.FAILED, 0, 0, 0)

    def _apply(
        self,
        proposal: Proposal,
        step: int,
        adopt: Callable[[Plan], None],
        old: Plan,
        holders: Collection[int],
    ) -> bool:
        observer, new = self._comm.observer, proposal.plan
        living = set(holders).intersection(self._comm.world)
        if self._comm.is_leader:
            self._tell_prelude(proposal)
        with self._phase(new.epoch, ChangePhase.QUIESCE):
            agree(self._comm, [step, old.epoch, *_words(old.digest), *_words(new.digest)])
        placement = Placement(self._model.units, new, self._comm.rank)
        with self._phase(new.epoch, ChangePhase.REGROUP):
            self._comm.ensure_groups(groups_of(placement, self._mode))
        planes = self._planes(old, living)
        steps = optimizer_steps(self._comm, self._optimizer)
        own = own_fingerprints(planes, self._index, seed=self._seed)
        before = share_fingerprints(self._comm, planes, own, self._index)
        moved, after, total, good = self._bring(planes, own, before, new, living)
        bound = bytes_lower_bound(planes, moved.planes, living)  # now: `planes` follow the plan

        def act(words: torch.Tensor) -> None:
            is_good = not int(words[0])
            with self._phase(new.epoch, ChangePhase.RESUME if is_good else ChangePhase.ROLLBACK):
                if is_good:
                    self._commit(new, moved.planes, steps, adopt)
            status = ChangeStatus.COMMITTED if is_good else ChangeStatus.ROLLED_BACK
            verified = sum(v.size for v in after) if is_good else 0
            observer.change_end(new.epoch, status, total, bound, verified)

        self._at(When.BEFORE_ADOPTION)
        words = torch.tensor([float(not good)], dtype=torch.float64)
        self._decisions.take(self._comm, words, act, lambda: self._fail(new.epoch))
        self._at(When.AFTER_ADOPTION)
        return good

    def _planes(self, old: Plan, living: Collection[int]) -> list[Plane]:
        planes = planes_of(self._model.shards, self._optimizer)
        if self._comm.rank in living:
            return planes
        nowhere = Absent(self._model.units, old, self._comm.rank)
        return [
            Plane(
                p.name,
                nowhere,
                [
                    torch.zeros(s.shape, dtype=t.dtype, device=t.device)
                    for s, t in zip(nowhere.shards, p.tensors, strict=True)
                ],
            )
            for p in planes
        ]

    def _bring(
        self,
        planes: list[Plane],
        own: list[Vectors],
        before: list[Vectors],
        new: Plan,
        living: Collection[int],
    ) -> tuple[Transferred, list[Vectors], int, bool]:
        """Transfer until it is right: what came, its fingerprints, bytes of all ranks and tries."""
        known = [known_of(p.placement, self._index, living) for p in planes]
        total, good = 0, False
        for turn in range(MAX_TRIES):
            moved = self._transfer(planes, new, living, turn)
            with self._phase(new.epoch, ChangePhase.VERIFY):
                mine = own_fingerprints(
                    moved.planes, self._index, seed=self._seed, like=planes, known=own
                )
                after = share_fingerprints(self._comm, moved.planes, mine, self._index)
                silent = copies_agree(moved.planes, after, self._index, seed=self._seed)
                count, whole = self._totals(moved, silent)
            total += count
            good = whole and all(map(is_kept, before, after, known))
            if good:
                break
        return moved, after, total, good

    def _transfer(
        self, planes: list[Plane], new: Plan, living: Collection[int], turn: int
    ) -> Transferred:
        begin = time.monotonic_ns()
        self._at(When.IN_TRANSFER)
        moved = transfer(self._comm, planes, new, living, turn)
        self._comm.observer.change_phase(
            new.epoch, ChangePhase.TRANSFER, begin, time.monotonic_ns(), moved.bytes_received
        )
        return moved

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


def _words(digest: str) -> tuple[int, int]:
    """16 hex digits as two words that survive a change of sign."""
    return int(digest[:8], 16), int(digest[8:], 16)
