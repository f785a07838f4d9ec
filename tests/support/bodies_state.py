"""Bodies about optimizer state: masters, dealt state, the way gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ntp_core.job import TrainConfig
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.engine import Engine
from ntp_core.runtime.inbox import Inbox
from ntp_core.runtime.optim.adamw import PlaneAdamW, cast_errors, state_bytes
from ntp_core.runtime.sync.modes import SyncOptions
from ntp_core.runtime.trainer import Trainer
from tests.support.bodies_train import Local, leave_plans, planes_of
from tests.support.recording_observer import Call, RecordingObserver
from tests.support.tiny_job import text_for


@dataclass(slots=True)
class Told:
    """What one rank did.

    Attributes:
        losses, norms, params: by step.
        wrong: elements that were not their master rounded, over all steps.
        state_bytes: of optimizer state at the end.
        calls: all that the observer was told.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: list[Local] = field(default_factory=list)
    planes: list[Local] = field(default_factory=list)
    wrong: int = 0
    state_bytes: int = 0
    calls: list[Call] = field(default_factory=list)


def train(
    comm: Comm,
    config: TrainConfig,
    plan: Plan,
    steps: int,
    changes: tuple[tuple[int, Plan], ...] = (),
    folder: Path | None = None,
    sync: SyncOptions | None = None,
) -> Told:
    """Train `steps` steps and look at the state after each; `changes` as in `bodies_train`."""
    observer = RecordingObserver()
    comm.observer = observer
    trainer = Trainer(config, plan, comm, text_for(config), inbox=Inbox(folder))
    if sync is not None:
        _sync_by(trainer, sync)
    told = Told()
    for step in range(1, steps + 1):
        if comm.rank == 0 and folder is not None:
            leave_plans(folder, trainer.plan, [p for s, p in changes if s == step])
        result = trainer.train_step()
        _note(told, trainer, result.loss, result.grad_norm)
        trainer.take_proposal(result.control)
        told.wrong += _wrong(trainer)
    told.planes, told.calls = planes_of(trainer), observer.calls
    told.state_bytes = state_bytes(trainer.optimizer)
    return told


def _sync_by(trainer: Trainer, sync: SyncOptions) -> None:
    """Let the trainer sum gradients in another way."""
    old = trainer.engine
    old.sync.close()
    options = replace(old.options, sync=sync)
    trainer.engine = Engine(trainer.model, trainer.optimizer, trainer.comm, old.work, options)


def spoil(comm: Comm, config: TrainConfig, plan: Plan) -> list[dict[str, int]]:
    """What the look at the masters finds before and after one parameter changes at rest."""
    trainer = Trainer(config, plan, comm, text_for(config))
    trainer.train_step()
    assert isinstance(trainer.optimizer, PlaneAdamW)
    found = [cast_errors(trainer.optimizer)]
    for shard, param in trainer.model.shards:
        if shard.spec.name == "layers.0.q.weight" and param.numel():
            param.data.view(torch.int16).view(-1)[-1] ^= 1
    found.append(cast_errors(trainer.optimizer))
    return found


def _note(told: Told, trainer: Trainer, loss: float, norm: float) -> None:
    told.losses.append(loss)
    told.norms.append(norm)
    told.params.append(planes_of(trainer)[0])
    told.wrong += _wrong(trainer)


def _wrong(trainer: Trainer) -> int:
    optimizer = trainer.optimizer
    return sum(cast_errors(optimizer).values()) if isinstance(optimizer, PlaneAdamW) else 0
