"""Bodies about optimizer state and activations: masters, dealt state, dropout, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ntp_core.job import TrainConfig
from ntp_core.plan import Plan
from ntp_core.runtime.activation.dropout import Draws, UnitDropout
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.inbox import Inbox
from ntp_core.runtime.optim.adamw import PlaneAdamW, cast_errors, state_bytes
from ntp_core.runtime.shards import Shards
from ntp_core.runtime.trainer import Trainer
from tests.support.bodies_train import Local, leave_plans, planes_of
from tests.support.recording_observer import Call, RecordingObserver
from tests.support.tiny_job import text_for

Micro = tuple[int, torch.Tensor]  # number of the first sequence in the global batch, tokens


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
) -> Told:
    """Train `steps` steps and look at the state after each; `changes` as in `bodies_train`."""
    observer = RecordingObserver()
    comm.observer = observer
    trainer = Trainer(config, plan, comm, text_for(config), inbox=Inbox(folder, comm.rank))
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


def train_with_dropout(
    comm: Comm, config: TrainConfig, plan: Plan, steps: int, rate: float
) -> tuple[list[float], list[Local]]:
    """Losses and parameters by step of a job that drops hidden FFN columns."""
    trainer = Trainer(config, plan, comm, text_for(config))
    draws = Draws(config.seed)
    for i, layer in enumerate(trainer.model.layers):
        assert isinstance(layer.down, nn.Module)
        drop = UnitDropout(rate, draws, i, _columns(trainer.model.shards, i))
        layer.down.register_forward_pre_hook(_hook(drop))
    r = plan.replicas[plan.place(comm.rank)[0]]
    start = sum(x.batch for x in plan.replicas[: plan.place(comm.rank)[0]])
    size = config.micro_batch or r.batch
    losses, params = [], []
    for step in range(1, steps + 1):

        def loss_sum(micro: Micro, step: int = step) -> torch.Tensor:
            draws.at(step, micro[0], len(micro[1]))
            return trainer.model.loss_sum(micro[1])

        micros = [
            (first, trainer.text.batch(step, first, min(size, start + r.batch - first)))
            for first in range(start, start + r.batch, size)
        ]
        result = trainer.engine.train_step(
            micros,
            loss_sum,
            tokens=r.batch * config.seq,
            global_tokens=plan.global_batch * config.seq,
        )
        losses.append(result.loss)
        params.append(planes_of(trainer)[0])
    return losses, params


def _columns(shards: Shards, layer: int) -> Callable[[], torch.Tensor]:
    name = f"layers.{layer}.down.weight"

    def columns() -> torch.Tensor:
        return next(s for s in shards.shards if s.spec.name == name).logical_index()

    return columns


def _hook(drop: UnitDropout) -> Callable[[nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
    return lambda _module, inputs: (drop(inputs[0]),)


def _note(told: Told, trainer: Trainer, loss: float, norm: float) -> None:
    told.losses.append(loss)
    told.norms.append(norm)
    told.params.append(planes_of(trainer)[0])
    told.wrong += _wrong(trainer)


def _wrong(trainer: Trainer) -> int:
    optimizer = trainer.optimizer
    return sum(cast_errors(optimizer).values()) if isinstance(optimizer, PlaneAdamW) else 0
