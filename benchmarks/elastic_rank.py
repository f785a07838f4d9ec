"""What a rank of the elastic benchmarks tells: one line of JSON for each step and change.

All times are `time.monotonic_ns()`, one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ntp_core.observe import ChangePhase, ChangeStatus, NullObserver, Reason

FOLDER = "NTP_BENCH_EVENTS"


class EventFile(NullObserver):
    """Appends to a file of its own."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank-{rank}-{os.getpid()}.jsonl").open("w", buffering=1)
        self._me = {"rank": rank, "pid": os.getpid()}

    def step_end(
        self,
        step: int,
        duration_ns: int,
        busy_ns: int,
        tokens: int,
        loss: float,
        queued_ns: int = 0,
    ) -> None:
        """One committed step."""
        self._tell("step", step=step, took=duration_ns, busy=busy_ns - queued_ns, loss=loss)

    def plan(self, epoch: int, digest: str, text: str, work: float) -> None:
        """A plan is in force."""
        self._tell("plan", epoch=epoch, text=text)

    def divergence(
        self, step: int, blame: int, replica: int, rank: int, tensor: int, unit: int
    ) -> None:
        """Replicas differ."""
        self._tell("divergence", step=step, of=rank)

    def change_begin(self, epoch: int, reason: int, old: str, new: str, step: int) -> None:
        """A change starts."""
        self._tell("begin", epoch=epoch, reason=Reason(reason).name, step=step, new=new)

    def change_phase(
        self, epoch: int, phase: int, begin_ns: int, end_ns: int, num_bytes: int
    ) -> None:
        """A part of it is over."""
        name = ChangePhase(phase).name
        took = end_ns - begin_ns
        self._tell("phase", epoch=epoch, phase=name, begin=begin_ns, took=took, bytes=num_bytes)

    def change_end(
        self, epoch: int, status: int, bytes_moved: int, bytes_lower_bound: int, units: int
    ) -> None:
        """It is over."""
        status_name = ChangeStatus(status).name
        self._tell(
            "end", epoch=epoch, status=status_name, moved=bytes_moved, bound=bytes_lower_bound
        )

    def _tell(self, kind: str, **fields: Any) -> None:
        body = {"kind": kind, "t": time.monotonic_ns(), **self._me, **fields}
        self._file.write(json.dumps(body) + "\n")


def observer() -> EventFile:
    """Named by NTP_OBSERVER."""
    return EventFile(Path(os.environ[FOLDER]), int(os.environ["RANK"]))


class Tail:
    """Reads what the ranks have told since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines only: a rank may be killed inside one."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = start + len(whole)
            yield from map(json.loads, whole.splitlines())
