"""A job that stands still is seen, and the rank that holds it up is named."""

from __future__ import annotations

import os

import pytest

from ntp_core.observe import Reason
from sidecar.checks.finding import Finding, Severity
from sidecar.checks.no_progress import NoProgress, ProgressLimits, process_state
from sidecar.config import load
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8), (12, 12))
UNEVEN = ((10, 6, 4, 2),)


class States:
    """Process states by pid; all others run."""

    def __init__(self, stopped: dict[int, str] | None = None) -> None:
        self.states = stopped or {}

    def __call__(self, pid: int) -> str | None:
        return self.states.get(pid, "S")


def started(shares: tuple[tuple[int, ...], ...] = EVEN, steps: int = 10) -> DrivenJob:
    """A job that has committed some steps and opened the next."""
    job = DrivenJob(plan_of(shares), speed=0.5)
    for _ in range(steps):
        job.commit()
    job.begin_step()
    return job


def after(job: DrivenJob, check: NoProgress, seconds: float) -> list[Finding]:
    """Findings when `seconds` have passed without a step."""
    return check.run(job.state, job.clock.advance(seconds))


def test_no_progress_steps_go_on_no_finding() -> None:
    """Uneven shares, steady steps."""
    job, check = DrivenJob(plan_of(UNEVEN)), NoProgress(state_of=States())
    for _ in range(30):
        job.commit()
        assert check.run(job.state, job.clock.now_ns) == []


def test_no_progress_missing_rank_named_at_the_floor() -> None:
    """Four ranks wait in a collective that rank 3 never reached: rank 3 and the collective."""
    job, check = started(), NoProgress(state_of=States())
    job.enter([0, 1, 2], seq=88, group=2)
    job.enter([4], seq=17, group=5)
    assert after(job, check, 4.9) == []
    (finding,) = after(job, check, 0.2)
    assert (finding.rank, finding.replica, finding.subject) == (3, 1, "job")
    assert finding.severity is Severity.CRITICAL
    assert "rank 3 has not arrived" in finding.summary
    assert "all_reduce number" in finding.signals["collective"]
    assert finding.signals["waiting"].startswith("4 of 5")


def test_no_progress_stopped_process_named_early_even_inside_a_collective() -> None:
    """State T says more than the collectives, and needs less waiting."""
    job = started()
    check = NoProgress(state_of=States({job.state.ranks[2].pid: "T"}))
    job.enter([0, 1, 2, 3, 4], seq=88)
    found = [f for _ in range(22) for f in after(job, check, 0.1)]
    assert found[0].rank == 2
    assert "stopped" in found[0].signals["process_state"]
    assert len(found) <= 3, "not before two seconds"


def test_no_progress_process_stopped_and_continued_is_slow_not_stuck() -> None:
    """Stopped for most of every few milliseconds: a slow rank, whatever a look happens to see."""
    job, states = started(), States()
    check = NoProgress(state_of=states)
    job.enter([0, 1, 3, 4], seq=88)
    for look in range(49):
        states.states = {} if look % 7 == 0 else {job.state.ranks[2].pid: "T"}
        assert after(job, check, 0.1) == []


def test_no_progress_traced_process_is_not_stopped() -> None:
    """Under a debugger (t) the longer limit holds."""
    job = started()
    check = NoProgress(state_of=States({job.state.ranks[2].pid: "t"}))
    job.enter([0, 1, 3, 4], seq=88)
    assert after(job, check, 3.0) == []


def test_no_progress_skipped_call_names_the_rank_behind_in_its_group() -> None:
    """All wait; one is a number behind in the same group: it skipped a call."""
    job, check = started(), NoProgress(state_of=States())
    job.enter([0, 2], seq=88, group=2)
    job.enter([1], seq=87, group=2)
    job.enter([3, 4], seq=40, group=5)
    (finding,) = after(job, check, 6.0)
    assert finding.rank == 1


def test_no_progress_nothing_tells_no_rank_named() -> None:
    """All wait at the same place: stuck, and honestly no name."""
    job, check = started(), NoProgress(state_of=States())
    job.enter([0, 1, 2, 3, 4], seq=88)
    (finding,) = after(job, check, 6.0)
    assert finding.rank is None
    assert "nothing tells" in finding.summary


def test_no_progress_several_missing_all_listed() -> None:
    """Two ranks missing: both listed, none singled out."""
    job, check = started(), NoProgress(state_of=States())
    job.enter([0, 1, 2], seq=88)
    (finding,) = after(job, check, 6.0)
    assert finding.rank is None
    assert finding.signals["not_arrived"] == "ranks 3, 4"


def test_no_progress_records_without_steps_do_not_count() -> None:
    """Heartbeats and records flow, no step is committed: stuck all the same."""
    job, check = started(), NoProgress(state_of=States())
    for _ in range(12):
        now_ns = job.clock.advance(0.5)
        for rank in job.state.ranks.values():
            rank.last_progress_ns = now_ns
    assert check.run(job.state, job.clock.now_ns)


def test_no_progress_first_step_has_its_own_limit() -> None:
    """Nothing is committed yet: loading and compiling may take two minutes, not for ever."""
    job, check = started(steps=0), NoProgress(state_of=States())
    assert check.ready(job.state)
    assert after(job, check, 119) == []
    assert after(job, check, 2)


def test_no_progress_long_steps_learn_a_longer_limit_with_a_ceiling() -> None:
    """Steps of 2 s allow 20 s; steps of 100 s allow the ceiling of 300 s, not 1000."""
    for step_s, quiet_s, loud_s in ((2.0, 19.0, 21.0), (100.0, 299.0, 301.0)):
        job = DrivenJob(plan_of(((8, 8, 8),)), speed=step_s * 3 / 1.02)
        for _ in range(5):
            job.commit()
        job.begin_step()
        assert after(job, NoProgress(state_of=States()), quiet_s) == []
        assert after(job, NoProgress(state_of=States()), loud_s - quiet_s)


def test_no_progress_change_in_progress_is_not_stuck_but_ages_out() -> None:
    """A change has a minute from its newest sign of life; a lost end record does not blind."""
    job, check = started(), NoProgress(state_of=States())
    job.begin_change(plan_of(((9, 8, 7), (12, 12)), epoch=2), Reason.OPERATOR)
    assert after(job, check, 59) == []
    assert after(job, check, 2)


def test_no_progress_checkpoint_of_all_ranks_has_its_own_limit() -> None:
    """The engine saves between two steps; a rank that others have left behind is not saving."""
    job, check = started(), NoProgress(state_of=States())
    job.commit()
    assert after(job, check, 599) == []
    assert after(job, check, 2), "it ages out"
    job.commit()
    job.begin_step()
    job.state.ranks[3].step_open = None
    job.enter([0, 1, 2, 4], seq=9)
    (finding,) = after(job, check, 6.0)
    assert finding.rank == 3


def test_no_progress_rank_that_says_it_saves_is_waited_for() -> None:
    """The others are in their next step already; the step after it is measured from its end."""
    job, check = started(), NoProgress(state_of=States())
    job.state.plan = None
    job.enter([1, 2, 3, 4], seq=9)
    job.state.ranks[0].is_saving = True
    assert after(job, check, 500) == []
    job.state.ranks[0].is_saving, job.state.ranks[0].saved_ns = False, job.clock.now_ns
    assert after(job, check, 4.9) == []
    (finding,) = after(job, check, 0.2)
    assert finding.rank == 0


def test_no_progress_limit_of_a_checkpoint_can_be_set() -> None:
    """As the others."""
    job = started()
    job.state.ranks[0].is_saving = True
    check = NoProgress(load({"progress_save_s": 20}).config.progress_limits(), States())
    assert after(job, check, 19) == []
    assert after(job, check, 2)


def test_no_progress_end_of_a_change_counts_as_progress() -> None:
    """The first step after a change is measured from the end of the change."""
    job, check = started(), NoProgress(state_of=States())
    job.change(plan_of(((9, 8, 7), (12, 12)), epoch=2), Reason.OPERATOR, seconds=10)
    assert after(job, check, 4.5) == []


def test_no_progress_dead_rank_that_others_wait_for_is_told() -> None:
    """Survivors that wait for a dead rank are stuck because of it."""
    job, check = started(), NoProgress(state_of=States())
    job.enter([0, 1, 3, 4], seq=9)
    job.kill(2)
    (finding,) = after(job, check, 6.0)
    assert finding.rank == 2
    assert "died" in finding.summary


def test_no_progress_finished_job_no_finding() -> None:
    """All ranks left: there is nothing to be stuck."""
    job, check = started(), NoProgress(state_of=States())
    for rank in job.state.ranks.values():
        rank.exited, rank.alive = 0, False
    assert not check.ready(job.state)
    assert after(job, check, 1000) == []


def test_no_progress_ends_with_the_next_step() -> None:
    """The clear event: a step is committed."""
    job, check = started(), NoProgress(state_of=States())
    assert after(job, check, 6.0)
    job.commit()
    assert check.run(job.state, job.clock.now_ns) == []


def test_no_progress_limits_come_from_the_configuration() -> None:
    """A lower floor fires earlier."""
    limits = ProgressLimits(floor_s=1.0, factor=2, stopped_floor_s=1.0)
    job, check = started(), NoProgress(limits, state_of=States())
    assert after(job, check, 1.2)


def test_process_state_of_this_process_and_of_none() -> None:
    """The state of a running process is R or S; of a pid that cannot be, unknown."""
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(2**22 + 1) is None


@pytest.mark.parametrize("state", [None, "S", "R", "D"])
def test_no_progress_unreadable_state_is_not_stopped(state: str | None) -> None:
    """What cannot be read is unknown, not stopped."""
    job = started()
    check = NoProgress(state_of=lambda pid: state)
    job.enter([0, 1, 2, 3], seq=3)
    assert after(job, check, 3.0) == []
