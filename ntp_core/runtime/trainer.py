"""One rank of the built-in training job: a Llama on bytes, with an inbox for proposals."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ntp_core.cost import Work
from ntp_core.job import TrainConfig
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.data import ByteText
from ntp_core.runtime.engine import Engine, StepOptions, StepResult
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.inbox import STOP, Inbox
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama


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
        self.config = config
        self.comm = comm
        self.text = text
        self.inbox = inbox or Inbox(None, comm.rank)
        group = TensorParallelGroup(comm, plan.replicas[plan.place(comm.rank)[0]].ranks)
        self.model = Llama(config.model, group, plan, comm.rank, config.seed)
        self.optimizer = _adamw(self.model, config)
        self.engine = Engine(
            self.model,
            self.optimizer,
            comm,
            work or config.model.work(config.seq),
            StepOptions(
                clip_norm=config.clip_norm, check_every=config.check_every, seed=config.seed
            ),
            faults,
            self.inbox.control,
        )

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.engine.plan

    @property
    def step(self) -> int:
        """The last committed step."""
        return self.engine.step

    def train(self, steps: int) -> Iterator[StepResult]:
        """Commit up to `steps` steps, taking proposals between them; ends early when told to."""
        for _ in range(steps):
            result = self.train_step()
            yield result
            if result.control & STOP:
                return
            self.take_proposal(result.control)

    def train_step(self) -> StepResult:
        """One committed step on this replica's sequences of the global batch."""
        step, seq = self.step + 1, self.config.seq
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * min(1.0, step / max(1, self.config.warmup))
        replicas, mine = self.plan.replicas, self.engine.replica
        first, count = sum(r.batch for r in replicas[:mine]), replicas[mine].batch
        return self.engine.train_step(
            [self.text.batch(step, first, count)],
            self.model.loss_sum,
            tokens=count * seq,
            global_tokens=self.plan.global_batch * seq,
        )

    def take_proposal(self, control: int) -> None:
        """Apply the proposal that rank 0 announced in `control`, if any."""
        proposal = self.inbox.take(control, self.comm, self.plan)
        if proposal is not None:
            self.engine.change(proposal)


def _adamw(model: Llama, config: TrainConfig) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
