"""How long this thread wanted to run and could not.

A rank's own time is a good measure of its speed only where it has a processor to itself. On a busy
host every rank also waits for its turn, now this one, now that one, and would look slow in turn.
Linux tells a thread's time on a processor and its time in the run queue (`schedstat`; the fields
are those of Documentation/scheduler/sched-stats.rst). A process that is stopped, throttled by its
hardware or swapping is not in the run queue, so what really slows a rank stays in its own time.
"""

from __future__ import annotations

import os

SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorWait:
    """Reads the counters of the thread that made it. About 2 us a read; 0 where there are none."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def read(self) -> tuple[int, int]:
        """(nanoseconds on a processor, nanoseconds in the run queue), both growing."""
        if self._file < 0:
            return 0, 0
        try:
            ran, waited, *_ = os.pread(self._file, 96, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return 0, 0

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def queued_ns(busy_ns: int, before: tuple[int, int], after: tuple[int, int]) -> int:
    """How much of a stretch of own time went by in the run queue.

    Args:
        busy_ns: wall time of the stretch without its collectives.
        before, after: counters at its ends. Run-queue time right after a collective is in `after`
            too, so never more is taken than leaves the time that the thread really ran.
    """
    ran, waited = after[0] - before[0], after[1] - before[1]
    return max(0, min(waited, busy_ns - ran))
