"""Bodies of an elastic job: ranks that die, stop or come, and what the others make of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ntp_core.cost import Work
from ntp_core.errors import Fenced, PeerLost, StateLost
from ntp_core.faults import Fault
from ntp_core.job import SaveConfig, TrainConfig
from ntp_core.plan import Plan
from ntp_core.planning.regroup import RegroupPolicy
from ntp_core.runtime.comm import Comm, Ranks
from ntp_core.runtime.elastic.loop import ElasticOptions, ElasticRank
from ntp_core.runtime.elastic.membership import Membership, Patience
from ntp_core.runtime.engine import StepResult
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.inbox import NEWCOMERS, Inbox
from ntp_core.runtime.trainer import Trainer
from tests.support.bodies_train import Local, planes_of
from tests.support.recording_observer import Call, RecordingObserver
from tests.support.tiny_job import text_for

PATIENCE = Patience(silent_s=20.0, stopped_s=0.5, newcomer_s=60.0)


@dataclass(slots=True)
class Told:
    """What one rank did.

    Attributes:
        losses: of all steps of the job, as this rank knows them.
        plan: in force at the end.
        planes: what it holds at the end.
        calls: all that the observer was told.
        error: what ended it early.
        at_step: the newest step that it has seen.
    """

    losses: list[float] = field(default_factory=list)
    plan: Plan | None = None
    planes: list[Local] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    error: str = ""
    at_step: int = 0


class DeafComm(Comm):
    """Loses the result of one decision, as a rank does whose peer dies at the wrong moment."""

    def listen_to(self, job: ElasticRank, deaf: tuple[int, int] | None) -> None:
        """Be deaf to the decision of that number, if any."""
        self._job, self._deaf = job, deaf

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Ranks, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """As it should be, but for the loss."""
        super().all_reduce(tensor, ranks, op)
        trainer = self._job._trainer if self._deaf is not None else None
        if trainer is not None and trainer.engine.decisions.is_pending:
            engine = trainer.engine
            if (engine.step, engine.decisions.count) == self._deaf:
                self._deaf = None
                raise PeerLost("of this test")
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happens to the job.

    Attributes:
        late: ranks that are not of the first plan.
        knock_after: generation that must have been formed before they knock.
        let_in_at: the job makes this step only once somebody has knocked, and lets in after it;
            0 lets in whenever.
        wake: (rank, step): a rank that has stopped runs on after that step of the others.
        deaf: rank -> (step, count): it takes part in that decision after the step and learns
            nothing of what came out.
        give_up_s: longest collective.
        patience_s: how long a rank without a place waits for one.
    """

    faults: tuple[Fault, ...] = ()
    late: tuple[int, ...] = ()
    knock_after: int = 0
    let_in_at: int = 0
    wake: tuple[int, int] | None = None
    least_part: float = 0.0
    deaf: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    give_up_s: float = 20.0
    patience_s: float = 60.0


class Actor:
    """One rank of the story."""

    def __init__(
        self, comm: Comm, config: TrainConfig, plan: Plan, story: Story, save: SaveConfig | None
    ) -> None:
        assert comm._store is not None
        store = PrefixStore("elastic", comm._store)
        self._config, self._story, self._save = config, story, save
        self._observer = RecordingObserver()
        self.told = Told(calls=self._observer.calls)
        self.comm = DeafComm(comm.rank, 1, self._observer, story.give_up_s)
        self._membership = Membership(
            store, comm.rank, replace(PATIENCE, newcomer_s=story.patience_s)
        )
        if comm.rank in story.late:
            after = story.knock_after
            store.wait([f"ntp/{after}/close" if after else "ntp/current"])
        self._store, self._plan = store, plan

    def play(self, steps: int) -> Told:
        """Train to the end, whatever happens."""
        options = ElasticOptions(policy=RegroupPolicy(least_part=self._story.least_part))
        units = self._config.model.units()
        self._job = ElasticRank(
            self._plan,
            units,
            steps,
            self.comm,
            self._store,
            self._membership,
            self._make,
            options,
            self._look,
        )
        self.comm.listen_to(self._job, self._story.deaf.get(self.comm.rank))
        try:
            self.told.losses = self._job.run()
        except (StateLost, Fenced) as error:
            self.told.error = f"{type(error).__name__}: {error}"
            return self.told
        self.told.plan, self.told.planes = self._job.trainer.plan, planes_of(self._job.trainer)
        self.comm.close()
        return self.told

    def _control(self) -> int:
        step, at = self._job.trainer.step + 1, self._story.let_in_at
        while step == at and not self._membership.has_newcomers():
            time.sleep(0.01)
        return NEWCOMERS if step >= at and self._membership.has_newcomers() else 0

    def _make(self, plan: Plan, work: Work | None, *, is_new: bool) -> Trainer:
        return Trainer(
            self._config,
            plan,
            self.comm,
            text_for(self._config),
            Faults(self.comm.rank, self._observer, self._story.faults),
            Inbox(None),
            work,
            self._save,
            self._control,
            is_new=is_new,
        )

    def _look(self, result: StepResult) -> None:
        self.told.at_step, wake = result.step, self._story.wake
        if wake is not None and result.step == wake[1] and self.comm.is_leader:
            stopped = self._membership.who(0, wake[0])
            assert stopped is not None
            os.kill(stopped.pid, signal.SIGCONT)


def elastic(
    comm: Comm,
    config: TrainConfig,
    plan: Plan,
    steps: int,
    story: Story,
    save: SaveConfig | None = None,
) -> Told:
    """One rank of an elastic job."""
    return Actor(comm, config, plan, story, save).play(steps)


def resumed(
    comm: Comm, config: TrainConfig, plan: Plan, save: SaveConfig, steps: int
) -> tuple[list[float], list[Local]]:
    """The oracle: go on under this plan from what was saved, in a job that never lost a rank.

    Returns the losses of the steps that it made, and what this rank holds after the last.
    """
    trainer = Trainer(config, plan, comm, text_for(config), save=save)
    trainer.resume()
    losses = [trainer.train_step().loss for _ in range(steps - trainer.step)]
    planes = planes_of(trainer)
    trainer.save(is_last=True)
    return losses, planes
