"""Carries out deliberate faults inside a rank, when it was started to obey them.

A fault left in the folder that makes no sense, or that cannot be carried out here, is refused with
a line; it never ends the job.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from ntp_core.errors import InvalidInput
from ntp_core.faults import (
    MAX_FILE_BYTES,
    Fault,
    FaultKind,
    When,
    fault_file,
    parse_fault,
)
from ntp_core.inbound.letter import Letter
from ntp_core.observe import Observer
from ntp_core.runtime.shards import Shards

MAX_LEFT = 64
"""Faults that wait for their step; a further one is refused."""


class Faults:
    """The faults of one rank: given at the start, and left in a folder while it runs."""

    def __init__(
        self,
        rank: int,
        observer: Observer,
        given: tuple[Fault, ...] = (),
        folder: Path | None = None,
    ) -> None:
        self._rank = rank
        self._observer = observer
        self._pending = [f for f in given if f.rank == rank]
        self._left: list[Fault] = []
        self._letter = None if folder is None else Letter(fault_file(folder, rank), MAX_FILE_BYTES)
        self.fired = 0
        self.refused = 0

    def at(self, step: int, when: When, shards: Shards) -> None:
        """Carry out what is due here.

        Raises:
            InvalidInput: a fault given at the start cannot be carried out.
        """
        if when is When.STEP_BEGIN and self._letter is not None and self._letter.is_there():
            self._open_letter(self._letter)
        for fault in _take_due(self._pending, step, when):
            self._carry_out(step, fault, shards)
        for fault in _take_due(self._left, step, when):
            try:
                self._carry_out(step, fault, shards)
            except (InvalidInput, RuntimeError) as error:  # torch refuses some views
                self._refuse(str(error))

    def _open_letter(self, letter: Letter) -> None:
        try:
            fault = parse_fault(letter.read())
            if fault.rank != self._rank:
                raise InvalidInput(f"it is for rank {fault.rank}")
            if len(self._left) >= MAX_LEFT:
                raise InvalidInput(f"{MAX_LEFT} faults wait for their step already")
        except (OSError, InvalidInput) as error:
            self._refuse(str(error))
            letter.set_aside(str(error))
            return
        letter.clear()
        self._left.append(fault)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        sys.stderr.write(f"rank {self._rank}: a fault is refused: {why}\n")

    def _carry_out(self, step: int, fault: Fault, shards: Shards) -> None:
        if fault.kind is FaultKind.FLIP_BIT:
            _flip(shards, fault)
        self.fired += 1
        self._observer.fault_injected(step, fault.kind, self._rank, fault.bit)
        if fault.kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind is FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)


def _take_due(faults: list[Fault], step: int, when: When) -> list[Fault]:
    due = [f for f in faults if f.when is when and f.step in (0, step)]
    for fault in due:
        faults.remove(fault)
    return due


def _flip(shards: Shards, fault: Fault) -> None:
    for shard, param in shards:
        if shard.spec.name == fault.tensor:
            words = param.data.view(-1).view(torch.int32)
            if fault.element >= len(words):
                raise InvalidInput(
                    f"{fault.tensor} has {len(words)} elements here, not {fault.element + 1}"
                )
            words[fault.element] ^= (1 << fault.bit) - (1 << 32 if fault.bit == 31 else 0)
            return
    raise InvalidInput(f"no tensor '{fault.tensor}' to flip a bit of")
