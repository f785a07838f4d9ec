"""One rank of a job that goes on while ranks die, stop, come back and join.

When a peer is lost the rank leaves all groups, meets the other survivors on the store, catches up
with what any of them has made final, and takes part in the change to the plan of those that are
there. Nothing is restarted. A rank that the others went on without drops what it holds and asks to
be let in again, like any newcomer.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store

from ntp_core.cost import Work
from ntp_core.errors import Fenced, NtpError, PeerLost, StateLost
from ntp_core.observe import ChangePhase, ChangeStatus
from ntp_core.plan import Plan
from ntp_core.planning.regroup import RegroupPolicy
from ntp_core.proposal import Proposal
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.elastic.membership import Hello, Membership, Round
from ntp_core.runtime.elastic.outcome import Outcome, decide, holds_state, stage_after
from ntp_core.runtime.engine import StepResult
from ntp_core.runtime.inbox import NEWCOMERS, STOP
from ntp_core.runtime.shards import Placement
from ntp_core.runtime.sync.modes import groups_of
from ntp_core.runtime.trainer import Trainer
from ntp_core.units import ModelUnits

MAX_ROUNDS = 64
"""Rounds in a row that come to nothing before a rank gives up."""
LOOK_S = 0.01
COMMITTED, SAVED = 0, 1
"""How far a rank is with what follows a step."""


class Make(Protocol):
    """Builds this rank's trainer; `is_new` without content, which others then bring."""

    def __call__(self, plan: Plan, work: Work | None, *, is_new: bool) -> Trainer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """How a job bears losses.

    Attributes:
        policy: when a replica is dropped.
        start_s: longest wait for all ranks at the start.
        join_s: longest wait for the others while a new generation is formed: they are all there.
    """

    policy: RegroupPolicy = field(default_factory=RegroupPolicy)
    start_s: float = 300.0
    join_s: float = 15.0


class ElasticRank:
    """Runs a job to its last step on one rank.

    Args:
        home: the job's first plan.
        units: of the model.
        steps: the last step to train.
        store: outside the ranks; it must outlive each of them.
        make: builds the trainer, once the rank knows the plan.
        look: called after each step of this rank.
    """

    def __init__(
        self,
        home: Plan,
        units: ModelUnits,
        steps: int,
        comm: Comm,
        store: Store,
        membership: Membership,
        make: Make,
        options: ElasticOptions | None = None,
        look: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        self.comm = comm
        self.losses: list[float] = []
        self._home = home
        self._steps = steps
        self._store = store
        self._membership = membership
        self._units = units
        self._make = make
        self._options = options or ElasticOptions()
        self._look = look
        self._trainer: Trainer | None = None
        self._is_new = self._is_torn = False
        self._stage = SAVED
        self._control = 0
        self._tried = 0
        comm.fence = lambda: membership.is_called(comm.generation + 1)

    @property
    def trainer(self) -> Trainer:
        """This rank's part of the job."""
        assert self._trainer is not None
        return self._trainer

    def run(self) -> list[float]:
        """Train to the end; the losses of all steps.

        Raises:
            StateLost: nothing is left to go on from.
            Fenced: the others went on without this rank and did not let it in again.
        """
        if self._membership.current() is None:
            self._start()
        else:
            self._join()
        while not self._is_over():
            self._survive(self._go_on)
        self._leave()
        return self.losses

    # -- the course of things

    def _start(self) -> None:
        self._membership.introduce(0)
        self.comm.join(self._store, self._home.ranks, 0, self._options.start_s)
        self._trainer = self._make(self._home, None, is_new=False)
        save = self.trainer.save_config
        if save is not None and save.resume and self.trainer.resume():
            self.losses = [math.nan] * self.trainer.step  # of steps made by an earlier start
        if self.comm.is_leader:
            self._membership.begin()

    def _is_over(self) -> bool:
        is_last = self.trainer.step >= self._steps or bool(self._control & STOP)
        return is_last and self._stage == SAVED

    def _go_on(self) -> None:
        """The next step, and what follows it."""
        if self._stage == SAVED:
            self.trainer.train_step()
            self._note()
        is_last = self.trainer.step >= self._steps or bool(self._control & STOP)
        self.trainer.save(is_last=is_last)
        self._stage = SAVED
        if is_last:
            return
        self.trainer.take_proposal(self._control)
        if self._control & NEWCOMERS:
            self._control = 0
            if self.trainer.has_divided_state:
                self.trainer.save(is_last=True)  # a newcomer cannot be dealt its part by peers
            self._regroup(is_planned=True)

    def _note(self) -> None:
        """A step is committed that was not known before."""
        result = self.trainer.engine.result
        if result is None or result.step <= len(self.losses):
            return
        self.losses.append(result.loss)
        self._stage, self._control = COMMITTED, result.control
        self._look(result)

    def _leave(self) -> None:
        """Nobody leaves before all have finished; whoever dies now was not needed any more."""
        with contextlib.suppress(PeerLost):
            self.comm.all_reduce(torch.zeros(1), self.comm.world)
        if self.comm.is_leader:
            self._membership.end()

    def _survive(self, act: Callable[[], None]) -> None:
        is_lost = is_fenced = False
        try:
            act()
        except PeerLost:
            is_lost = True
        except Fenced:
            is_fenced = True
        # Only out here: the error's frames keep the step's graph alive, made for other shapes.
        if is_lost:
            try:
                self._regroup()
            except Fenced:
                is_fenced = True
        if is_fenced:
            self._join()

    # -- membership

    def _regroup(self, *, is_planned: bool = False) -> None:
        """Go on with those who are there.

        Args:
            is_planned: all ranks stand between steps and nobody is lost.
        """
        detected_ns, lost = time.time_ns(), set(self.comm.world)
        for number in range(MAX_ROUNDS):
            self.comm.leave()
            try:
                found = self._membership.meet(
                    self.comm.generation + 1,
                    self._hello(),
                    self.comm.world,
                    partial(self._decide, lost, detected_ns, is_planned and number == 0),
                )
                self._enter(found)
                return
            except PeerLost:
                continue
        raise StateLost(f"{MAX_ROUNDS} rounds in a row came to nothing; is the network sound?")

    def _join(self) -> None:
        """Ask to be let in, without state."""
        self.comm.leave()
        self._trainer, self._is_new = None, True
        while True:
            found = self._membership.knock()
            try:
                self._enter(found)
                return
            except PeerLost:
                self.comm.leave()
                try:
                    self._regroup()
                    return
                except Fenced:
                    continue

    def _hello(self) -> Hello:
        m = self._membership
        if self._trainer is None:
            return Hello(rank=self.comm.rank, identity=m.identity, is_new=True, tried=self._tried)
        engine = self.trainer.engine
        return Hello(
            rank=self.comm.rank,
            identity=m.identity,
            is_new=self._is_new,
            decided=engine.decisions.count,
            is_pending=engine.decisions.is_pending,
            step=engine.step,
            stage=self._stage,
            epoch=engine.plan.epoch,
            tried=self._tried,
            is_torn=self._is_torn,
        )

    def _decide(
        self, before: set[int], detected_ns: int, is_planned: bool, found: Round
    ) -> dict[str, Any]:
        engine = self.trainer.engine
        return decide(
            found,
            present=engine.plan,
            home=self._home,
            before=before,
            units=engine.model.units,
            work=engine.work,
            speeds=engine.speeds,
            policy=self._options.policy,
            has_checkpoint=self.trainer.has_checkpoint,
            is_divided=self.trainer.has_divided_state,
            is_planned=is_planned,
            detected_ns=detected_ns,
            decided_ns=time.time_ns(),
        ).to_json()

    def _enter(self, found: Round) -> None:
        """Be a member of the generation that a round has formed."""
        outcome = Outcome.from_json(found.outcome)
        if outcome.lost:
            raise StateLost(outcome.lost)
        self._catch_up(found)
        if self.comm.rank not in outcome.members:
            raise Fenced(f"rank {self.comm.rank} stands by: it has no place in the plan")
        self._membership.introduce(found.generation)
        members = tuple(sorted(outcome.members))
        self.comm.join(self._store, members, found.generation, self._options.join_s)
        told = self._tell(outcome)
        present = Plan.from_json(told["present"]).with_epoch(outcome.present_epoch)
        self.comm.ensure_groups(groups_of(Placement(self._units, outcome.plan, self.comm.rank)))
        if self._trainer is None:
            self._trainer = self._make(outcome.plan, Work.from_json(told["work"]), is_new=True)
        if self._is_new:
            self._take_over(told, found)
        if outcome.restore:
            self._restore(outcome, present)
        else:
            holders = {h.rank for h in found.hellos.values() if holds_state(h, found)}
            self._change(outcome, present, holders, told["speeds"])
        self._is_new = False
        self._stage, self._control = stage_after(found), told["control"] & STOP
        if outcome.restore:
            self._stage = SAVED

    def _catch_up(self, found: Round) -> None:
        """Make final what any survivor has made final."""
        if self._trainer is None:
            return
        decisions = self.trainer.engine.decisions
        key = f"ntp/{found.generation}/words"
        behind = [h for h in found.hellos.values() if h.is_pending and h.decided < found.newest]
        ahead = [h.rank for h in found.survivors if h.decided == found.newest]
        if decisions.count == found.newest:
            decisions.drop()
            if behind and self.comm.rank == ahead[0]:
                self._store.set(key, json.dumps([w.hex() for w in decisions.words.tolist()]))
        elif decisions.is_pending and decisions.count == found.newest - 1:
            words = [float.fromhex(w) for w in json.loads(self._await(key, found.generation))]
            decisions.hear(torch.tensor(words, dtype=torch.float64))
            self._is_new = False
            self._note()
        elif not self._is_new:
            raise Fenced(f"rank {self.comm.rank} is {found.newest - decisions.count} steps behind")
        if self._is_new:
            self._trainer = None  # shaped for a plan that did not come into force

    def _await(self, key: str, generation: int) -> str:
        while not self._store.check([key]):
            if self._membership.is_called(generation + 1):
                raise PeerLost("the rank that knew the last decision is lost too")
            time.sleep(LOOK_S)
        return self._store.get(key).decode()

    # -- content

    def _tell(self, outcome: Outcome) -> dict[str, Any]:
        """What one survivor tells all, for those who are new."""
        data = None
        if self.comm.rank == outcome.speaker:
            engine = self.trainer.engine
            told = {
                "present": engine.plan.to_json(),
                "work": engine.work.to_json(),
                "step": engine.step,
                "losses": [x.hex() for x in self.losses],
                "control": self._control,
                "speeds": {str(g): v for g, v in engine.speeds.items()},
            }
            data = json.dumps(told).encode()
        body: dict[str, Any] = json.loads(self.comm.broadcast_bytes(data, outcome.speaker))
        return body

    def _take_over(self, told: dict[str, Any], found: Round) -> None:
        engine = self.trainer.engine
        engine.step, engine.decisions.count = told["step"], found.newest
        self.losses = [float.fromhex(x) for x in told["losses"]]

    def _change(
        self, outcome: Outcome, present: Plan, holders: set[int], speeds: dict[str, float]
    ) -> None:
        engine = self.trainer.engine
        self._tried = outcome.plan.epoch
        if not self._is_new:
            engine.plan = engine.model.shards.plan = present
        proposal = Proposal(
            base_digest=present.digest,
            plan=outcome.plan,
            reason=outcome.reason,
            detected_unix_ns=outcome.detected_ns,
            decided_unix_ns=outcome.decided_ns,
            speeds=_of_members(speeds, outcome.members),
        )
        if not engine.change(proposal, present, holders):
            raise StateLost("what the survivors hold could not be brought over bit by bit")

    def _restore(self, outcome: Outcome, present: Plan) -> None:
        """Go back to the last checkpoint, under the new plan."""
        observer, plan, begin = self.comm.observer, outcome.plan, time.monotonic_ns()
        observer.change_begin(
            plan.epoch, outcome.reason, present.digest, plan.digest, self.trainer.step
        )
        self._tried, self._is_torn = plan.epoch, True
        try:
            self.trainer.go_back(plan)
        except NtpError:
            observer.change_end(plan.epoch, ChangeStatus.FAILED, 0, 0, 0)
            raise
        self._is_torn = False
        observer.change_phase(plan.epoch, ChangePhase.RESTORE, begin, time.monotonic_ns(), 0)
        observer.change_end(plan.epoch, ChangeStatus.COMMITTED, 0, 0, 0)
        self.losses = self.losses[: self.trainer.step]


def _of_members(speeds: dict[str, float], members: tuple[int, ...]) -> dict[int, float]:
    """The speeds that shares are made for; a member of which nothing is known counts as typical."""
    return {g: speeds.get(str(g), median(speeds.values())) for g in members} if speeds else {}
