"""Slows a process for real: stops it, again and again, for as long as its own work is to take more.

`python -m sidecar.demo.duty PID FACTOR` until its stdin closes, so that it can never outlive the
demo; the process is continued on every way out.

A fixed rhythm of stops would not do. Where neighbours crowd the host, a stopped process misses
little of what it would have got, so it is slowed less than meant; and a stop that falls into a wait
for others costs the same whatever the process had to do. So the time it is held is steered by what
its main thread got (`/proc/PID/schedstat`: nanoseconds on a processor and in the run queue;
https://docs.kernel.org/scheduler/sched-stats.html): for every millisecond of that it is held
FACTOR - 1 milliseconds, and while it waits for others it is let be.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

LOOK_EVERY_S = 0.001
LONGEST_HOLD_S = 0.05
"""More is held in several turns, with a millisecond between them: slow, never dead."""


class DutyCycle:
    """A running slow-down of one process. Use as a context manager, or call `stop`.

    Args:
        pid: whom to slow.
        factor: how many times longer its own work takes, over 1; waits for others do not count.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self.pid = pid
        command = [sys.executable, "-m", "sidecar.demo.duty", str(pid), str(factor)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun

    def stop(self) -> None:
        """Let the process run freely again."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        _send(self.pid, signal.SIGCONT)

    def __enter__(self) -> DutyCycle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def cycle(
    pid: int,
    factor: float,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Stop and continue `pid` until it is gone, or `wait` (of so many seconds) says to end."""
    first, held_s = _worked_s(pid), 0.0
    try:
        while not wait(LOOK_EVERY_S):
            if _sleeps(pid) and (factor - 1.0) * (_worked_s(pid) - first) <= held_s:
                continue  # being stopped is work too: whoever only waits for others is let be
            if not _send(pid, signal.SIGSTOP):
                return
            begin = clock()
            owed_s = (factor - 1.0) * (_worked_s(pid) - first) - held_s
            if owed_s > 0 and wait(min(owed_s, LONGEST_HOLD_S)):
                return
            _send(pid, signal.SIGCONT)
            held_s += clock() - begin if owed_s > 0 else 0.0
    finally:
        _send(pid, signal.SIGCONT)


def _sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return False


def _worked_s(pid: int) -> float:
    """Seconds the main thread had a processor or waited for one; 0 once it is gone."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return (int(ran) + int(queued)) / 1e9


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.write("\n")
    sys.stdout.flush()
    cycle(
        int(sys.argv[1]),
        float(sys.argv[2]),
        lambda seconds: bool(select.select([sys.stdin.fileno()], [], [], seconds)[0]),
    )
