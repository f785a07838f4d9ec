"""The ranks: the list in `/api/v1/ranks`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ntp_core.inbound.plain_json import finite_or_none
from ntp_core.observe import Op
from ntp_core.plan import Plan
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.slowness import slowness
from sidecar.ingest.state import JobState, OpenCollective, RankState

_OPS = {int(op): op.name.lower() for op in Op}
_HEALTH_BY_CHECK = {
    "dead_rank": "dead",
    "replica_divergence": "diverged",
    "no_progress": "stuck",
    "slow_rank": "slow",
}
"""Worst first: a rank that several incidents name shows the first."""


def ranks_view(
    job: JobState, incidents: Iterable[Incident], *, now_ns: int
) -> list[dict[str, Any]]:
    """Every rank, by number."""
    slow = slowness(job)
    firing = [i for i in incidents if i.state is IncidentState.FIRING]
    rows = []
    for rank in sorted(job.ranks):
        state = job.ranks[rank]
        row = _rank_view(state, job.plan, now_ns)
        row["slowness"] = finite_or_none(slow.get(rank))
        row["health"] = _health(state, row["replica"], firing, job.counts_on(rank))
        rows.append(row)
    return rows


def is_dead(rank: RankState) -> bool:
    """Gone without goodbye; a rank that announced its exit is not dead."""
    return rank.alive is False and rank.exited is None


def _health(rank: RankState, replica: int | None, firing: list[Incident], is_member: bool) -> str:
    """Health by the firing incidents that name the rank, or that name only its replica."""
    if is_dead(rank):
        return "dead" if is_member else "left"
    if rank.exited is not None:
        return "exited"
    if not is_member:
        return "standby"
    checks = {
        i.finding.check
        for i in firing
        if i.finding.rank == rank.rank
        or (i.finding.rank is None and replica is not None and i.finding.replica == replica)
    }
    for check, health in _HEALTH_BY_CHECK.items():
        if check in checks:
            return health
    return "unknown" if rank.alive is None else "ok"


def _rank_view(rank: RankState, plan: Plan | None, now_ns: int) -> dict[str, Any]:
    replica, tp_rank, units = _place(plan, rank)
    newest = rank.steps[-1] if rank.steps else None
    seen_ns = rank.last_progress_ns
    return {
        "rank": rank.rank,
        "replica": replica,
        "tp_rank": tp_rank,
        "pid": rank.pid,
        "alive": rank.alive,
        "exit_status": rank.exited,
        "step": rank.step,
        "progress_age_s": max(0, now_ns - seen_ns) / 1e9 if seen_ns else None,
        "share": finite_or_none(rank.work) if plan is None or units is not None else None,
        "busy_s": newest.busy_ns / 1e9 if newest else None,
        "wait_s": max(0, newest.duration_ns - newest.busy_ns) / 1e9 if newest else None,
        "collective": _collective_view(rank.collective, now_ns),
        "events": rank.events_total,
        "events_lost": rank.events_lost,
        "units": units,
    }


def _place(
    plan: Plan | None, rank: RankState
) -> tuple[int | None, int | None, dict[str, int] | None]:
    """(replica, tp_rank, units by kind). A rank outside the plan in force has no place."""
    if plan is None:
        return rank.replica, rank.tp_rank, None
    for index, replica in enumerate(plan.replicas):
        if rank.rank in replica.ranks:
            tp_rank = replica.ranks.index(rank.rank)
            units = {str(kind): v.shares[tp_rank] for kind, v in replica.layouts.items()}
            return index, tp_rank, units
    return None, None, None


def _collective_view(open_: OpenCollective | None, now_ns: int) -> dict[str, Any] | None:
    if open_ is None:
        return None
    return {
        "op": _OPS.get(open_.op, "other"),
        "group": open_.group,
        "seq": open_.seq,
        "age_s": max(0, now_ns - open_.begin_ns) / 1e9,
    }
