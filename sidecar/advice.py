"""Works out a new plan for a job with a slow rank, from the measured speeds of all its ranks.

Pure: state in, proposal out. It does not decide whether the plan is only shown or left for the job.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ntp_core.cost import Work, WorkShape, work_of_model
from ntp_core.errors import NtpError
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.replan import measured_speeds, predict, rebalance
from sidecar.checks.finding import Finding
from sidecar.ingest.state import JobState

MEASURED_STEPS = 3
"""Newest steps of a rank that its speed is taken from: all of them are after a slow onset."""

Planner = Callable[[JobState, Finding], Proposal | None]
WorkOf = Callable[[JobState], Work | None]


def describe(proposal: Proposal) -> str:
    """One line for people: shares, batches, and what it promises."""
    parts = []
    for index, r in enumerate(proposal.plan.replicas):
        kinds = ", ".join(f"{k} {'/'.join(map(str, v.shares))}" for k, v in r.layouts.items())
        parts.append(f"replica {index}: {kinds}, batch {r.batch}")
    promise = f"promises {proposal.promised_step_s:.3g} s a step"
    return f"{'; '.join(parts)}; {promise} (epoch {proposal.plan.epoch})"


def busy_per_rank_s(job: JobState) -> dict[int, float]:
    """Median of each rank's own time over its newest steps under the plan in force, in seconds."""
    busy = {}
    for r in job.members:
        newest = [s.own_ns for s in list(r.steps)[-MEASURED_STEPS:] if s.epoch == r.epoch]
        if newest and r.alive is not False:
            busy[r.rank] = median(newest) / 1e9
    return busy


def work_by_weights(job: JobState) -> Work | None:
    """Work from the sizes of the model's tensors alone; None while they are not known."""
    return None if job.model is None else work_of_model(job.model, WorkShape(seq=0))


def plan_for_slow_rank(min_gain: float = 0.05, work_of: WorkOf = work_by_weights) -> Planner:
    """A planner: the same ranks, shares and batches to measured speeds.

    Args:
        min_gain: least fraction of the step time that a new plan must save.
        work_of: what each unit of the job's model costs.
    """

    def planner(job: JobState, finding: Finding) -> Proposal | None:
        del finding  # the measured speeds of all ranks say more
        work = work_of(job)
        if job.plan is None or work is None:
            return None
        try:
            return _proposal_for(job, job.plan, work, min_gain)
        except (NtpError, ArithmeticError, LookupError):
            return None  # not every rank is measured yet, no plan fits, or the job's numbers do not

    return planner


def _proposal_for(job: JobState, plan: Plan, work: Work, min_gain: float) -> Proposal | None:
    speeds = measured_speeds(busy_per_rank_s(job), plan, work)
    new, now = rebalance(plan, work, speeds), predict(plan, work, speeds)
    then = predict(new, work, speeds)
    # What a step takes beyond the slowest rank's own work (syncs, checks) stays as it is.
    rest_s = max(0.0, newest_step_s(job) - now.step_s)
    promised_s = then.step_s + rest_s
    if new.digest == plan.digest or promised_s > (1 - min_gain) * (now.step_s + rest_s):
        return None
    return Proposal(
        base_digest=plan.digest,
        plan=new,
        reason=Reason.RANK_SLOW,
        promised_step_s=promised_s,
        ideal_step_s=then.ideal_s + rest_s,
        speeds=speeds,
    )


def newest_step_s(job: JobState) -> float:
    """Median over ranks of their newest step times, in seconds; 0 without steps."""
    times = [
        median(s.duration_ns for s in list(r.steps)[-MEASURED_STEPS:]) / 1e9
        for r in job.members
        if r.steps and r.alive is not False
    ]
    return median(times) if times else 0.0
