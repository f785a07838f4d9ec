"""Whether the processes behind the rings still run.

A rank is alive while the very process that wrote its ring runs: pid and start time must both
match, and a zombie counts as dead. A ring's age says nothing: a rank in a long step writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sidecar.ingest.state import JobState
from sidecar.wire.ring import RingHeader

IsRunning = Callable[[int, int], bool]


def update_liveness(job: JobState, seen: Iterable[tuple[RingHeader, bool]]) -> None:
    """Set `alive` of the rank behind each ring, as seen. Once dead, a process stays dead."""
    for header, runs in seen:
        state = job.ranks.get(header.global_rank)
        if state is None or state.pid != header.pid or state.alive is False:
            continue
        state.alive = runs
