"""Bodies about changes that go wrong: bytes that change in flight, ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ntp_core.errors import RanksDisagree
from ntp_core.job import TrainConfig
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.trainer import Trainer
from tests.support.bodies_train import Told, train
from tests.support.tiny_job import text_for

Damage = Callable[[torch.Tensor], torch.Tensor]


def flip_bit(data: torch.Tensor) -> torch.Tensor:
    """One bit in the middle is another."""
    damaged = data.clone()
    damaged[len(data) // 2] ^= 1
    return damaged


def lose_end(data: torch.Tensor) -> torch.Tensor:
    """The last bytes did not come."""
    return data[:-4]


class DamagingComm(Comm):
    """Damages the first bytes that one rank receives through `all_to_all`, in so many calls."""

    def __init__(self, comm: Comm, rank: int, damage: Damage, times: int) -> None:
        self.__dict__.update(vars(comm))  # the same groups
        self._damage = damage
        self._left = times if comm.rank == rank else 0
        self.damaged = 0

    def all_to_all(self, send: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it should be, but for the damage."""
        received = super().all_to_all(send)
        for source, data in enumerate(received):
            if self._left and len(data):
                received[source] = self._damage(data)
                self._left -= 1
                self.damaged += 1
                break
        return received


def train_with_damage(
    comm: Comm,
    config: TrainConfig,
    plan: Plan,
    steps: int,
    changes: tuple[tuple[int, Plan], ...],
    folder: Path,
    rank: int,
    damage: Damage,
    times: int,
) -> tuple[Told, int]:
    """Train through changes whose transfer is damaged on one rank; and how often it was."""
    damaging = DamagingComm(comm, rank, damage, times)
    told = train(damaging, config, plan, steps, changes=changes, folder=folder)
    return told, damaging.damaged


def disagree(
    comm: Comm, config: TrainConfig, plan: Plan, wanted: list[Plan], steps_ahead: list[int]
) -> tuple[str, list[float]]:
    """Each rank wants a change of its own; the error it got, and losses before and after."""
    trainer = Trainer(config, plan, comm, text_for(config))
    losses = [trainer.train_step().loss]
    new = wanted[comm.rank].with_epoch(plan.epoch + 1)
    proposal = Proposal(base_digest=plan.digest, plan=new, reason=Reason.OPERATOR)
    message = ""
    try:
        step = trainer.step + steps_ahead[comm.rank]
        trainer.engine.changer.apply(proposal, step, adopt=lambda plan: None)
    except RanksDisagree as error:
        message = str(error)
    losses.append(trainer.train_step().loss)
    return message, losses
