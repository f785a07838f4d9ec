"""Deliberate faults, as data: for tests and the demo, never by default.

Each says when (step and phase) and what. Slowness is done to a rank from outside, by stopping and
continuing its process; here it is only noted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ntp_core.errors import InvalidInput
from ntp_core.inbound.ranges import check_whole
from ntp_core.inbound.regular_file import read_regular

MAX_FILE_BYTES = 65536
MAX_NAME_CHARS = 1024
_MOST = 1 << 53


class FaultKind(IntEnum):
    """What is done."""

    FLIP_BIT = 1
    KILL = 2
    SLOW = 3  # done from outside; only noted here
    STOP = 4  # until somebody sends SIGCONT


class When(IntEnum):
    """Where in a step."""

    STEP_BEGIN = 1
    AFTER_FORWARD = 2
    AFTER_BACKWARD = 3
    BEFORE_OPTIMIZER = 4
    AFTER_OPTIMIZER = 5
    IN_TRANSFER = 6  # of a change, before bytes are sent
    BEFORE_ADOPTION = 7  # verified, not yet decided
    AFTER_ADOPTION = 8


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


def stop_at(rank: int, step: int, when: When) -> Fault:
    """SIGSTOP the rank at a point of a step."""
    return Fault(kind=FaultKind.STOP, rank=rank, step=step, when=when)


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


def read_fault(path: Path) -> Fault:
    """Inverse of `leave_fault`. Raises OSError, or InvalidInput for what is no fault."""
    return parse_fault(read_regular(path, MAX_FILE_BYTES))


def parse_fault(data: bytes) -> Fault:
    """The fault that a file's content describes. Raises InvalidInput naming what is wrong."""
    try:
        body: dict[str, Any] = json.loads(data)
        tensor = body["tensor"]
        if not isinstance(tensor, str) or len(tensor) > MAX_NAME_CHARS:
            raise InvalidInput(f"tensor is no name of {MAX_NAME_CHARS} characters at most")
        return Fault(
            kind=FaultKind(check_whole("kind", body["kind"], 1, len(FaultKind))),
            when=When(check_whole("when", body["when"], 1, len(When))),
            rank=check_whole("rank", body["rank"], 0, _MOST),
            step=check_whole("step", body["step"], 0, _MOST),
            tensor=tensor,
            element=check_whole("element", body["element"], 0, _MOST),
            bit=check_whole("bit", body["bit"], 0, 31),
        )
    except InvalidInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"not a fault: {error!r}. Write it with leave_fault.") from error
