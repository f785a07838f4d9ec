"""Completion times: rooflines, measured phases, waves and copied blocks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.cost import Work
from ntp_core.errors import InvalidInput
from ntp_core.planner import CompletionTime, RankCost, ideal_time_s, max_time_s, min_max_shares
from ntp_core.planning.phases import (
    Phase,
    PhaseTime,
    RankSpeed,
    RooflineCost,
    SharedBlockCost,
    StepCost,
    kind_costs,
    phases_of_work,
)
from ntp_core.units import TensorSpec, blocks_of_units
from tests.support.random_plans import A, M

COUNTS = {A: 6, M: 10}


def draw_cost(draw: random.Random, units: int) -> CompletionTime:
    """A roofline, a table of times that go up and down, copied blocks, or a line."""
    line = RankCost(unit_s=draw.uniform(0.1, 2.0), start_s=draw.choice([0.0, draw.uniform(0, 3)]))
    parts = tuple(
        PhaseTime(
            flops_s=draw.uniform(0, 2),
            flops_start_s=draw.uniform(0, 1),
            moved_s=draw.uniform(0, 2),
            moved_start_s=draw.uniform(0, 4),
        )
        for _ in range(draw.randint(1, 3))
    )
    times = [draw.uniform(0, 5) + n for n in range(units + 1)]
    sharing = draw.randint(1, 3)
    return draw.choice(
        [
            line,
            RooflineCost(phases=parts, cap=draw.choice([None, units])),
            StepCost.of(lambda n: times[n], units),
            SharedBlockCost(units=line, sharing=sharing, blocks=4, block_s=draw.uniform(0, 2)),
        ]
    )


@pytest.mark.parametrize("seed", range(300))
def test_min_max_shares_of_any_monotone_times_equal_brute_force(seed: int) -> None:
    """Whatever the shape of the times, nothing among all shares is faster."""
    draw = random.Random(seed)
    units, ranks = draw.randint(1, 8), draw.randint(2, 4)
    costs = [draw_cost(draw, units) for _ in range(ranks)]
    best = min(
        max_time_s(shares, costs)
        for shares in itertools.product(range(units + 1), repeat=ranks)
        if sum(shares) == units
    )
    shares = min_max_shares(units, costs)
    assert sum(shares) == units
    assert max_time_s(shares, costs) == best
    assert ideal_time_s(units, costs) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_min_max_shares_of_many_units_and_curved_times_equal_dealing_one_by_one(seed: int) -> None:
    """The head start by bisection is exact for rooflines and plateaus too."""
    draw = random.Random(seed)
    costs = [draw_cost(draw, 200) for _ in range(5)]
    shares = [0] * 5
    for _ in range(200):
        free = [i for i, c in enumerate(costs) if c.cap is None or shares[i] < c.cap]
        shares[min(free, key=lambda i: (costs[i].time_s(shares[i] + 1), i))] += 1
    assert min_max_shares(200, costs) == tuple(shares)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
@settings(deadline=None)
def test_step_cost_is_the_least_monotone_bound(times: list[float]) -> None:
    """Never below what was measured, never falling, and equal to some measured time."""
    cost = StepCost.of(lambda n: times[n], len(times) - 1)
    assert cost.cap == len(times) - 1
    for n in range(len(times)):
        assert cost.time_s(n) == max(times[: n + 1])


def test_roofline_is_the_longer_of_both_in_each_phase() -> None:
    """A phase bound by memory and one bound by arithmetic add up, by hand."""
    phases = (
        Phase(name="matmul", flops={A: 100.0, M: 100.0}, moved_bytes={A: 10.0, M: 10.0}),
        Phase(name="update", flops={A: 1.0, M: 1.0}, moved_bytes={A: 60.0, M: 60.0}),
    )
    speed = RankSpeed(flops_per_s=50.0, bytes_per_s=20.0)
    cost = kind_costs(A, COUNTS, phases, [speed], [0.0])[0]
    assert isinstance(cost, RankCost)
    assert cost.time_s(3) == pytest.approx(3 * (100 / 50 + 60 / 20))


@pytest.mark.parametrize("units", range(7))
def test_roofline_bends_where_a_fixed_part_hides_behind_memory(units: int) -> None:
    """Weights are read whatever the batch: memory binds small shares, arithmetic large ones."""
    phase = Phase(name="decode", flops={A: 6.0}, moved_bytes={A: 1.0}, rank_bytes=12.0)
    cost = kind_costs(A, {A: 6}, (phase,), [RankSpeed(flops_per_s=2.0, bytes_per_s=1.0)], [0.5])[0]
    assert cost.time_s(units) == pytest.approx(0.5 + max(3.0 * units, 12.0 + units))


def test_measured_phase_speed_stands_in_for_the_roofline() -> None:
    """Where a phase was timed, its own speed counts; elsewhere the roofline does."""
    phases = (Phase(name="prefill", flops={A: 8.0}, moved_bytes={A: 999.0}),)
    timed = RankSpeed(flops_per_s=1.0, bytes_per_s=1.0, phases={"prefill": 4.0})
    assert kind_costs(A, {A: 2}, phases, [timed], [0.0])[0].time_s(1) == 2.0


def test_ratios_differ_by_phase_and_so_do_shares() -> None:
    """A GPU with twice the arithmetic and the same memory gets more only where arithmetic binds."""
    speeds = [
        RankSpeed(flops_per_s=2.0, bytes_per_s=1.0),
        RankSpeed(flops_per_s=1.0, bytes_per_s=1.0),
    ]
    train = (Phase(name="train", flops={A: 10.0}, moved_bytes={A: 1.0}),)
    decode = (Phase(name="decode", flops={A: 0.1}, moved_bytes={A: 1.0}),)
    shares = [
        min_max_shares(12, kind_costs(A, {A: 12}, p, speeds, [0.0, 0.0])) for p in (train, decode)
    ]
    assert shares == [(8, 4), (6, 6)]


def test_plain_work_is_one_phase_with_fixed_work_in_proportion() -> None:
    """Equal to work / speed, with the fixed part split over kinds by their size."""
    work = Work(unit={A: 10.0, M: 4.0}, rank=50.0)
    costs = kind_costs(A, COUNTS, phases_of_work(work), [RankSpeed(flops_per_s=2.0)], [0.0])
    assert costs == [RankCost(unit_s=5.0, start_s=50 * 0.6 / 2)]


@pytest.mark.parametrize("sharing", [1, 2, 3, 8])
def test_shared_blocks_bound_is_reached_and_never_exceeded(sharing: int) -> None:
    """Over all places of a run of units, the most blocks it touches is the bound."""
    units, blocks = 4 * sharing, 4
    tensor = TensorSpec(name="k", shape=(units, 2), kind=A, sharing=sharing)
    cost = SharedBlockCost(units=RankCost(unit_s=1.0), sharing=sharing, blocks=blocks, block_s=0.5)
    for n in range(1, units + 1):
        most = max(
            len(blocks_of_units(tensor, tuple(range(first, first + n))))
            for first in range(units - n + 1)
        )
        assert most == cost.touched(n)
        assert cost.time_s(n) == n + 0.5 * most
    assert cost.time_s(0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_speed_that_is_none_is_refused(rate: float) -> None:
    """A rank that does nothing is left out by the caller, not given an endless time."""
    with pytest.raises(InvalidInput, match="speed > 0"):
        RankSpeed(flops_per_s=rate)
    with pytest.raises(InvalidInput, match="prefill"):
        RankSpeed(flops_per_s=1.0, phases={"prefill": rate})
