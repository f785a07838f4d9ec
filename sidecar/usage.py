"""What the sidecar itself costs."""

from __future__ import annotations

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
