"""Whether neighbours on this machine kept processes from working: then their speed says nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

LEAST_OF_FAIR = 0.75


def processor_times_ns(pid: int) -> tuple[int, int]:
    """How long a process had a processor, and how long it was ready and waited for one (Linux)."""
    on, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(on), int(waited)


@contextmanager
def skip_when_starved(pids: Mapping[int, int]) -> Iterator[None]:
    """Skip a test that fails while ranks got clearly less processor than an idle machine gives.

    A rank that is kept waiting is slow, for real, and to name it is right. Where nothing may be
    skipped (tests/conftest.py) the skip is a failure.

    Args:
        pids: rank -> process.
    """
    before = {rank: processor_times_ns(pid) for rank, pid in pids.items()}
    fair = min(1.0, len(os.sched_getaffinity(0)) / len(pids))
    try:
        yield
    except (AssertionError, TimeoutError) as error:
        got = {}
        for rank, pid in pids.items():
            on, waited = (b - a for a, b in zip(before[rank], processor_times_ns(pid), strict=True))
            got[rank] = round(on / max(1, on + waited), 2)
        if min(got.values()) < LEAST_OF_FAIR * fair:
            what = str(error).partition("\n")[0]
            pytest.skip(f"of the time they could run, ranks got {got}, fair is {fair:.2f}; {what}")
        raise
