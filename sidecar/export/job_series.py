"""Series of one job and of the sidecar itself. What is unknown gives no series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

from ntp_core.observe import ChangeStatus, Reason
from sidecar.catalog import CHECKS
from sidecar.export.families import Series
from sidecar.export.job_totals import JobTotals
from sidecar.export.selfstats import JobView, SidecarStats
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import JobState, RankState
from sidecar.view import CheckRow

CHANGE_REASONS = tuple(r.name.lower() for r in Reason if r is not Reason.START)
RANK_STATES = ("alive", "dead", "exited", "left")
CHANGE_STATUSES = tuple(s.name.lower() for s in ChangeStatus)


def job_series(job: str, view: JobView, totals: JobTotals) -> list[Series]:
    """All series of a job that carry neither rank nor replica. `job` is its label value."""
    state = view.job
    return [
        *_progress(job, state),
        *_states(job, state),
        *_allocation(job, state, totals),
        *_checks(job, view.checks),
        *_incidents(job, view.incidents, totals),
        ("nutp_job_tokens", (job,), totals.tokens),
        ("nutp_proposals_refused", (job,), state.proposals_refused),
        ("nutp_ranks_killed", (job,), state.killed_total),
        ("nutp_replica_checks", (job,), state.checked_steps),
        ("nutp_replica_mismatches", (job,), max(0, state.checked_steps - state.identical_steps)),
    ]


def replica_series(job: str, state: JobState, replica: int) -> list[Series]:
    """Gauges of one replica of the plan in force."""
    if state.plan is None:
        return []
    plan = state.plan.replicas[replica]
    labels = (job, str(replica))
    return [
        ("nutp_replica_tp_degree", labels, len(plan.ranks)),
        ("nutp_replica_batch_sequences", labels, plan.batch),
    ]


def sidecar_series(version: str, stats: SidecarStats, series_dropped: int) -> list[Series]:
    """The sidecar's own series."""
    values: dict[str, float | None] = {
        "nutp_sidecar_tick_seconds": stats.tick_s,
        "nutp_sidecar_last_tick_timestamp_seconds": stats.last_tick_unix_s,
        "nutp_sidecar_tick_errors": stats.tick_errors,
        "nutp_sidecar_cpu_seconds": stats.cpu_s,
        "nutp_sidecar_resident_memory_bytes": stats.resident_memory_bytes,
        "nutp_sidecar_series_dropped": series_dropped,
        "nutp_sidecar_bad_rings": stats.bad_rings,
        "nutp_sidecar_bad_records": stats.bad_records,
        "nutp_webhook_queue": stats.webhooks_queued,
    }
    return [
        ("nutp_build", (version,), 1.0),
        *((name, (), value) for name, value in values.items() if value is not None),
        ("nutp_webhook_deliveries", ("delivered",), stats.webhooks_delivered),
        ("nutp_webhook_deliveries", ("retried",), stats.webhooks_retried),
        ("nutp_webhook_deliveries", ("dead",), stats.webhooks_dead),
        ("nutp_webhook_deliveries", ("dropped",), stats.webhooks_dropped),
        *(("nutp_sidecar_outlet_errors", (o,), n) for o, n in sorted(stats.outlet_errors.items())),
    ]


def _progress(job: str, state: JobState) -> list[Series]:
    series: list[Series] = []
    if any(r.alive is not False for r in state.members):
        series.append(("nutp_job_step", (job,), state.step))
    lead = state.lead
    if lead is not None and lead.loss is not None:
        series.append(("nutp_job_loss", (job,), lead.loss))
    if lead is not None and lead.grad_norm is not None:
        series.append(("nutp_job_gradient_norm", (job,), lead.grad_norm))
    return series


def _states(job: str, state: JobState) -> list[Series]:
    counts = Counter(_state(r, state.counts_on(r.rank)) for r in state.ranks.values())
    return [("nutp_job_ranks", (job, word), counts[word]) for word in RANK_STATES]


def _state(rank: RankState, is_member: bool) -> str:
    if rank.exited is not None:
        return "exited"
    gone = "dead" if is_member else "left"
    return {None: "unknown", True: "alive", False: gone}[rank.alive]


def _allocation(job: str, state: JobState, totals: JobTotals) -> list[Series]:
    # From 0 on, so that the first change is an increase and not a new series.
    series: list[Series] = [
        ("nutp_allocation_changes", (job, *pair), totals.changes[pair])
        for pair in product(CHANGE_REASONS, CHANGE_STATUSES)
    ]
    if state.plan is not None:
        series.append(("nutp_plan_epoch", (job,), state.plan.epoch))
    series.append(("nutp_allocation_moved_bytes", (job,), totals.moved_bytes))
    series.append(("nutp_allocation_lower_bound_bytes", (job,), totals.lower_bound_bytes))
    return series


def _checks(job: str, checks: Iterable[CheckRow]) -> list[Series]:
    series: list[Series] = []
    for check in checks:
        labels = (job, check.name)
        series.append(("nutp_check_runs", labels, check.runs))
        series.append(("nutp_check_failures", labels, check.failures))
        series.append(("nutp_check_ready", labels, float(check.ready)))
    return series


def _incidents(job: str, incidents: Iterable[Incident], totals: JobTotals) -> list[Series]:
    firing = Counter(
        (i.finding.check, str(i.finding.severity))
        for i in incidents
        if i.state is IncidentState.FIRING
    )
    series: list[Series] = []
    # From 0 on, and at 0 again afterwards: an alert sees the first one come, and the last one go.
    usual = {(c.name, c.severity) for c in CHECKS}
    for key in sorted(usual | totals.incidents.keys() | firing.keys()):
        series.append(("nutp_incidents_firing", (job, *key), firing[key]))
        series.append(("nutp_incidents", (job, *key), totals.incidents[key]))
    return series
