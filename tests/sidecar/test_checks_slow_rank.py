"""The slow rank is named, its victims are not, and uneven shares are neither."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.observe import Reason
from sidecar.checks.finding import Finding, Severity
from sidecar.checks.slow_rank import SlowRank, SlowRankLimits
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8), (12, 12))
UNEVEN = ((10, 6, 4, 2),)  # 5:3:2:1


def judge(check: SlowRank, job: DrivenJob) -> list[Finding]:
    """What a tick would see: nothing while the check is not ready."""
    return check.run(job.state, job.clock.now_ns) if check.ready(job.state) else []


def run_steps(
    check: SlowRank, job: DrivenJob, steps: int, slow: dict[int, float] | None = None
) -> list[list[Finding]]:
    """Findings after each of `steps` steps."""
    found = []
    for _ in range(steps):
        job.commit(slow)
        found.append(judge(check, job))
    return found


def test_slow_rank_equal_speeds_uneven_shares_no_finding() -> None:
    """Shares of 5:3:2:1 on equal ranks look nothing like a slow rank."""
    assert not any(run_steps(SlowRank(), DrivenJob(plan_of(UNEVEN)), 40))


def test_slow_rank_planted_named_within_five_steps() -> None:
    """The culprit is named at most five steps after the onset, and nobody else is."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    assert not any(run_steps(check, job, 10))
    found = run_steps(check, job, 5, {1: 3.0})
    assert [f.rank for f in found[-1]] == [1]
    assert all(f.rank == 1 for tick in found for f in tick)
    assert found[2], "three slow steps are enough"


def test_slow_rank_finding_states_its_signals() -> None:
    """A verdict carries the measurements that agree."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    run_steps(check, job, 6)
    (finding,) = run_steps(check, job, 5, {1: 3.0})[-1]
    assert finding.severity is Severity.WARNING
    assert (finding.subject, finding.replica, finding.step) == ("rank 1", 0, 11)
    assert {"slowness", "busy_time", "share", "peers_median", "step_time"} <= set(finding.signals)
    assert finding.signals["slowness"].startswith("3.00x")


def test_slow_rank_small_share_is_not_hidden() -> None:
    """The rank with the smallest share is seen although it finishes before the others."""
    job, check = DrivenJob(plan_of(UNEVEN)), SlowRank()
    run_steps(check, job, 6)
    assert [f.rank for f in run_steps(check, job, 5, {3: 3.0})[-1]] == [3]


def test_slow_rank_two_slow_steps_no_finding() -> None:
    """A hiccup shorter than three steps in a row is noise."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    run_steps(check, job, 6)
    for _ in range(10):
        assert not any(run_steps(check, job, 2, {1: 4.0}))
        assert not any(run_steps(check, job, 1))


def test_slow_rank_warmup_of_epoch_is_ignored() -> None:
    """The first two steps of an epoch are slow on one rank: not judged."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    assert not any(run_steps(check, job, 2, {0: 9.0}))
    assert not any(run_steps(check, job, 8))
    job.change(plan_of(((9, 8, 7), (12, 12)), epoch=2), Reason.OPERATOR)
    assert not any(run_steps(check, job, 2, {0: 9.0}))
    assert not any(run_steps(check, job, 8))


def test_slow_rank_not_ready_before_enough_steps() -> None:
    """Silence before two warm-up and three judged steps means unknown."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    ready = []
    for _ in range(6):
        job.commit()
        ready.append(check.ready(job.state))
    assert ready == [False, False, False, False, True, True]


@pytest.mark.parametrize("shares", [((12, 12),), ((24,),)])
def test_slow_rank_too_few_ranks_abstains(shares: tuple[tuple[int, ...], ...]) -> None:
    """Of two ranks nothing tells which one is odd."""
    job, check = DrivenJob(plan_of(shares)), SlowRank()
    assert not any(run_steps(check, job, 12, {0: 4.0}))
    assert not check.ready(job.state)


def test_slow_rank_whole_job_slows_down_no_finding() -> None:
    """All ranks turn slow, unequally: the job's fault, as long as that is not the new norm."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    run_steps(check, job, 40)
    assert not any(run_steps(check, job, 15, {0: 2.0, 1: 4.0, 2: 2.0, 3: 2.2, 4: 2.1}))


def test_slow_rank_more_than_half_slow_no_finding() -> None:
    """Three of five slow: the fast two are not blamed and neither are the three."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    run_steps(check, job, 20)
    assert not any(run_steps(check, job, 20, {0: 3.0, 1: 3.0, 2: 3.0}))


def test_slow_rank_hysteresis_clears_below_lower_threshold() -> None:
    """Between 1.25 and 1.5 an old finding stays and a new one does not start."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    run_steps(check, job, 6)
    assert not any(run_steps(check, job, 10, {1: 1.4}))
    assert run_steps(check, job, 6, {1: 2.0})[-1]
    assert all(run_steps(check, job, 10, {1: 1.4}))
    assert not run_steps(check, job, 5, {1: 1.1})[-1]


def relieve(job: DrivenJob, factor: float) -> None:
    """A change to a plan that is made for rank 1 being `factor` times slower."""
    plan = plan_of(((10, 4, 10),), epoch=2)
    job.change(plan, Reason.RANK_SLOW)
    job.expect({1: factor})


def test_slow_rank_relieved_by_a_change_clears() -> None:
    """Once the plan gives it what it can carry and expects its speed, the finding ends."""
    job, check = DrivenJob(plan_of(((8, 8, 8),))), SlowRank()
    run_steps(check, job, 6)
    assert run_steps(check, job, 5, {1: 3.0})[-1]
    relieve(job, 3.0)
    after = run_steps(check, job, 12, {1: 3.0})
    assert not any(after[5:])


def test_slow_rank_relieved_and_slower_still_is_found_again() -> None:
    """Relief is no excuse: slower than what was expected of it, it is named again."""
    job, check = DrivenJob(plan_of(((8, 8, 8),))), SlowRank()
    run_steps(check, job, 6)
    run_steps(check, job, 5, {1: 3.0})
    relieve(job, 3.0)
    assert not run_steps(check, job, 10, {1: 3.0})[-1]
    assert [f.rank for f in run_steps(check, job, 5, {1: 9.0})[-1]] == [1]


def test_slow_rank_next_to_no_work_no_finding() -> None:
    """A rank whose excess is lost in the step time is left alone."""
    job, check = DrivenJob(plan_of(((100, 100, 100, 2),))), SlowRank()
    run_steps(check, job, 6)
    assert not any(run_steps(check, job, 10, {3: 2.0}))


def test_slow_rank_unknown_share_is_not_judged() -> None:
    """Without a plan the share is unknown, and unknown is not slow."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    for rank in job.state.ranks.values():
        rank.work = None
    job.step = 3
    assert not check.ready(job.state)
    assert check.run(job.state, 0) == []


shares_of_a_replica = st.lists(st.integers(1, 8), min_size=3, max_size=8)


@settings(max_examples=60, deadline=None)
@given(shares=shares_of_a_replica, data=st.data())
def test_slow_rank_noise_on_any_shares_never_blames(shares: list[int], data: st.DataObject) -> None:
    """Random shares with 15 % noise on every rank and step: nobody is blamed."""
    job, check = DrivenJob(plan_of((shares,))), SlowRank()
    level = st.floats(0.85, 1.15)
    for _ in range(25):
        job.commit(noise={r: data.draw(level) for r in range(len(shares))})
        assert judge(check, job) == []


@settings(max_examples=60, deadline=None)
@given(
    shares=shares_of_a_replica,
    factor=st.floats(2.5, 10.0),
    data=st.data(),
)
def test_slow_rank_planted_is_always_the_one_named(
    shares: list[int], factor: float, data: st.DataObject
) -> None:
    """Whoever is made slow is named within five steps, and nobody else ever."""
    culprit = data.draw(st.integers(0, len(shares) - 1))
    job, check = DrivenJob(plan_of((shares,))), SlowRank()
    level = st.floats(0.95, 1.05)
    for step in range(15):
        noise = {r: data.draw(level) for r in range(len(shares))}
        job.commit({culprit: factor} if step >= 10 else None, noise)
        found = judge(check, job)
        assert all(f.rank == culprit for f in found)
    assert [f.rank for f in found] == [culprit]


def test_slow_rank_limits_come_from_the_configuration() -> None:
    """A stricter threshold finds what the default leaves alone."""
    strict = SlowRank(SlowRankLimits(threshold=1.2, clear=1.1, steps=2))
    job = DrivenJob(plan_of(EVEN))
    run_steps(strict, job, 8)
    assert run_steps(strict, job, 5, {1: 1.35})[-1]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_slow_rank_crowded_host_blames_nobody_in_turn(seed: int) -> None:
    """Ranks that wait for a processor, now one and now another, are not slow ranks."""
    draw = random.Random(seed)
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    for _ in range(60):
        job.commit(queued={r: draw.expovariate(1.0) * 2 for r in range(5)})
        assert not judge(check, job), f"seed {seed}"


def test_slow_rank_run_queue_does_not_hide_a_slow_rank() -> None:
    """A rank that is really slower is named on a crowded host as on a quiet one."""
    draw = random.Random(7)
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    found: list[Finding] = []
    for step in range(1, 16):
        queued = {r: draw.expovariate(1.0) * 2 for r in range(5)}
        job.commit({3: 3.0} if step > 10 else None, queued=queued)
        found = judge(check, job)
        assert all(f.rank == 3 for f in found)
    assert [f.rank for f in found] == [3]


def test_slow_rank_held_up_by_its_host_for_many_steps_is_named_for_that() -> None:
    """A rank without a core of its own is named, later, and told from a slow one."""
    job, check = DrivenJob(plan_of(EVEN)), SlowRank()
    findings = []
    for _ in range(30):
        job.commit(queued={2: 1.5})
        findings.append(judge(check, job))
    assert not any(findings[: SlowRankLimits().crowded_steps - 1])
    (finding,) = findings[-1]
    assert finding.rank == 2
    assert "processor" in finding.summary
    assert {"slowness", "run_queue"} <= set(finding.signals)
    job.commit()
    assert not judge(check, job), "it ends with the first step without the wait"
