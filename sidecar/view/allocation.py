"""The plan in force and the changes that led to it: `/api/v1/plan` and `/api/v1/changes`."""

from __future__ import annotations

from typing import Any

from ntp_core.inbound.plain_json import finite_or_none
from ntp_core.plan import Plan
from sidecar.ingest.spans import is_verified, span_tree, start_ns, stop_ns
from sidecar.ingest.state import MAX_CHANGES, Change, JobState


def plan_view(plan: Plan | None) -> dict[str, Any]:
    """The plan. Before one is seen its values are None and its lists empty."""
    if plan is None:
        return {"epoch": None, "digest": None, "global_batch": None, "counts": {}, "replicas": []}
    return {
        "epoch": plan.epoch,
        "digest": plan.digest,
        "global_batch": plan.global_batch,
        "counts": {str(kind): n for kind, n in plan.counts.items()},
        "replicas": [
            {
                "id": index,
                "tp_degree": len(replica.ranks),
                "ranks": list(replica.ranks),
                "batch": replica.batch,
                "shares": {str(k): list(v.shares) for k, v in replica.layouts.items()},
            }
            for index, replica in enumerate(plan.replicas)
        ],
    }


def changes_view(job: JobState, *, unix_offset_ns: int) -> list[dict[str, Any]]:
    """Changes as span trees, newest first, at most MAX_CHANGES."""
    newest = sorted(job.changes, key=lambda c: c.begin_ns, reverse=True)[:MAX_CHANGES]
    return [_change_view(c, unix_offset_ns) for c in newest]


def _change_view(change: Change, unix_offset_ns: int) -> dict[str, Any]:
    running = change.status is None
    begin_ns = start_ns(change)
    return {
        "epoch": change.epoch,
        "reason": change.reason.name.lower(),
        "status": "running" if change.status is None else change.status.name.lower(),
        "verified": None if running else is_verified(change),
        "from": change.old_digest,
        "to": change.new_digest,
        "step": change.step,
        "started_unix_s": (begin_ns + unix_offset_ns) / 1e9,
        "seconds": None if running else (stop_ns(change) - begin_ns) / 1e9,
        "bytes_moved": change.bytes_moved,
        "bytes_lower_bound": change.bytes_lower_bound,
        "units_verified": change.units_verified,
        "trace_id": change.trace_id,
        "incident": change.incident,
        "error": change.error or None,
        "judged": change.judged,
        "step_time_before_s": finite_or_none(change.step_time_before_s),
        "step_time_after_s": finite_or_none(change.step_time_after_s),
        "step_time_ideal_s": finite_or_none(change.step_time_ideal_s),
        "spans": span_tree(change),
    }
