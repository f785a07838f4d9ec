"""Slows a process for real: stops it for a part of every few milliseconds.

`python -m sidecar.demo.duty PID ON_MS OFF_MS` until its stdin closes, so that it can never outlive
the demo; the process is continued on every way out. Short periods behave like a slower clock, long
ones like an intermittent fault.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from types import TracebackType


class DutyCycle:
    """A running slow-down of one process. Use as a context manager, or call `stop`."""

    def __init__(self, pid: int, on_ms: float, off_ms: float) -> None:
        self.pid = pid
        command = [sys.executable, "-m", "sidecar.demo.duty", str(pid), str(on_ms), str(off_ms)]
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


def cycle(pid: int, on_s: float, off_s: float, stdin: int) -> None:
    """Stop and continue `pid` until `stdin` closes or the process is gone."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
        while _send(pid, signal.SIGSTOP):
            if select.select([stdin], [], [], off_s)[0]:
                return
            if not _send(pid, signal.SIGCONT) or select.select([stdin], [], [], on_s)[0]:
                return
    finally:
        _send(pid, signal.SIGCONT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cycle(int(sys.argv[1]), float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3, sys.stdin.fileno())
