"""Deliberate faults, as data: for tests and the demo, never by default.

A rank obeys faults only when it was started with them; each says when (step and phase) and what.
Slowness is done to a rank from outside, by stopping and continuing its process.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from ntp_core.errors import InvalidInput
from ntp_core.observe import Observer
from ntp_core.runtime.shards import Shards


class FaultKind(IntEnum):
    """What is done."""

    FLIP_BIT = 1
    KILL = 2
    SLOW = 3  # done from outside; only noted here


class When(IntEnum):
    """Where in a step."""

    STEP_BEGIN = 1
    AFTER_FORWARD = 2
    AFTER_BACKWARD = 3
    BEFORE_OPTIMIZER = 4
    AFTER_OPTIMIZER = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one rank.

    Attributes:
        step: at this step, or at the next one when 0.
        when: where in the step.
        tensor, element, bit: what FLIP_BIT flips: a local element's bit of a named tensor.
    """

    kind: FaultKind
    rank: int
    step: int = 0
    when: When = When.STEP_BEGIN
    tensor: str = ""
    element: int = 0
    bit: int = 0


def flip_bit(
    rank: int, tensor: str, element: int, bit: int, step: int = 0, when: When = When.STEP_BEGIN
) -> Fault:
    """Flip one bit of one element of this rank's shard."""
    return Fault(
        kind=FaultKind.FLIP_BIT,
        rank=rank,
        step=step,
        when=when,
        tensor=tensor,
        element=element,
        bit=bit,
    )


def kill_at(rank: int, step: int, when: When) -> Fault:
    """SIGKILL the rank at a point of a step."""
    return Fault(kind=FaultKind.KILL, rank=rank, step=step, when=when)


def slow(rank: int, step: int = 0) -> Fault:
    """Only note that the rank is being slowed from outside."""
    return Fault(kind=FaultKind.SLOW, rank=rank, step=step)


def fault_file(folder: Path, rank: int) -> Path:
    """Where faults for a running rank are left."""
    return folder / f"fault-{rank}.json"


def leave_fault(folder: Path, fault: Fault) -> None:
    """Hand one fault to a running rank that was started with `obey`."""
    body = {k: getattr(fault, k) for k in Fault.__dataclass_fields__}
    path = fault_file(folder, fault.rank)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(body))
    draft.replace(path)


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
            self._pending.append(_read(self._path))
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


def _read(path: Path) -> Fault:
    body = json.loads(path.read_text())
    body["kind"], body["when"] = FaultKind(body["kind"]), When(body["when"])
    return Fault(**body)
