"""Steps that commit, of any parallel model.

A step is gradients, sync over replicas, comparison of replicas (when due), one shared clip
coefficient, optimizer. When the comparison finds a wrong rank it is repaired and the step's
gradients are computed again, so that nothing built on wrong bits is ever committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ntp_core.cost import Work
from ntp_core.errors import DivergenceUnresolved, PlanError
from ntp_core.faults import When
from ntp_core.observe import Phase, Value
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.runtime.announce import announce_plan
from ntp_core.runtime.change import Changer
from ntp_core.runtime.clip import GradientClip
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.compare import ReplicaCheck
from ntp_core.runtime.elastic.decision import Decisions
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.optim.planes import planes_of
from ntp_core.runtime.parallel_model import ParallelModel
from ntp_core.runtime.processor import ProcessorWait, queued_ns
from ntp_core.runtime.repair import repair
from ntp_core.runtime.sync.modes import Sync, SyncOptions, gradient_sync, groups_of

MAX_REDOS = 3

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How steps are made.

    Attributes:
        clip_norm: largest gradient norm, 0 for no clipping.
        check_every: steps between comparisons of replicas, 0 for none.
        seed: of the fingerprints.
        sync: how gradients are summed over replicas.
    """

    clip_norm: float = 0.0
    check_every: int = 10
    seed: int = 0
    sync: SyncOptions = field(default_factory=SyncOptions)


@dataclass(slots=True)
class StepResult:
    """What a committed step was. `loss` is the job's mean loss per token."""

    step: int
    loss: float
    grad_norm: float
    control: int
    redone: int


class Engine:
    """One rank's steps. All ranks build it with the same arguments but `comm`.

    Args:
        model: this rank's part of the model.
        optimizer: elementwise over the model's parameters.
        work: what units cost, for the observer.
        control: called once a step; the leader's word reaches every rank in `StepResult.control`.
        is_new: this rank joins a running job: it has the shape of the plan and not yet the content,
            which a `change` from the plan in force brings.

    Attributes:
        step: the last committed step.
        result: of it.
        decisions: steps and changes that this rank made final.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        work: Work,
        options: StepOptions | None = None,
        faults: Faults | None = None,
        control: Callable[[], int] = lambda: 0,
        *,
        is_new: bool = False,
    ) -> None:
        plan = model.shards.plan
        if plan.ranks != comm.world:
            raise PlanError(
                f"the plan places ranks {list(plan.ranks)}, the job has {len(comm.world)} ranks. "
                "Start as many ranks as the plan places."
            )
        self.model = model
        self.optimizer = optimizer
        self.comm = comm
        self.observer = comm.observer
        self.work = work
        self.options = options or StepOptions()
        self.faults = faults or Faults(comm.rank, comm.observer)
        self.step = 0
        self.plan = plan
        self.speeds: Mapping[int, float] = {}
        mode = self.options.sync.mode
        self.decisions = Decisions()
        self.result: StepResult | None = None
        self.changer = Changer(
            comm,
            model,
            optimizer,
            seed=self.options.seed,
            mode=mode,
            decisions=self.decisions,
            at=lambda when: self.faults.at(self.step, when, self.model.shards),
        )
        self._control = control
        self._busy_ns = self._queued_ns = 0
        self._processor = ProcessorWait()
        self._build(plan)
        if not is_new:
            self._announce()

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.plan.place(self.comm.rank)[0]

    def train_step(
        self,
        batches: Sequence[Batch],
        loss_sum: Callable[[Batch], torch.Tensor],
        *,
        tokens: int,
        global_tokens: int,
    ) -> StepResult:
        """One committed step.

        Args:
            batches: this replica's micro-batches, the same on all its ranks.
            loss_sum: forward; the sum (not mean) of losses over a micro-batch's tokens.
            tokens: this replica's tokens in the step.
            global_tokens: all replicas' tokens: gradients are those of the mean over them.

        Raises:
            DivergenceUnresolved: when repairs do not make the replicas agree.
        """
        step, begin = self.step + 1, time.monotonic_ns()
        self._busy_ns = self._queued_ns = 0
        self.observer.step_begin(step)
        self.faults.at(step, When.STEP_BEGIN, self.model.shards)
        redone = 0
        while True:
            loss = self._gradients(step, batches, loss_sum, global_tokens)
            if self._replicas_agree(step):
                break
            redone += 1
            if redone > MAX_REDOS:
                raise DivergenceUnresolved(f"step {step} was repaired {MAX_REDOS} times in vain")

        def act(words: torch.Tensor) -> None:
            self._commit(step, words, global_tokens, redone)
            took = time.monotonic_ns() - begin
            assert self.result is not None
            mean = self.result.loss
            self.observer.step_end(step, took, self._busy_ns, tokens, mean, self._queued_ns)

        self.faults.at(step, When.BEFORE_OPTIMIZER, self.model.shards)
        word = self._control() if self.comm.is_leader else 0
        with self._phase(step, Phase.OPTIMIZER):
            part = self.clip.vector(loss if self._speaks else 0.0, word)
        self.decisions.take(self.comm, part, act)
        assert self.result is not None
        return self.result

    def change(
        self,
        proposal: Proposal,
        present: Plan | None = None,
        holders: Collection[int] | None = None,
    ) -> bool:
        """Change to the proposal's plan between steps; False when it was rolled back.

        Args:
            present, holders: the plan in force, where this rank is new, and the ranks that hold
                what it gave them (see `Changer.apply`).
        """

        def adopt(plan: Plan) -> None:
            self._adopt(plan)
            self.speeds = proposal.speeds
            self._announce()

        return self.changer.apply(proposal, self.step, adopt, present, holders)

    def start_over(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take a plan and tensors without regard to what was: the content comes from elsewhere."""
        self.model.adopt(plan, tensors)
        self.comm.ensure_groups(groups_of(self.model.shards, self.options.sync.mode))
        self._adopt(plan)
        self._announce()

    def restore(self, step: int) -> None:
        """Stand after `step`: the content of model and optimizer is now that of a checkpoint."""
        self.step = step
        self.check.forget()
        self._note_bits()

    def _adopt(self, plan: Plan) -> None:
        self.sync.close()
        self._build(plan)

    def _build(self, plan: Plan) -> None:
        """What depends on the plan in force."""
        self.plan = plan
        self.sync: Sync = gradient_sync(self.comm, self.model.shards, self.options.sync)
        self.check = ReplicaCheck(self.comm, self.model.shards, self.options.seed)
        self.clip = GradientClip(self.comm, self.model.shards)
        self._speaks = plan.place(self.comm.rank)[1] == 0
        self._note_bits()

    def _gradients(
        self,
        step: int,
        batches: Sequence[Batch],
        loss_sum: Callable[[Batch], torch.Tensor],
        global_tokens: int,
    ) -> float:
        """Gradients of all micro-batches, summed over replicas; this replica's loss sum."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, batch in enumerate(batches, 1):
            with self._phase(step, Phase.FORWARD):
                loss = loss_sum(batch)
            self.faults.at(step, When.AFTER_FORWARD, self.model.shards)
            if number == len(batches):
                self.sync.arm()
            with self._phase(step, Phase.BACKWARD):
                (loss / global_tokens).backward()  # type: ignore[no-untyped-call]
            self.faults.at(step, When.AFTER_BACKWARD, self.model.shards)
            total += float(loss.detach())
        with self._phase(step, Phase.GRAD_SYNC):
            self.sync.run()
        return total

    def _replicas_agree(self, step: int) -> bool:
        if not self._check_due(step):
            return True
        begin = time.monotonic_ns()
        found = self.check.compare()
        if self._speaks:
            self.observer.fingerprint(
                step, self.replica, found.values[self.replica], self.check.index.total
            )
        self.observer.phase(step, Phase.CHECK, time.monotonic_ns() - begin)
        if not found.differences:
            return True
        self.check.forget()
        shards = self.model.shards
        planes = planes_of(shards, self.optimizer)
        repaired = repair(self.comm, shards, planes, found, self.check, step)
        if repaired is None:
            return True
        self.plan = self.model.shards.plan = repaired
        self._announce()
        return False

    def _commit(self, step: int, words: torch.Tensor, tokens: int, redone: int) -> None:
        """Clip and optimizer, as all ranks have decided."""
        with self._phase(step, Phase.OPTIMIZER):
            shared = self.clip.shared(words)
            limit = self.options.clip_norm
            if limit and shared.norm > limit:
                self.clip.scale(limit / shared.norm)
            self.optimizer.step()
        self.faults.at(step, When.AFTER_OPTIMIZER, self.model.shards)
        self.step = step
        self._note_bits()
        self.observer.value(Value.GRAD_NORM, step, shared.norm)
        mean = shared.loss_sum / tokens
        self.result = StepResult(step, mean, shared.norm, shared.control, redone)

    def _announce(self) -> None:
        announce_plan(
            self.observer, self.plan, self.model.units, self.work, self.comm.rank, self.speeds
        )

    def _note_bits(self) -> None:
        if self._check_due(self.step + 1):
            self.check.remember()

    def _check_due(self, step: int) -> bool:
        every = self.options.check_every
        return bool(every) and step % every == 0 and self.check.has_peers

    @contextmanager
    def _phase(self, step: int, phase: Phase) -> Iterator[None]:
        begin, waited, before = time.monotonic_ns(), self.comm.wait_ns, self._processor.read()
        yield
        took = time.monotonic_ns() - begin
        busy = took - (self.comm.wait_ns - waited)
        self._busy_ns += busy
        self._queued_ns += queued_ns(busy, before, self._processor.read())
        self.observer.phase(step, phase, took)
