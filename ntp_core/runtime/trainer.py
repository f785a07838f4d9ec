"""One rank of the built-in training job: a Llama on bytes, with an inbox for proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ntp_core.cost import Work
from ntp_core.errors import CheckpointError
from ntp_core.job import SaveConfig, TrainConfig
from ntp_core.plan import Plan
from ntp_core.runtime.checkpoint.store import Checkpoints
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.data import ByteText
from ntp_core.runtime.engine import Engine, StepOptions, StepResult
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.inbox import STOP, Inbox
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama
from ntp_core.runtime.optim.adamw import DTYPES, PlaneAdamW, StateOptions
from ntp_core.runtime.shards import shards_of


class Trainer:
    """A rank's part of the job. All ranks build it with the same arguments but `comm`.

    Args:
        work: what units cost; default: by counting operations.
        save: where the state is saved; None for nowhere.
        control: the leader's word of each step; default: what the inbox says.
        is_new: this rank joins a running job (see `Engine`).
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
        save: SaveConfig | None = None,
        control: Callable[[], int] | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self.config = config
        self.comm = comm
        self.text = text
        self.inbox = inbox or Inbox(None)
        group = TensorParallelGroup(comm, plan.replicas[plan.place(comm.rank)[0]].ranks)
        self.model = Llama(config.model, group, plan, comm.rank, config.seed, is_new=is_new)
        self.model.recompute = config.recompute
        self.optimizer = _adamw(self.model, config, comm)
        self.save_config = save
        self.checkpoints: Checkpoints | None = None
        if save is not None:
            self.checkpoints = Checkpoints(
                Path(save.folder), comm, self.model, self.optimizer, keep=save.keep
            )
        self.engine = Engine(
            self.model,
            self.optimizer,
            comm,
            work or config.model.work(config.seq),
            StepOptions(
                clip_norm=config.clip_norm, check_every=config.check_every, seed=config.seed
            ),
            faults,
            control or self.inbox.control,
            is_new=is_new,
        )

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.engine.plan

    @property
    def step(self) -> int:
        """The last committed step."""
        return self.engine.step

    def resume(self) -> bool:
        """Go on from the latest checkpoint; False when there is none. Every rank takes part.

        Raises:
            CheckpointError: when it cannot be what this job goes on from.
        """
        if self.checkpoints is None:
            return False
        path = self.checkpoints.latest()
        if path is None:
            return False
        manifest = self.checkpoints.load(path)
        if manifest.seed != self.config.seed:
            raise CheckpointError(
                f"{path} was saved by a job of seed {manifest.seed}, this one has seed "
                f"{self.config.seed} and would not go on with the same data; set the seed"
            )
        self.engine.restore(manifest.step)
        return True

    def train(self, steps: int) -> Iterator[StepResult]:
        """Commit up to `steps` steps, taking proposals between them; ends early when told to."""
        for number in range(1, steps + 1):
            result = self.train_step()
            self.save(is_last=number == steps or bool(result.control & STOP))
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
            self.text.micro_batches(step, first, count, self.config.micro_batch),
            lambda b: self.model.loss_sum(b.tokens, step=b.step, first=b.first),
            tokens=count * seq,
            global_tokens=self.plan.global_batch * seq,
        )

    def take_proposal(self, control: int) -> None:
        """Apply the proposal that rank 0 announced in `control`, if any."""
        proposal = self.inbox.take(control, self.comm, self.plan, self.model.units)
        if proposal is not None:
            self.engine.change(proposal)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to go back to, as seen from this rank."""
        return self.checkpoints is not None and self.checkpoints.folder.latest() is not None

    @property
    def has_divided_state(self) -> bool:
        """Optimizer state is kept once in the job, so that a lost rank takes a part of it along."""
        return isinstance(self.optimizer, PlaneAdamW) and self.optimizer.is_dealt

    def go_back(self, plan: Plan) -> None:
        """To the latest checkpoint, under another plan. Every rank of it takes part.

        Raises:
            CheckpointError: there is none, or it is not what was saved.
        """
        shards = shards_of(self.model.units, plan, self.comm.rank)
        tensors = [
            torch.zeros(s.shape, dtype=p.dtype)
            for s, p in zip(shards, self.model.shards.params, strict=True)
        ]
        self.engine.start_over(plan, tensors)
        if not self.resume():
            raise CheckpointError("there is no checkpoint to go back to")

    def save(self, *, is_last: bool) -> None:
        """Save the state if it is due. Every rank takes part, between steps."""
        if self.checkpoints is None or self.save_config is None:
            return
        every = self.save_config.every
        if is_last or (every and self.step % every == 0):
            self.checkpoints.save(self.step, self.config.seed, self.config.to_json())


def _adamw(model: Llama, config: TrainConfig, comm: Comm) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    dtypes = DTYPES[config.param_dtype], DTYPES[config.grad_dtype]
    if config.zero or dtypes != (torch.float32, torch.float32):
        options = StateOptions(param_dtype=dtypes[0], grad_dtype=dtypes[1], zero=config.zero)
        return PlaneAdamW(groups, model.shards, comm, options, lr=config.lr, betas=config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
