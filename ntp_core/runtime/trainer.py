"""One rank of a training job: steps that commit, checks between them, changes at their boundary.

A step is gradients, sync over replicas, comparison of replicas (when due), one shared clip
coefficient, AdamW. When the comparison finds a wrong rank it is repaired and the step's gradients
are computed again, so that nothing built on wrong bits is ever committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ntp_core.cost import Work
from ntp_core.errors import DivergenceUnresolved, PlanError
from ntp_core.faults import When
from ntp_core.job import TrainConfig
from ntp_core.observe import Phase, Value
from ntp_core.plan import Plan
from ntp_core.runtime.announce import announce_plan
from ntp_core.runtime.change import Changer
from ntp_core.runtime.clip import GradientClip
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.compare import ReplicaCheck
from ntp_core.runtime.data import ByteText
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.inbox import STOP, Inbox
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama
from ntp_core.runtime.repair import repair
from ntp_core.runtime.sync import GradientSync

MAX_REDOS = 3


@dataclass(slots=True)
class StepResult:
    """What a committed step was."""

    step: int
    loss: float
    grad_norm: float
    control: int
    redone: int


class Trainer:
    """A rank's part of the job. All ranks build it with the same arguments but `comm`.

    Args:
        work: what units cost; default: by counting operations.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        comm: Comm,
        text: ByteText,
        faults: Faults | None = None,
        inbox: Inbox | None = None,
        work: Work | None = None,
    ) -> None:
        if plan.ranks != comm.world:
            raise PlanError(
                f"the plan places ranks {list(plan.ranks)}, the job has {len(comm.world)} ranks. "
                "Start as many ranks as the plan places."
            )
        self.config = config
        self.comm = comm
        self.text = text
        self.observer = comm.observer
        self.faults = faults or Faults(comm.rank, comm.observer)
        self.inbox = inbox or Inbox(None, comm.rank)
        self.plan = plan
        self.step = 0
        group = TensorParallelGroup(comm, plan.replicas[plan.place(comm.rank)[0]].ranks)
        self.model = Llama(config.model, group, plan, comm.rank, config.seed)
        self.optimizer = _adamw(self.model, config)
        self.work = work or config.model.work(config.seq)
        self.changer = Changer(comm, self.model, self.optimizer, seed=config.seed)
        self.speeds: Mapping[int, float] = {}
        self._adopt(plan)
        self._announce()

    def train(self, steps: int) -> Iterator[StepResult]:
        """Commit up to `steps` steps, taking proposals between them; ends early when told to."""
        for _ in range(steps):
            result = self.train_step()
            yield result
            if result.control & STOP:
                return
            self.take_proposal(result.control)

    def train_step(self) -> StepResult:
        """One committed step."""
        step = self.step + 1
        begin = time.monotonic_ns()
        self._busy_ns = 0
        self.observer.step_begin(step)
        self.faults.at(step, When.STEP_BEGIN, self.model.shards)
        redone = 0
        while True:
            loss_sum, tokens = self._gradients(step)
            if self._replicas_agree(step):
                break
            redone += 1
            if redone > MAX_REDOS:
                raise DivergenceUnresolved(f"step {step} was repaired {MAX_REDOS} times in vain")
        loss, norm, control = self._commit(step, loss_sum)
        self.observer.value(Value.GRAD_NORM, step, norm)
        took = time.monotonic_ns() - begin
        self.observer.step_end(step, took, self._busy_ns, tokens, loss)
        return StepResult(step, loss, norm, control, redone)

    def take_proposal(self, control: int) -> None:
        """Apply the proposal that rank 0 announced in `control`, if any."""
        proposal = self.inbox.take(control, self.comm, self.plan)
        if proposal is None:
            return
        if self.changer.apply(proposal, self.step, self._adopt):
            self.speeds = proposal.speeds
            self._announce()

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self.sync = GradientSync(self.comm, self.model.shards)
        self.check = ReplicaCheck(self.comm, self.model.shards, self.config.seed)
        self.clip = GradientClip(self.comm, self.model.shards)
        replica = plan.place(self.comm.rank)[0]
        self._batch_first = sum(r.batch for r in plan.replicas[:replica])
        self._batch = plan.replicas[replica].batch
        self._speaks = plan.place(self.comm.rank)[1] == 0
        self._note_bits()

    def _gradients(self, step: int) -> tuple[float, int]:
        tokens_BT = self.text.batch(step, self._batch_first, self._batch)
        total = self.plan.global_batch * self.config.seq
        self.optimizer.zero_grad(set_to_none=True)
        with self._phase(step, Phase.FORWARD):
            loss = self.model.loss_sum(tokens_BT)
        self.faults.at(step, When.AFTER_FORWARD, self.model.shards)
        with self._phase(step, Phase.BACKWARD):
            (loss / total).backward()  # type: ignore[no-untyped-call]
        self.faults.at(step, When.AFTER_BACKWARD, self.model.shards)
        with self._phase(step, Phase.GRAD_SYNC):
            self.sync.run()
        return float(loss.detach()), self._batch * self.config.seq

    def _replicas_agree(self, step: int) -> bool:
        if not self._check_due(step):
            return True
        begin = time.monotonic_ns()
        found = self.check.compare()
        replica = self.plan.place(self.comm.rank)[0]
        if self._speaks:
            self.observer.fingerprint(step, replica, found.values[replica], self.check.index.total)
        self.observer.phase(step, Phase.CHECK, time.monotonic_ns() - begin)
        if not found.differences:
            return True
        self.check.forget()
        repaired = repair(self.comm, self.model.shards, self.plan, found, self.check, step)
        if repaired is None:
            return True
        self.plan = repaired
        self.model.shards.plan = repaired
        self._announce()
        return False

    def _commit(self, step: int, loss_sum: float) -> tuple[float, float, int]:
        self.faults.at(step, When.BEFORE_OPTIMIZER, self.model.shards)
        with self._phase(step, Phase.OPTIMIZER):
            shared = self.clip.share(
                loss_sum if self._speaks else 0.0,
                self.inbox.control() if self.comm.rank == 0 else 0,
            )
            limit = self.config.clip_norm
            if limit and shared.norm > limit:
                self.clip.scale(limit / shared.norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr * min(1.0, step / max(1, self.config.warmup))
            self.optimizer.step()
        self.faults.at(step, When.AFTER_OPTIMIZER, self.model.shards)
        self.step = step
        self._note_bits()
        tokens = self.plan.global_batch * self.config.seq
        return shared.loss_sum / tokens, shared.norm, shared.control

    def _announce(self) -> None:
        announce_plan(
            self.observer, self.plan, self.model.units, self.work, self.comm.rank, self.speeds
        )

    def _note_bits(self) -> None:
        if self._check_due(self.step + 1):
            self.check.remember()

    def _check_due(self, step: int) -> bool:
        every = self.config.check_every
        return bool(every) and step % every == 0 and len(self.plan.replicas) > 1

    @contextmanager
    def _phase(self, step: int, phase: Phase) -> Iterator[None]:
        begin, waited = time.monotonic_ns(), self.comm.wait_ns
        yield
        took = time.monotonic_ns() - begin
        self._busy_ns += took - (self.comm.wait_ns - waited)
        self.observer.phase(step, phase, took)


def _adamw(model: Llama, config: TrainConfig) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
