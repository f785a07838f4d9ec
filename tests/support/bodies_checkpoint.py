"""Bodies about checkpoints: save at one layout, load at another, and all that can go wrong."""

from __future__ import annotations

import os
import resource
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from ntp_core.errors import CheckpointError, PeerLost
from ntp_core.job import SaveConfig, TrainConfig
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.optim.adamw import PlaneAdamW
from ntp_core.runtime.trainer import Trainer
from tests.support.bodies_train import Local, planes_of
from tests.support.tiny_job import text_for


@dataclass(slots=True)
class Ran:
    """What one rank did: losses by step, planes and the optimizer's step counts at the end.

    Attributes:
        error: the CheckpointError that ended it.
    """

    losses: list[float]
    planes: list[Local]
    counts: list[int]
    error: str = ""


def trainer_of(
    comm: Comm, config: TrainConfig, plan: Plan, folder: Path, every: int = 0
) -> Trainer:
    """A job that saves into a folder."""
    save = SaveConfig(folder=str(folder), every=every, keep=2)
    return Trainer(config, plan, comm, text_for(config), save=save)


def run(
    comm: Comm, config: TrainConfig, plan: Plan, steps: int, folder: Path, every: int = 0
) -> Ran:
    """Go on from the folder's latest checkpoint, if there is one, up to step `steps`."""
    trainer = trainer_of(comm, config, plan, folder, every)
    losses: list[float] = []
    error = ""
    try:
        trainer.resume()
        losses += [r.loss for r in trainer.train(steps - trainer.step)]
    except CheckpointError as caught:
        error = str(caught)
    state, params = trainer.optimizer.state, trainer.model.shards.params
    if not isinstance(trainer.optimizer, PlaneAdamW):  # torch's leaves out what has no gradient
        params = [p for p in params if p.numel()]
    counts = [int(state[p]["step"]) for p in params if "step" in state[p]]
    return Ran(losses, planes_of(trainer), counts, error)


def load_each(
    comm: Comm, config: TrainConfig, plan: Plan, folders: list[Path]
) -> list[tuple[str, bool]]:
    """Try to load each of some folders; the error, and whether this rank's state stayed."""
    told = []
    for folder in folders:
        trainer = trainer_of(comm, config, plan, folder)
        before = planes_of(trainer)
        error = ""
        try:
            trainer.resume()
        except CheckpointError as caught:
            error = str(caught)
        after = planes_of(trainer)
        stayed = all(torch.equal(a[n], b[n]) for a, b in zip(before, after, strict=True) for n in a)
        told.append((error, stayed))
    return told


def save_on_full_disk(
    comm: Comm, config: TrainConfig, plan: Plan, folder: Path, rank: int
) -> tuple[str, int | None, list[float]]:
    """Save, then save again where one rank may write no more than 100 bytes into a file.

    Returns:
        The error, the step that `latest` then has, and losses of a step before and after.
    """
    trainer = trainer_of(comm, config, plan, folder)
    losses = [trainer.train_step().loss]
    assert trainer.checkpoints is not None
    trainer.checkpoints.save(1, config.seed)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    error = ""
    try:
        if comm.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        trainer.checkpoints.save(2, config.seed)
    except CheckpointError as caught:
        error = str(caught)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    losses.append(trainer.train_step().loss)
    latest = trainer.checkpoints.latest()
    return error, None if latest is None else trainer.checkpoints.load(latest).step, losses


def save_until_killed(
    comm: Comm, config: TrainConfig, plan: Plan, folder: Path, victim: int, delay_s: float
) -> int:
    """Save after every step; some time after the first save one rank is killed. Steps made here."""
    trainer = trainer_of(comm, config, plan, folder, every=1)
    try:
        for result in trainer.train(10**6):
            if result.step == 1 and comm.rank == victim:
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(delay_s, os.kill, kill).start()
    except PeerLost:  # a collective without the victim
        comm.close()  # frees a rank that waits for this one
        return trainer.step
    raise AssertionError("the victim lived on")


def change_between_saves(
    comm: Comm, config: TrainConfig, plan: Plan, changes: tuple[Plan, ...], folder: Path
) -> tuple[list[float], list[str]]:
    """A step and a save under each plan in turn, and a save right after each change.

    Returns:
        Losses, and the paths of all checkpoints: before and after each change.
    """
    trainer = trainer_of(comm, config, plan, folder)
    assert trainer.checkpoints is not None
    trainer.checkpoints._keep = 1000
    losses, paths = [], []
    for new in changes:
        losses.append(trainer.train_step().loss)
        paths.append(str(trainer.checkpoints.save(trainer.step, config.seed).path))
        proposal = Proposal(
            base_digest=trainer.plan.digest,
            plan=new.with_epoch(trainer.plan.epoch + 1),
            reason=Reason.OPERATOR,
        )
        assert trainer.engine.change(proposal)
        paths.append(str(trainer.checkpoints.save(trainer.step, config.seed).path))
    losses.append(trainer.train_step().loss)
    return losses, paths


def resave(comm: Comm, config: TrainConfig, plan: Plan, folder: Path) -> None:
    """Load the latest checkpoint and save it again."""
    trainer = trainer_of(comm, config, plan, folder)
    assert trainer.resume()
    assert trainer.checkpoints is not None
    trainer.checkpoints.save(trainer.step, config.seed)
