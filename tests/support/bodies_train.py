"""Bodies that train a tiny job and tell what happened, with all that the rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ntp_core.faults import Fault
from ntp_core.job import TrainConfig
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import FILE_NAME, Proposal
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.inbox import Inbox
from ntp_core.runtime.optim.planes import planes_of as engine_planes
from ntp_core.runtime.trainer import Trainer
from tests.support.recording_observer import Call, RecordingObserver
from tests.support.tiny_job import text_for

Local = dict[str, torch.Tensor]


@dataclass(slots=True)
class Told:
    """What one rank did.

    Attributes:
        losses, norms, redone: by step.
        params: this rank's local parameters after each step.
        digest, epoch: of the plan in force at the end.
        calls: all that the observer was told.
        changes: for each change the three planes before and after it.
        refused: proposals that were set aside.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    params: list[Local] = field(default_factory=list)
    digest: str = ""
    epoch: int = 0
    calls: list[Call] = field(default_factory=list)
    changes: list[tuple[list[Local], list[Local]]] = field(default_factory=list)
    refused: int = 0


def train(
    comm: Comm,
    config: TrainConfig,
    plan: Plan,
    steps: int,
    faults: tuple[Fault, ...] = (),
    changes: tuple[tuple[int, Plan], ...] = (),
    folder: Path | None = None,
    leave: tuple[tuple[int, bytes], ...] = (),
) -> Told:
    """Train `steps` steps.

    Args:
        changes: (step, plan): a proposal of this plan is left for the job before that step.
        folder: the job's inbox; needed for changes and `leave`.
        leave: (step, content): left as a proposal before that step, whatever it is.
    """
    observer = RecordingObserver()
    comm.observer = observer
    trainer = Trainer(
        config,
        plan,
        comm,
        text_for(config),
        Faults(comm.rank, observer, faults),
        Inbox(folder),
    )
    told = Told()
    for step in range(1, steps + 1):
        if comm.rank == 0 and folder is not None:
            leave_plans(folder, trainer.plan, [p for s, p in changes if s == step])
            for content in (c for s, c in leave if s == step):
                (folder / FILE_NAME).write_bytes(content)
        _step(trainer, told, is_changing=any(s == step for s, _ in changes))
    told.digest, told.epoch = trainer.plan.digest, trainer.plan.epoch
    told.calls, told.refused = observer.calls, trainer.inbox.refused
    return told


def _step(trainer: Trainer, told: Told, *, is_changing: bool) -> None:
    result = trainer.train_step()
    told.losses.append(result.loss)
    told.norms.append(result.grad_norm)
    told.redone.append(result.redone)
    told.params.append(planes_of(trainer)[0])
    before = planes_of(trainer)
    trainer.take_proposal(result.control)
    if is_changing:
        told.changes.append((before, planes_of(trainer)))


def leave_plans(folder: Path, present: Plan, plans: list[Plan]) -> None:
    for plan in plans:
        proposal = Proposal(
            base_digest=present.digest,
            plan=plan.with_epoch(present.epoch + 1),
            reason=Reason.OPERATOR,
        )
        (folder / FILE_NAME).write_text(proposal.to_json())


def planes_of(trainer: Trainer) -> list[Local]:
    """Copies of this rank's parameters and of the optimizer's state, by tensor name."""
    names = [t.name for t in trainer.model.units.tensors]
    planes = engine_planes(trainer.model.shards, trainer.optimizer)
    return [{n: t.detach().clone() for n, t in zip(names, p.tensors, strict=True)} for p in planes]
