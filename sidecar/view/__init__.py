"""The job as the dicts of docs/api.md: pure functions of state, incidents and check rows.

The page, the JSON API, the event stream and `ntp-sidecar top` all show these dicts. What is unknown
is None. No I/O and no clock here: `now_ns` is the monotonic clock of the records, and
`unix_offset_ns` added to it gives unix time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sidecar.incidents.incident import Incident
from sidecar.ingest.state import JobState
from sidecar.view.allocation import changes_view, plan_view
from sidecar.view.incidents import CheckRow, checks_view, incidents_view
from sidecar.view.job import PROGRESS_LIMIT_NS, job_view
from sidecar.view.ranks import ranks_view

__all__ = [
    "CheckRow",
    "changes_view",
    "checks_view",
    "incidents_view",
    "job_view",
    "plan_view",
    "ranks_view",
    "snapshot_view",
]


def snapshot_view(
    job: JobState,
    incidents: Sequence[Incident],
    checks: Iterable[CheckRow],
    *,
    now_ns: int,
    unix_offset_ns: int,
    progress_limit_ns: int = PROGRESS_LIMIT_NS,
) -> dict[str, Any]:
    """All that a reader shows: keys job, ranks, plan, changes, incidents, checks."""
    return {
        "job": job_view(job, incidents, now_ns=now_ns, progress_limit_ns=progress_limit_ns),
        "ranks": ranks_view(job, incidents, now_ns=now_ns),
        "plan": plan_view(job.plan),
        "changes": changes_view(job, unix_offset_ns=unix_offset_ns),
        "incidents": incidents_view(incidents),
        "checks": checks_view(checks, incidents),
    }
