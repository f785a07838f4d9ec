"""Uneven shares must never look slow, nor hide a slow rank."""

from __future__ import annotations

import random

import pytest

from sidecar.ingest.slowness import slowness
from sidecar.ingest.state import JobState, RankState, StepSample

WORK_NS = 1_000_000_000  # time for the whole job's work on one normal rank


def step(number: int, busy_ns: int, work: float | None, epoch: int = 1) -> StepSample:
    """One committed step; only what slowness reads matters."""
    return StepSample(
        step=number,
        end_ns=number,
        duration_ns=2 * busy_ns,
        busy_ns=busy_ns,
        tokens=1,
        loss=1.0,
        epoch=epoch,
        work=work,
    )


def job_of(shares: list[float], speeds: list[float], steps: int = 5) -> JobState:
    """A job whose rank i has shares[i] of the work and runs at speeds[i]."""
    job = JobState(job_id="j")
    for rank, (share, speed) in enumerate(zip(shares, speeds, strict=True)):
        state = RankState(rank=rank, pid=1, alive=True, epoch=1, work=share)
        busy_ns = round(WORK_NS * share / speed)
        state.steps.extend(step(n, busy_ns, share) for n in range(1, steps + 1))
        job.ranks[rank] = state
    return job


def test_slowness_uneven_shares_look_normal() -> None:
    """Ranks at the same speed are all 1, however uneven their shares are."""
    job = job_of([0.4, 0.3, 0.15, 0.1, 0.05], [1.0] * 5)
    assert slowness(job) == pytest.approx(dict.fromkeys(range(5), 1.0))


@pytest.mark.parametrize("seed", range(20))
def test_slowness_random_shares_name_only_the_slow_rank(seed: int) -> None:
    """For any shares, the rank at a third of the speed is 3 and all others are 1."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 9)
    parts = [rng.uniform(0.1, 1.0) for _ in range(ranks)]
    slow = rng.randrange(ranks)
    speeds = [1 / 3 if rank == slow else 1.0 for rank in range(ranks)]
    found = slowness(job_of([p / sum(parts) for p in parts], speeds))
    expected = {rank: 3.0 if rank == slow else 1.0 for rank in range(ranks)}
    assert found == pytest.approx(expected, rel=1e-6), f"seed {seed}"


def test_slowness_small_share_of_slow_rank_does_not_hide_it() -> None:
    """A slow rank that got a third of the work is as busy as its peers, and still named."""
    job = job_of([3 / 7, 3 / 7, 1 / 7], [1.0, 1.0, 1 / 3])
    busy = {r.steps[-1].busy_ns for r in job.ranks.values()}
    assert max(busy) - min(busy) <= 1
    assert slowness(job) == pytest.approx({0: 1.0, 1: 1.0, 2: 3.0}, rel=1e-6)


def test_slowness_one_odd_step_names_nobody() -> None:
    """One long step among five is noise."""
    job = job_of([0.5, 0.5], [1.0, 1.0])
    job.ranks[1].steps[2].busy_ns *= 50
    assert slowness(job) == pytest.approx({0: 1.0, 1: 1.0})


def test_slowness_steps_of_an_older_epoch_do_not_count() -> None:
    """After a change only the steps under the new shares are compared."""
    job = job_of([0.5, 0.5], [1.0, 1.0])
    slow_before = job.ranks[0]
    for sample in slow_before.steps:
        sample.busy_ns *= 10
    slow_before.epoch = 2
    assert slowness(job) == pytest.approx({1: 1.0})
    slow_before.steps.append(step(6, WORK_NS // 2, 0.5, epoch=2))
    assert slowness(job) == pytest.approx({0: 1.0, 1: 1.0})


def test_slowness_window_is_respected() -> None:
    """Steps before the newest `window` are forgotten."""
    job = job_of([0.5, 0.5], [1.0, 1.0], steps=9)
    for sample in list(job.ranks[1].steps)[:6]:
        sample.busy_ns *= 10
    assert slowness(job, window=3) == pytest.approx({0: 1.0, 1: 1.0})
    assert slowness(job, window=9)[1] == pytest.approx(10.0)


def test_slowness_unknown_dead_and_tiny_ranks_are_left_out() -> None:
    """No share, no life, or a share below 1 % of the mean: no number instead of a wrong one."""
    job = job_of([0.5, 0.499, 0.001, 0.3, 0.3], [1.0, 1.0, 0.01, 1.0, 0.1])
    job.ranks[3].work = None
    job.ranks[4].alive = False
    assert slowness(job) == pytest.approx({0: 1.0, 1: 1.0})


def test_slowness_nothing_known_is_empty() -> None:
    """No rank, no step, no busy time: empty, never a division by zero."""
    assert slowness(JobState(job_id="j")) == {}
    assert slowness(job_of([0.5, 0.5], [1.0, 1.0], steps=0)) == {}
    idle = job_of([0.5, 0.5], [1.0, 1.0])
    for rank in idle.ranks.values():
        for sample in rank.steps:
            sample.busy_ns = 0
    assert slowness(idle) == {}
    assert slowness(job_of([0.0, 0.0], [1.0, 1.0])) == {}
