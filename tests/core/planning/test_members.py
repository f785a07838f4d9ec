"""Is the job faster without a rank? Against all subsets."""

from __future__ import annotations

import itertools
import random

import pytest

from ntp_core.errors import PlanError
from ntp_core.planner import CompletionTime, RankCost, max_time_s, min_max_shares
from ntp_core.planning.members import RingCollectives, without_slow_ranks
from ntp_core.planning.phases import StepCost


def draw_costs(draw: random.Random, units: int) -> list[CompletionTime]:
    """2-5 ranks: lines with starts and caps, and tables."""
    costs: list[CompletionTime] = []
    for _ in range(draw.randint(2, 5)):
        times = [draw.uniform(0, 3) + n * draw.uniform(0.1, 2) for n in range(units + 1)]
        line = RankCost(
            unit_s=draw.choice([1.0, draw.uniform(0.1, 5.0)]),
            start_s=draw.choice([0.0, draw.uniform(0, 3)]),
            cap=draw.choice([None, None, draw.randint(0, 6)]),
        )
        costs.append(draw.choice([line, line, StepCost.of(lambda n, t=times: t[n], units)]))
    return costs


@pytest.mark.parametrize("seed", range(400))
def test_without_slow_ranks_equals_brute_force_over_all_subsets(seed: int) -> None:
    """No subset of ranks with any shares is faster, collectives included."""
    draw = random.Random(seed)
    units = draw.randint(1, 10)
    costs = draw_costs(draw, units)
    ring = RingCollectives(calls=1, hop_s=draw.choice([0.0, 0.1, 1.0]))
    best = None
    for size in range(1, len(costs) + 1):
        for members in itertools.combinations(range(len(costs)), size):
            chosen = [costs[i] for i in members]
            try:
                time_s = max_time_s(min_max_shares(units, chosen), chosen) + ring(size)
            except PlanError:
                continue
            best = time_s if best is None else min(best, time_s)
    if best is None:
        with pytest.raises(PlanError):
            without_slow_ranks(units, costs, ring)
        return
    found = without_slow_ranks(units, costs, ring)
    assert found.best.time_s == pytest.approx(best, rel=1e-12)
    assert sum(found.shares) == units
    assert max_time_s(found.shares, costs) == pytest.approx(found.best.work_s)
    assert all(found.shares[i] == 0 for i in found.left_out)


def test_without_slow_ranks_keeps_a_rank_that_brings_more_than_it_costs() -> None:
    """Half a rank is better than none when collectives are cheap."""
    costs = [RankCost(unit_s=1.0)] * 3 + [RankCost(unit_s=2.0)]
    found = without_slow_ranks(64, costs, RingCollectives(calls=1, hop_s=0.01))
    assert found.left_out == ()
    assert [len(t.members) for t in found.trials] == [4, 3, 2, 1][: len(found.trials)]


def test_without_slow_ranks_leaves_out_one_that_costs_more_than_it_brings() -> None:
    """A tenth of a rank saves 1.6 of 64 units' time at a hop of 2: the evidence shows both."""
    costs = [RankCost(unit_s=1.0)] * 3 + [RankCost(unit_s=10.0)]
    found = without_slow_ranks(64, costs, RingCollectives(calls=1, hop_s=1.0), present=(16,) * 4)
    assert found.left_out == (3,)
    assert found.trials[0].time_s > found.best.time_s
    assert sorted(found.shares) == [0, 21, 21, 22]


def test_ring_collectives_by_hand() -> None:
    """Four members: 6 hops, and 3/2 of the bytes over each link."""
    ring = RingCollectives(calls=10, hop_s=1e-6, size_bytes=4e6, bytes_per_s=1e9)
    assert ring(4) == pytest.approx(10 * (6e-6 + 1.5 * 4e-3))
    assert ring(1) == 0.0
