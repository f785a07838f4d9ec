"""The job as a whole: the body of `/api/v1/job`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ntp_core.inbound.plain_json import finite_or_none
from sidecar.checks.finding import Severity
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import STEPS_KEPT, JobState, RankState
from sidecar.view.ranks import is_dead

PROGRESS_LIMIT_NS = 30_000_000_000
"""Without a record for this long the job's status is unknown, if no incident says more."""


def job_view(
    job: JobState,
    incidents: Iterable[Incident],
    *,
    now_ns: int,
    progress_limit_ns: int = PROGRESS_LIMIT_NS,
) -> dict[str, Any]:
    """Step, loss, step times, counts and status of the job."""
    ranks = list(job.ranks.values())
    steps, step_times_s = _step_times(ranks)
    lead = job.lead
    starts = [r.start_unix_ns for r in ranks if r.start_unix_ns]
    return {
        "job_id": job.job_id,
        "step": _step(job),
        "loss": finite_or_none(lead.loss) if lead else None,
        "loss_is_finite": _loss_is_finite(lead),
        "loss_first": finite_or_none(job.loss_first),
        "gradient_norm": finite_or_none(lead.grad_norm) if lead else None,
        "world_size": max((r.world_size for r in ranks), default=0) or None,
        "ranks_alive": sum(r.alive is True for r in ranks),
        "ranks_dead": sum(is_dead(r) and job.counts_on(r.rank) for r in ranks),
        "ranks_left": sum(is_dead(r) and not job.counts_on(r.rank) for r in ranks),
        "proposals_refused": job.proposals_refused,
        "refusal": job.refusal or None,
        "plan_epoch": job.plan.epoch if job.plan else None,
        "plan_digest": job.plan.digest if job.plan else None,
        "step_time_s": step_times_s[-1] if step_times_s else None,
        "step_times_s": step_times_s,
        "steps": steps,
        "replicas_identical_steps": job.identical_steps,
        "replicas_checked_steps": job.checked_steps,
        "started_unix_s": min(starts) / 1e9 if starts else None,
        "status": _status(
            ranks, lead, incidents, now_ns - progress_limit_ns, has_trained=job.has_trained
        ),
        "exit_status": _exit_status(ranks, job.members),
    }


def _has_ended(ranks: list[RankState]) -> bool:
    return bool(ranks) and all(r.exited is not None or r.alive is False for r in ranks)


def _exit_status(ranks: list[RankState], members: list[RankState]) -> int | None:
    """The job's exit status by those of its members: the first that is not 0; None while a rank
    runs, and where one left without telling. Whom the job went on without does not count."""
    if not _has_ended(ranks):
        return None
    by_rank = [r.exited for r in sorted(members or ranks, key=lambda r: r.rank)]
    failed = next((s for s in by_rank if s is not None and s > 0), None)
    return failed if failed is not None or any(s != 0 for s in by_rank) else 0


def _step(job: JobState) -> int | None:
    """The job's step; after the last member has left, the furthest step they reached."""
    if not job.ranks:
        return None
    members = job.members or list(job.ranks.values())
    if all(r.alive is False for r in members):
        return max(r.step for r in members)
    return job.step


def _loss_is_finite(lead: RankState | None) -> bool | None:
    return None if lead is None or lead.loss is None else math.isfinite(lead.loss)


def _step_times(ranks: list[RankState]) -> tuple[list[int], list[float]]:
    """Steps and their times; a step takes as long as on its slowest rank.

    A step that ran again after a failure counts with its last run on each rank, and under the
    newest plan that it ran under.
    """
    slowest: dict[int, tuple[int, int]] = {}
    for rank in ranks:
        for step, (epoch, ns) in {s.step: (s.epoch, s.duration_ns) for s in rank.steps}.items():
            if (epoch, ns) > slowest.get(step, (-1, -1)):
                slowest[step] = epoch, ns
    steps = sorted(slowest)[-STEPS_KEPT:]
    return steps, [slowest[s][1] / 1e9 for s in steps]


def _status(
    ranks: list[RankState],
    lead: RankState | None,
    incidents: Iterable[Incident],
    fresh_after_ns: int,
    *,
    has_trained: bool,
) -> str:
    """One word for the job. A firing incident, or a loss that is no number any more, says more than
    its end or silence does, so it comes first."""
    if not ranks:
        return "unknown"
    firing = {i.finding.severity for i in incidents if i.state is IncidentState.FIRING}
    if Severity.CRITICAL in firing:
        return "critical"
    if Severity.WARNING in firing or _loss_is_finite(lead) is False:
        return "degraded"
    if _has_ended(ranks):
        return "ended"
    if not has_trained:
        return "starting"  # loading may take longer than any silence of a running job
    if max(r.last_progress_ns for r in ranks) < fresh_after_ns:
        return "unknown"
    return "healthy"
