"""Carries out deliberate faults inside a rank, when it was started to obey them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from ntp_core.errors import InvalidInput
from ntp_core.faults import Fault, FaultKind, When, fault_file, read_fault
from ntp_core.observe import Observer
from ntp_core.runtime.shards import Shards


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
        self._path = None if folder is None else fault_file(folder, rank)
        self.fired = 0

    def at(self, step: int, when: When, shards: Shards) -> None:
        """Carry out what is due here."""
        if when is When.STEP_BEGIN and self._path is not None and self._path.exists():
            self._pending.append(read_fault(self._path))
            self._path.unlink()
        due = [f for f in self._pending if f.when is when and f.step in (0, step)]
        for fault in due:
            self._pending.remove(fault)
            self.fired += 1
            self._observer.fault_injected(step, fault.kind, self._rank, fault.bit)
            if fault.kind is FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind is FaultKind.FLIP_BIT:
                _flip(shards, fault)


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
