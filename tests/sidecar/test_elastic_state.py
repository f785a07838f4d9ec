"""Ranks come and go, changes break off, steps go back: the state stays true and the checks calm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ntp_core.observe import ChangePhase, ChangeStatus, Op, Reason
from sidecar.checks.dead_rank import DeadRank
from sidecar.checks.no_progress import NoProgress
from sidecar.checks.slow_rank import SlowRank
from sidecar.export.job_totals import JobTotals
from sidecar.ingest.apply import Applier
from sidecar.ingest.changes import SETTLE_NS
from sidecar.ingest.fingerprints import FingerprintBook
from sidecar.ingest.job import JobIngest
from sidecar.ingest.slowness import slowness
from sidecar.ingest.state import JobState, RankState, StepSample
from sidecar.judge import ChangeJudge
from sidecar.probe.writer import ProbeObserver
from sidecar.view import job_view, ranks_view
from sidecar.wire.ring import RingWriter
from sidecar.wire.rundir import ring_name
from tests.support.jobs import DrivenJob, plan_of
from tests.support.rings import observer_in, run_dir_in, small_header

FIRST = plan_of(((8, 8, 8), (12, 12)))
WITHOUT_1 = plan_of(((12, 12), (12, 12)), epoch=2, ranks=(0, 2, 3, 4))
OLD, NEW = "a" * 16, "b" * 16


def stranger(job: DrivenJob, rank: int) -> RankState:
    """A process that has a rank and no place in the plan: it asks to be let in."""
    state = RankState(rank=rank, pid=9000 + rank, alive=True, start_ns=job.clock.now_ns)
    job.state.ranks[rank] = state
    return state


def test_step_is_held_back_by_members_alone() -> None:
    """Not by a rank that was left behind, nor by one that knocks or was let in just now."""
    job = DrivenJob(FIRST)
    for _ in range(3):
        job.commit()
    job.kill(1)
    job.change(WITHOUT_1, Reason.RANK_DIED)
    for _ in range(4):
        job.commit()
    assert job.state.step == 7
    stranger(job, 1)
    assert job.state.step == 7
    assert [r.rank for r in job.state.members] == [0, 2, 3, 4]
    job.change(plan_of(((8, 8, 8), (12, 12)), epoch=3), Reason.RANK_RETURNED)
    assert job.state.step == 7, "it has made none yet"
    job.commit()
    assert job.state.step == 8


def test_loss_is_told_by_a_member_also_when_the_job_went_back() -> None:
    """The dead rank has seen later steps than the job has now."""
    job = DrivenJob(FIRST)
    for _ in range(10):
        job.commit()
    job.kill(1)
    job.change(WITHOUT_1, Reason.RANK_DIED)
    job.step = 5
    job.commit()
    assert job.state.lead is job.state.ranks[0]
    view = job_view(job.state, [], now_ns=job.clock.now_ns)
    assert (view["step"], view["loss"]) == (6, pytest.approx(5.0 * 0.99**6))
    assert (view["ranks_dead"], view["ranks_left"]) == (0, 1)


def test_ranks_outside_the_plan_are_shown_as_left_or_standing_by() -> None:
    """Neither is dead, slow or stuck."""
    job = DrivenJob(FIRST)
    job.commit()
    job.kill(1)
    job.change(WITHOUT_1, Reason.RANK_DIED)
    stranger(job, 7)
    health = {r["rank"]: r["health"] for r in ranks_view(job.state, [], now_ns=job.clock.now_ns)}
    assert health == {0: "ok", 1: "left", 2: "ok", 3: "ok", 4: "ok", 7: "standby"}


def test_dead_rank_says_that_the_job_goes_on_however_long_that_took() -> None:
    """The last word of the incident names the epoch; then there is nothing to report."""
    job, check = DrivenJob(FIRST), DeadRank()
    job.commit()
    check.run(job.state, job.clock.now_ns)
    job.kill(1)
    (finding,) = check.run(job.state, job.clock.now_ns)
    assert "goes on" not in finding.summary
    job.clock.advance(30)
    job.change(WITHOUT_1, Reason.RANK_DIED)
    (finding,) = check.run(job.state, job.clock.now_ns)
    assert finding.summary.endswith("; the job goes on without it under epoch 2.")
    assert check.run(job.state, job.clock.now_ns) == []


def test_dead_rank_that_was_no_member_is_no_loss() -> None:
    """A newcomer that gives up, and a rank left behind that ends later."""
    job, check = DrivenJob(FIRST), DeadRank()
    check.run(job.state, job.clock.now_ns)
    job.change(WITHOUT_1, Reason.RANK_DIED)  # rank 1 was stopped: it lives
    newcomer = stranger(job, 7)
    assert check.run(job.state, job.clock.now_ns) == []
    newcomer.alive, newcomer.exited = False, 1
    job.kill(1)
    assert check.run(job.state, job.clock.now_ns) == []


def test_no_progress_blames_no_rank_outside_the_plan() -> None:
    """One that knocks is in no collective while all others are: it keeps nobody waiting."""
    job = DrivenJob(FIRST)
    check = NoProgress(state_of=lambda pid: "T" if pid == 9001 else "S")
    for _ in range(5):
        job.commit()
    job.kill(1)
    job.change(WITHOUT_1, Reason.RANK_DIED)
    job.commit()
    stranger(job, 1)
    job.begin_step()
    job.enter([0, 3, 4], seq=5)
    (finding,) = check.run(job.state, job.clock.advance(120))
    assert finding.rank == 2


def test_no_progress_compares_no_numbers_of_different_generations() -> None:
    """Groups begin to count anew: who is in an old generation is late, whatever its number."""
    job, check = DrivenJob(FIRST), NoProgress(state_of=lambda pid: "S")
    for _ in range(5):
        job.commit()
    job.begin_step()
    job.enter([0, 1, 2, 4], seq=3, group=2 << 16)
    job.enter([3], seq=9000, group=1 << 16)
    (finding,) = check.run(job.state, job.clock.advance(120))
    assert finding.rank == 3
    assert "number 3 of group 0, generation 2" in finding.signals["collective"]


def test_slow_rank_judges_members_alone() -> None:
    """A rank that was left behind has old samples under an old plan; it stops no judgement."""
    job, check = DrivenJob(FIRST), SlowRank()
    for _ in range(8):
        job.commit()
    job.change(WITHOUT_1, Reason.RANK_DIED)
    for _ in range(8):
        job.commit({3: 3.0})
    assert check.ready(job.state)
    assert [f.rank for f in check.run(job.state, job.clock.now_ns)] == [3]
    assert set(slowness(job.state)) == {0, 2, 3, 4}


def test_judge_finds_the_steps_before_a_change_that_went_back() -> None:
    """The same steps were made under both plans."""
    job = DrivenJob(FIRST)
    for _ in range(20):
        job.commit()
    job.kill(1)
    change = job.change(WITHOUT_1, Reason.RANK_DIED)
    job.step = 10
    for _ in range(20):
        job.commit()
    ChangeJudge().judge(job.state, {}, {}, now_ns=job.clock.now_ns)
    assert change.step_time_before_s == pytest.approx(1.02 * 12 / 48)
    assert change.step_time_after_s == pytest.approx(1.02 * 12 / 48)


def test_steps_made_again_under_a_later_plan_are_counted_again() -> None:
    """They cost the same; a late word of the old plan is no news."""
    totals, rank = JobTotals(job_id="j"), RankState(rank=0, pid=1, replica=0)

    def step(number: int, epoch: int) -> StepSample:
        return StepSample(
            step=number, end_ns=number, duration_ns=10, busy_ns=1, tokens=8, loss=1.0, epoch=epoch,
            work=1.0,
        )  # fmt: skip

    for number, epoch in ((1, 1), (2, 1), (3, 1), (2, 2), (3, 1), (2, 2), (3, 2), (4, 2)):
        totals.observe_step(rank, step(number, epoch))
    assert totals.tokens == 6 * 8


# -- fingerprints


def test_fingerprints_of_a_step_that_broke_off_are_not_compared_with_its_second_try() -> None:
    """One replica had reported under the plan before."""
    job = JobState(job_id="j")
    book = FingerprintBook(job)
    book.expect(1, 2)
    book.expect(2, 2)
    book.add(1, 4, 0, 111)
    for replica in (1, 0):
        book.add(2, 4, replica, 222)
    assert (job.checked_steps, job.identical_steps) == (1, 1)
    assert job.fingerprints == {4: {0: 222, 1: 222}}


def test_fingerprints_are_compared_again_when_the_job_went_back() -> None:
    """Every rank tells so by its first step; only what is older than its plan is forgotten."""
    job = JobState(job_id="j")
    book = FingerprintBook(job)
    book.expect(1, 2)
    book.expect(2, 2)
    for step in (1, 2, 3):
        for replica in (0, 1):
            book.add(1, step, replica, step)
    book.go_back(2, 2)
    book.add(2, 2, 0, 77)
    book.go_back(2, 2)
    book.add(2, 2, 1, 77)
    assert job.fingerprints == {1: {0: 1, 1: 1}, 2: {0: 77, 1: 77}}
    assert (job.checked_steps, job.identical_steps) == (4, 4)


# -- records of real rings


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where rings lie."""
    return run_dir_in(tmp_path)


@pytest.fixture
def living() -> dict[int, bool]:
    """Rank -> whether its process runs."""
    return {}


def ingest_of(run_dir: Path, living: dict[int, bool]) -> JobIngest:
    """Ranks live as the test says; they are processes 100 + rank."""
    return JobIngest(run_dir, is_running=lambda pid, ticks: living.get(pid - 100, True))


def settle(ingest: JobIngest, seconds: float = 2 * SETTLE_NS / 1e9) -> None:
    """A tick, as if so much later."""
    applier: Applier = ingest._applier
    clock = applier._clock_ns
    applier._clock_ns = lambda: clock() + round(seconds * 1e9)
    ingest.tick()
    applier._clock_ns = clock


def observers(run_dir: Path, ranks: tuple[int, ...]) -> dict[int, ProbeObserver]:
    """Probes of ranks, each as a process of its own."""
    return {g: observer_in(run_dir, g, pid=100 + g) for g in ranks}


def begin(observer: ProbeObserver, epoch: int = 2, step: int = 7) -> None:
    """A rank begins a change."""
    observer.change_begin(epoch, Reason.RANK_DIED, OLD, NEW, step)


def test_change_whose_ranks_have_all_died_is_ended_as_failed(
    run_dir: Path, living: dict[int, bool]
) -> None:
    """Not while one of them lives, and not before their last records can have come."""
    ranks = observers(run_dir, (0, 1))
    ingest = ingest_of(run_dir, living)
    for observer in ranks.values():
        begin(observer)
    ingest.tick()
    (change,) = ingest.job.changes
    living[0] = False
    settle(ingest)
    assert change.end_ns is None, "rank 1 may end it"
    living[1] = False
    ingest.tick()
    assert change.end_ns is None
    settle(ingest)
    assert change.status is ChangeStatus.FAILED
    assert change.error == "ranks 0, 1 died in it; ended by the sidecar"
    assert change.end_ns is not None and change.end_ns >= change.begin_ns


def test_change_of_a_dead_driver_is_ended_by_its_survivor(
    run_dir: Path, living: dict[int, bool]
) -> None:
    """The driver's records stop; the tree is made of what the others told."""
    ranks = observers(run_dir, (0, 1))
    ingest = ingest_of(run_dir, living)
    for observer in ranks.values():
        begin(observer)
    ranks[1].change_phase(2, ChangePhase.QUIESCE, 10, 20, 0)
    living[0] = False
    ranks[1].change_end(2, ChangeStatus.FAILED, 0, 0, 0)
    ingest.tick()
    (change,) = ingest.job.changes
    assert (change.status, change.error, change.driver) == (ChangeStatus.FAILED, "", 0)


def test_change_left_for_a_newer_one_is_ended(run_dir: Path, living: dict[int, bool]) -> None:
    """Its ranks live and are in another change; a late end of a rank counts more than that."""
    ranks = observers(run_dir, (0, 1))
    ingest = ingest_of(run_dir, living)
    begin(ranks[0], 2)
    begin(ranks[1], 2)
    begin(ranks[0], 3)
    begin(ranks[1], 3)
    settle(ingest)
    first, second = ingest.job.changes
    assert first.error == "given up by its ranks without a word; ended by the sidecar"
    assert (first.status, second.status) == (ChangeStatus.FAILED, None)
    ranks[1].change_end(2, ChangeStatus.COMMITTED, 5, 5, 5)
    ingest.tick()
    assert (first.status, first.error) == (ChangeStatus.COMMITTED, "")


def test_collective_that_a_peers_death_broke_off_is_given_up(
    run_dir: Path, living: dict[int, bool]
) -> None:
    """It has no end record. With the change begins a new life, in groups of a new generation."""
    (rank,) = observers(run_dir, (0,)).values()
    ingest = ingest_of(run_dir, living)
    rank.collective_begin(Op.ALL_REDUCE, 3, 41, 64)
    ingest.tick()
    state = ingest.job.ranks[0]
    assert state.collective is not None
    begin(rank)
    ingest.tick()
    assert (state.collective, state.step) == (None, 7)
    state.epoch = 2
    rank.collective_begin(Op.ALL_REDUCE, (1 << 16) + 3, 1, 64)
    rank.collective_begin(Op.ALL_REDUCE, 2 << 16, 1, 64)
    ingest.tick()
    assert state.collective is not None
    assert state.collective.group == 2 << 16


def test_rank_that_returns_is_alive_again_whatever_its_old_ring_says(
    run_dir: Path, living: dict[int, bool]
) -> None:
    """Same number, new process, new ring; the old one stays in the directory."""
    old = observer_in(run_dir, 3, pid=103)
    old.step_end(5, 10, 10, 1, 1.0)
    ingest = ingest_of(run_dir, living)
    ingest.tick()
    living[3] = False
    ingest.tick()
    assert ingest.job.ranks[3].alive is False
    new = observer_in(run_dir, 3, pid=203)
    for _ in range(3):
        ingest.tick()
    state = ingest.job.ranks[3]
    assert (state.pid, state.alive, state.step) == (203, True, 0)
    begin(new, 4, 60)
    ingest.tick()
    assert ingest.job.ranks[3].step == 60


def test_rank_beyond_the_first_world_may_be_named(run_dir: Path, living: dict[int, bool]) -> None:
    """A job may let in more ranks than it began with; what they say is no bad record."""
    ranks = observers(run_dir, (0,))  # a ring of a world of 8
    header = replace(small_header(11, world=12), pid=111)
    RingWriter.create(run_dir / ring_name(11, 111), header)
    ingest = ingest_of(run_dir, living)
    ingest.tick()
    ranks[0].fault_injected(3, 2, 11, 0)
    ingest.tick()
    assert (ingest.job.bad_records, ingest.job.faults[0].rank) == (0, 11)


def test_step_that_goes_back_forgets_what_was_found_later(
    run_dir: Path, living: dict[int, bool]
) -> None:
    """A verdict about a step that the job will make again."""
    (rank,) = observers(run_dir, (0,)).values()
    ingest = ingest_of(run_dir, living)
    rank.step_end(9, 10, 10, 1, 1.0)
    rank.divergence(9, 1, 0, 0, 0, 0)
    ingest.tick()
    assert len(ingest.job.divergences) == 1
    ingest.job.ranks[0].epoch = 2
    rank.step_begin(6)
    ingest.tick()
    assert len(ingest.job.divergences) == 0
