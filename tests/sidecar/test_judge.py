"""A change is judged by the step times before and after it."""

from __future__ import annotations

import pytest

from ntp_core.observe import ChangeStatus, Reason
from ntp_core.proposal import Proposal
from sidecar.ingest.state import Change
from sidecar.judge import ChangeJudge
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8),)
RELIEVED = ((10, 4, 10),)


def promise(incident: str = "inc-1") -> Proposal:
    """What was promised for epoch 2."""
    return Proposal(
        base_digest="0" * 16,
        plan=plan_of(RELIEVED, epoch=2),
        reason=Reason.RANK_SLOW,
        incident=incident,
        promised_step_s=0.5,
        ideal_step_s=0.4,
    )


def changed_job() -> tuple[DrivenJob, Change]:
    """Ten healthy steps, five slow ones, then a change that relieves rank 1."""
    job = DrivenJob(plan_of(EVEN))
    for step in range(15):
        job.commit({1: 3.0} if step >= 10 else None)
    change = job.change(plan_of(RELIEVED, epoch=2), Reason.RANK_SLOW)
    change.incident = "inc-1"
    return job, change


def judged(judge: ChangeJudge, job: DrivenJob, promises: dict[int, Proposal]) -> list[Change]:
    """One look of the judge; the incident opened at step 13."""
    return judge.judge(job.state, promises, {"inc-1": 13}, now_ns=job.clock.now_ns)


def test_judge_gain_kept_after_two_skipped_and_five_counted_steps() -> None:
    """Not before the seventh step; then with both times and the ideal."""
    job, change = changed_job()
    judge = ChangeJudge()
    for _ in range(6):
        job.commit({1: 3.0})
        assert judged(judge, job, {2: promise()}) == []
        assert change.judged is None
    job.commit({1: 3.0})
    assert judged(judge, job, {2: promise()}) == []
    assert change.judged == "kept"
    assert change.step_time_before_s == pytest.approx(1.02 * 3 / 3)
    assert change.step_time_after_s == pytest.approx(1.02 * 3 * 4 / 24)
    assert change.step_time_ideal_s == 0.4


def test_judge_no_gain_undone_once_with_a_notice() -> None:
    """The change brought nothing: said once, and a finding names the change, not a rank."""
    job, change = changed_job()
    judge = ChangeJudge()
    for _ in range(7):
        job.commit({1: 6.0})
    assert judged(judge, job, {2: promise()}) == [change]
    assert change.judged == "undone"
    assert judged(judge, job, {2: promise()}) == []
    (notice,) = judge.findings(job.state, job.clock.now_ns)
    assert (notice.check, notice.subject, notice.rank) == ("slow_rank", "change 2", None)
    assert "brought nothing" in notice.summary


def test_judge_notice_ends_with_the_way_back_or_in_time() -> None:
    """Another plan in force, or half a minute, ends the notice."""
    job, _ = changed_job()
    judge = ChangeJudge()
    for _ in range(7):
        job.commit({1: 6.0})
    judged(judge, job, {2: promise()})
    now_ns = job.clock.now_ns
    assert judge.findings(job.state, now_ns + 31_000_000_000) == []
    job.change(plan_of(EVEN, epoch=3), Reason.NO_GAIN)
    assert judge.findings(job.state, now_ns) == []


def test_judge_margin_smaller_gain_is_none() -> None:
    """Two per cent faster is within the noise: undone."""
    job = DrivenJob(plan_of(EVEN))
    for _ in range(5):
        job.commit()
    change = job.change(plan_of(RELIEVED, epoch=2), Reason.RANK_SLOW)
    for _ in range(7):
        job.commit({0: 0.79, 1: 0.79, 2: 0.79})  # 10 of 24 units: 1.25 x 0.79 = 0.9875
    assert judged(ChangeJudge(), job, {2: promise("")}) == [change]


def test_judge_before_uses_at_least_three_steps() -> None:
    """The job took the plan one step after the incident opened: three steps are looked at."""
    job, change = changed_job()
    for _ in range(7):
        job.commit({1: 3.0})
    judge = ChangeJudge()
    judge.judge(job.state, {2: promise()}, {"inc-1": 15}, now_ns=job.clock.now_ns)
    assert change.step_time_before_s == pytest.approx(1.02)


def test_judge_without_promise_times_are_set_and_no_verdict() -> None:
    """A recovery or an operator's change is measured, not judged."""
    job, change = changed_job()
    judge = ChangeJudge()
    for _ in range(7):
        job.commit({1: 9.0})
    assert judged(judge, job, {}) == []
    assert change.judged is None
    assert change.step_time_after_s is not None


def test_judge_next_change_came_too_early_no_verdict() -> None:
    """Too few steps under the plan: unknown stays unknown."""
    job, change = changed_job()
    judge = ChangeJudge()
    for _ in range(4):
        job.commit()
    job.change(plan_of(EVEN, epoch=3), Reason.OPERATOR)
    for _ in range(20):
        job.commit()
        judged(judge, job, {2: promise()})
    assert change.judged is None
    assert change.step_time_after_s is None


def test_judge_rolled_back_or_first_plan_is_left_alone() -> None:
    """What never came into force has no times."""
    job, change = changed_job()
    change.status = ChangeStatus.ROLLED_BACK
    job.state.changes.append(
        Change(
            epoch=1,
            reason=Reason.START,
            step=0,
            old_digest="",
            new_digest="",
            begin_ns=0,
            end_ns=1,
            status=ChangeStatus.COMMITTED,
        )
    )
    for _ in range(10):
        job.commit()
    judged(ChangeJudge(), job, {2: promise()})
    assert all(c.step_time_after_s is None for c in job.state.changes)
