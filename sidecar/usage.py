"""What the sidecar itself costs, and how many files it may hold open."""

from __future__ import annotations

import contextlib
import resource
import time
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # psutil ships no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Processor time (user and system, seconds) and memory of this process at one moment."""

    at_s: float
    cpu_s: float
    resident_bytes: int

    @classmethod
    def now(cls) -> Usage:
        """As the system counts it. `at_s` is the monotonic clock."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        memory = int(psutil.Process().memory_info().rss)
        return cls(
            at_s=time.monotonic(), cpu_s=used.ru_utime + used.ru_stime, resident_bytes=memory
        )


def raise_file_limit() -> None:
    """Raise this process' soft limit of open files to the hard one; each ring takes one.

    Where that is not allowed the limit stays: fewer rings are watched then, and counted.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
