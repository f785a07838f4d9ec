"""Which process a rank is, so that others on its host can tell whether it lives, and how.

A process id may be given to another process; with its start time it is unique while the host runs.
Source: proc_pid_stat(5). On another host, or where /proc is missing, nothing can be told.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_STATE, _START = 0, 19  # fields after the command's closing parenthesis
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Life(Enum):
    """What can be seen of a process."""

    RUNS = "runs"
    STOPPED = "stopped"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of some host."""

    host: str
    pid: int
    start: str

    @classmethod
    def of_this_process(cls) -> Identity:
        """Ours."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Identity:
        """A process of this host that has not been waited for yet."""
        fields = _stat(pid)
        return cls(_host(), pid, fields[_START] if fields else "")

    def life(self) -> Life:
        """As seen from here, now."""
        if self.host != _host() or not self.start:
            return Life.UNKNOWN
        fields = _stat(self.pid)
        if not fields or fields[_START] != self.start or fields[_STATE] in "ZX":
            return Life.DEAD
        return Life.STOPPED if fields[_STATE] in "Tt" else Life.RUNS


def _host() -> str:
    """The running kernel and the process namespace: inside a container ids mean something else."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
