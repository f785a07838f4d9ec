"""Thousands of replicas at once: equal to one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from ntp_core.cost import Work
from ntp_core.errors import InvalidInput, PlanError
from ntp_core.planning.fleet import plan_fleet
from ntp_core.planning.job import PlanOptions, plan_job
from ntp_core.planning.members import RingCollectives
from ntp_core.planning.memory import MemoryNeed
from ntp_core.planning.phases import RankSpeed
from ntp_core.planning.replica import RankState
from ntp_core.units import ModelUnits
from tests.support.random_plans import A, M, V

COUNTS = {A: 16, M: 40, V: 25}
WORK = Work(unit={A: 9.0, M: 5.0, V: 2.0}, rank=7.0)
MODEL = ModelUnits(counts=COUNTS, tensors=())


def draw_speeds(seed: int, replicas: int, ranks: int) -> np.ndarray:
    """Many equal speeds, some slow ranks, some dead ones, one replica all dead."""
    rng = np.random.default_rng(seed)
    speeds = np.where(
        rng.random((replicas, ranks)) < 0.3, rng.uniform(0.1, 1, (replicas, ranks)), 1.0
    )
    speeds[rng.random((replicas, ranks)) < 0.1] = 0.0
    speeds[0] = 0.0
    return speeds


def states(speeds: np.ndarray, memory: float = np.inf) -> list[list[RankState]]:
    """The living ranks of each replica that has one."""
    rows = [
        [
            RankState(
                rank=r * speeds.shape[1] + i,
                speed=RankSpeed(flops_per_s=float(v)),
                memory_bytes=memory,
            )
            for i, v in enumerate(row)
            if v > 0
        ]
        for r, row in enumerate(speeds)
    ]
    return [row for row in rows if row]


@pytest.mark.parametrize("seed", range(25))
def test_plan_fleet_equals_plan_job(seed: int) -> None:
    """Same shares, batches, times and ideal as the planner of single jobs, unit for unit."""
    speeds = draw_speeds(seed, 6, 5)
    ring = RingCollectives(calls=4, hop_s=0.1 * (seed % 3))
    fleet = plan_fleet(COUNTS, WORK, speeds, 60, collective_s=ring)
    job = plan_job(MODEL, WORK, states(speeds), 60, options=PlanOptions(collective_s=ring))
    assert fleet.plan() == job.plan
    assert fleet.step_s == pytest.approx(job.prediction.step_s, rel=1e-12)
    assert fleet.ideal_s == pytest.approx(job.prediction.ideal_s, rel=1e-12)
    assert 0 < fleet.efficiency <= 1 + 1e-12
    assert 0 in fleet.left_out


@pytest.mark.parametrize("ranks", [8, 72])
def test_plan_fleet_of_thousands_places_every_unit(ranks: int) -> None:
    """4,096 replicas: complete shares in each living one, none on the dead, batch kept."""
    rng = np.random.default_rng(ranks)
    speeds = rng.uniform(0.5, 1.0, (4096, ranks))
    speeds[rng.random(speeds.shape) < 0.004] = 0.0
    fleet = plan_fleet({A: 64, M: 224}, Work(unit={A: 3.0, M: 4.0}), speeds, 16384)
    for kind, count in {A: 64, M: 224}.items():
        assert (fleet.shares[kind].sum(1) == count).all()
        assert (fleet.shares[kind][speeds == 0] == 0).all()
    assert fleet.batches.sum() == 16384
    assert fleet.batches.min() >= 1


def test_plan_fleet_where_memory_binds_equals_plan_job() -> None:
    """Replicas that lost ranks run out of memory: planned within it, or left out."""
    speeds = np.ones((4, 4))
    speeds[1, 0] = 0.25
    speeds[2, :2] = 0.0
    speeds[3, :3] = 0.0
    need = MemoryNeed(unit={A: 4.0, M: 2.0, V: 1.0}, rank=3.0)
    fleet = plan_fleet(COUNTS, WORK, speeds, 60, need=need, memory_bytes=100.0)
    assert fleet.left_out == (3,)
    used = need.rank + sum(need.unit[k] * n for k, n in fleet.shares.items())
    assert used[fleet.is_member].max() <= 100.0
    job = plan_job(MODEL, WORK, states(speeds, 100.0)[:3], 60, options=PlanOptions(need=need))
    assert fleet.step_s == pytest.approx(job.prediction.step_s)


def test_plan_fleet_without_a_replica_is_refused() -> None:
    """All dead, or no replica with enough memory."""
    with pytest.raises(PlanError, match="none of 3 replicas"):
        plan_fleet(COUNTS, WORK, np.zeros((3, 4)), 60)
    with pytest.raises(PlanError, match="none of 2 replicas"):
        need = MemoryNeed(unit={A: 4.0})
        plan_fleet(COUNTS, WORK, np.ones((2, 4)), 60, need=need, memory_bytes=10.0)


@pytest.mark.parametrize("bad", [np.ones(4), np.full((2, 2), np.nan), np.full((2, 2), -1.0)])
def test_plan_fleet_of_impossible_speeds_is_refused(bad: np.ndarray) -> None:
    """Speeds are finite, not negative, one row a replica."""
    with pytest.raises(InvalidInput, match="speeds of shape"):
        plan_fleet(COUNTS, WORK, bad, 60)
