"""A rank whose process is gone is named; one that left in good order is not."""

from __future__ import annotations

from ntp_core.observe import Reason
from sidecar.checks.dead_rank import DeadRank
from sidecar.checks.finding import Severity
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8), (12, 12))


def test_dead_rank_all_alive_no_finding() -> None:
    """A healthy job has no dead rank."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    job.commit()
    assert check.ready(job.state)
    assert check.run(job.state, job.clock.now_ns) == []


def test_dead_rank_liveness_unknown_not_ready() -> None:
    """Before the node was asked, nothing is known."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    for rank in job.state.ranks.values():
        rank.alive = None
    assert not check.ready(job.state)
    assert check.run(job.state, job.clock.now_ns) == []


def test_dead_rank_killed_named_with_step_and_collective() -> None:
    """The finding says which rank of which replica, after which step, inside which collective."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    for _ in range(3):
        job.commit()
    job.enter([0, 1, 2, 3], seq=41, group=7)
    job.kill(2)
    (finding,) = check.run(job.state, job.clock.advance(0.3))
    assert (finding.rank, finding.replica, finding.step) == (2, 0, 3)
    assert finding.severity is Severity.CRITICAL
    assert finding.subject == "rank 2"
    assert "all_reduce number 41 of group 7" in finding.signals["last_collective"]
    assert "4 ranks live, 3" in finding.signals["others"]


def test_dead_rank_good_exit_no_finding_bad_exit_finding() -> None:
    """Status 0 is a goodbye; any other is a death with a name."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    for rank, status in ((0, 0), (3, 1)):
        job.state.ranks[rank].exited = status
        job.kill(rank)
    (finding,) = check.run(job.state, job.clock.now_ns)
    assert finding.rank == 3
    assert "exit status 1" in finding.summary


def test_dead_rank_resolved_when_the_plan_goes_on_without_it() -> None:
    """After the change that drops it, and the hold, it is no fault any more."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    job.commit()
    check.run(job.state, job.clock.now_ns)
    job.kill(4)
    assert check.run(job.state, job.clock.now_ns)
    job.change(plan_of(((8, 8, 8), (24,)), epoch=2), Reason.RANK_DIED)
    assert check.run(job.state, job.clock.now_ns), "seen die, reported for a while"
    assert check.run(job.state, job.clock.advance(2)) == []


def test_dead_rank_recovery_within_one_tick_is_still_reported() -> None:
    """The job recovered before the first look: the death is told all the same."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    check.run(job.state, job.clock.now_ns)
    job.kill(4)
    job.change(plan_of(((8, 8, 8), (24,)), epoch=2), Reason.RANK_DIED)
    assert [f.rank for f in check.run(job.state, job.clock.now_ns)] == [4]
    assert check.run(job.state, job.clock.advance(1.1)) == []


def test_dead_rank_of_the_past_is_not_told_again_by_a_new_sidecar() -> None:
    """A sidecar that starts later sees a rank that the plan has left behind: no alarm."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    job.kill(4)
    job.change(plan_of(((8, 8, 8), (24,)), epoch=2), Reason.RANK_DIED)
    assert check.run(job.state, job.clock.now_ns) == []


def test_dead_rank_returned_clears() -> None:
    """A new process of the rank ends the finding."""
    job, check = DrivenJob(plan_of(EVEN)), DeadRank()
    job.kill(1)
    assert check.run(job.state, job.clock.now_ns)
    job.state.ranks[1].alive, job.state.ranks[1].pid = True, 9001
    assert check.run(job.state, job.clock.now_ns) == []
