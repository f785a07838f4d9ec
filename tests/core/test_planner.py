"""Exact min-max shares, against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.errors import PlanError
from ntp_core.plan import Layout
from ntp_core.planner import (
    CompletionTime,
    RankCost,
    ideal_time_s,
    keep_placement,
    max_time_s,
    min_max_shares,
    over_ideal,
)
from tests.support.random_plans import random_layout, random_shares

DRAWS = 10_000
Ints = npt.NDArray[np.int64]


@cache
def compositions(units: int, ranks: int) -> Ints:
    """All ways to give `units` to `ranks`, one a row."""
    bars = itertools.combinations(range(units + ranks - 1), ranks - 1)
    rows = [np.diff([-1, *b, units + ranks - 1]) - 1 for b in bars]
    return np.array(rows, dtype=np.int64)


def allowed(units: int, costs: list[RankCost], least: int) -> Ints:
    """All shares within caps and with at least `least` each."""
    rows = compositions(units, len(costs))
    caps = np.array([units if c.cap is None else c.cap for c in costs])
    return rows[((rows <= caps) & (rows >= least)).all(1)]


def times(rows: Ints, costs: list[RankCost]) -> npt.NDArray[np.float64]:
    """Completion time of the slowest rank that has units, by row."""
    starts = np.array([c.start_s for c in costs])
    each = np.array([c.unit_s for c in costs])
    return np.where(rows > 0, starts + rows * each, 0.0).max(1)


def draw_costs(draw: random.Random) -> list[RankCost]:
    """2-4 ranks: equal, of few speeds (many ties) or of any; starts and caps now and then."""
    kind = draw.randrange(3)

    def unit_s() -> float:
        return (1.0, draw.choice([1.0, 0.5, 2.0]), draw.uniform(0.1, 3.0))[kind]

    return [
        RankCost(
            unit_s=unit_s(),
            start_s=draw.choice([0.0, 0.0, 1.0, draw.uniform(0, 4)]),
            cap=draw.choice([None, None, draw.randint(0, 6)]),
        )
        for _ in range(draw.randint(2, 4))
    ]


def test_min_max_shares_equal_brute_force_in_all_draws() -> None:
    """10,000 seeded draws: the optimum each time, and a refusal just where nothing fits."""
    wrong, refused = [], 0
    for seed in range(DRAWS):
        draw = random.Random(seed)
        costs, units, least = draw_costs(draw), draw.randint(0, 10), draw.choice([0, 0, 1])
        rows = allowed(units, costs, least)
        if not len(rows):
            refused += 1
            with pytest.raises(PlanError):
                min_max_shares(units, costs, least=least)
            continue
        shares = np.array([min_max_shares(units, costs, least=least)])
        is_allowed = bool((rows == shares).all(1).any())
        if not is_allowed or times(shares, costs)[0] != times(rows, costs).min():
            wrong.append(seed)
    assert wrong == [], "seeds of draws that are not optimal"
    assert 100 < refused < DRAWS / 2


def test_min_max_shares_present_optimal_with_the_fewest_moves_in_all_draws() -> None:
    """Among all optima none takes fewer units away from where they are."""
    slow, far = [], []
    for seed in range(DRAWS):
        draw = random.Random(seed)
        costs, units, least = draw_costs(draw), draw.randint(0, 10), draw.choice([0, 0, 1])
        rows = allowed(units, costs, least)
        if not len(rows):
            continue
        held = draw.choice([units, units, draw.randint(0, 12)])
        present = np.array(random_shares(draw, held, len(costs)))
        shares = np.array([min_max_shares(units, costs, present=present.tolist(), least=least)])
        all_times = times(rows, costs)
        optima = rows[all_times == all_times.min()]
        if not (optima == shares).all(1).any():
            slow.append(seed)
        fewest = (present - optima).clip(min=0).sum(1).min()
        if (present - shares[0]).clip(min=0).sum() != fewest:
            far.append(seed)
    assert slow == [], "seeds of draws that are not optimal"
    assert far == [], "seeds of draws that move too much"


@given(
    units=st.integers(0, 300),
    costs=st.lists(
        st.builds(
            RankCost,
            unit_s=st.floats(1e-3, 1e3),
            start_s=st.floats(0, 1e3),
            cap=st.one_of(st.none(), st.integers(0, 100)),
        ),
        min_size=1,
        max_size=12,
    ),
)
@settings(deadline=None)
def test_min_max_shares_no_single_move_helps(units: int, costs: list[RankCost]) -> None:
    """At any size: all units placed, caps kept, and the slowest rank's last unit has no
    better place."""
    try:
        shares = min_max_shares(units, costs)
    except PlanError:
        assert sum(units if c.cap is None else c.cap for c in costs) < units
        return
    assert units == sum(shares)
    assert all(c.cap is None or n <= c.cap for n, c in zip(shares, costs, strict=True))
    slowest = max_time_s(shares, costs)
    for n, c in zip(shares, costs, strict=True):
        has_room = c.cap is None or n < c.cap
        assert not units or not has_room or c.time_s(n + 1) >= slowest
    if all(c.cap is None for c in costs) and all(shares):
        assert slowest >= ideal_time_s(units, costs) * (1 - 1e-9)


def test_min_max_shares_half_speed_rank_gets_half() -> None:
    """Speeds 1, 1/2, 1 over 10 units: 4, 2, 4 and nobody waits."""
    costs = [RankCost(unit_s=s) for s in (1.0, 2.0, 1.0)]
    assert min_max_shares(10, costs) == (4, 2, 4)
    assert max_time_s((4, 2, 4), costs) == ideal_time_s(10, costs) == 4.0


def test_min_max_shares_optimal_present_is_kept() -> None:
    """Where the present shares are one of many optima they stay."""
    costs = [RankCost(unit_s=1.0)] * 3
    assert min_max_shares(5, costs, present=(1, 2, 2)) == (1, 2, 2)
    assert min_max_shares(5, costs, present=(2, 1, 2)) == (2, 1, 2)


def test_min_max_shares_no_ranks_is_refused() -> None:
    """There must be somebody to do the work."""
    with pytest.raises(PlanError, match="no rank"):
        min_max_shares(3, [])


def test_min_max_shares_caps_message_names_room_and_need() -> None:
    """What the caps hold and what is needed stand in the message."""
    with pytest.raises(PlanError, match="hold 5 units, 6 are needed"):
        min_max_shares(6, [RankCost(unit_s=1, cap=2), RankCost(unit_s=1, cap=3)])


@pytest.mark.parametrize("seed", range(100))
def test_keep_placement_moves_the_fewest_units(seed: int) -> None:
    """The new shares are met, and only what a rank gains is new to it."""
    draw = random.Random(seed)
    count, degree = draw.randint(1, 40), draw.randint(1, 6)
    present = random_layout(draw, count, degree)
    shares = random_shares(draw, count, degree)
    new = keep_placement(shares, present)
    assert shares == new.shares
    assert -1 not in new.owners(count)
    moved = sum(len(set(new.units(r)) - set(present.units(r))) for r in range(degree))
    gained = sum(max(0, s - p) for s, p in zip(shares, present.shares, strict=True))
    assert gained == moved


def test_keep_placement_gives_a_new_rank_its_share() -> None:
    """A rank that joins takes from the others, who keep the rest."""
    new = keep_placement((2, 2, 2), Layout.contiguous((3, 3)))
    assert tuple(new.units(r) for r in range(3)) == ((0, 1), (3, 4), (2, 5))


def test_keep_placement_same_shares_change_nothing() -> None:
    """No change of shares, no change of units."""
    present = random_layout(random.Random(3), 20, 4)
    assert present == keep_placement(present.shares, present)


def one_by_one(units: int, costs: Sequence[CompletionTime]) -> tuple[int, ...]:
    """The greedy rule as it is said, without heap or head start."""
    shares = [0] * len(costs)
    for _ in range(units):
        free = [i for i, c in enumerate(costs) if c.cap is None or shares[i] < c.cap]
        shares[min(free, key=lambda i: (costs[i].time_s(shares[i] + 1), i))] += 1
    return tuple(shares)


@pytest.mark.parametrize("seed", range(150))
def test_min_max_shares_of_many_units_equal_dealing_one_by_one(seed: int) -> None:
    """With hundreds of columns the head start by bisection ends in the very same shares."""
    draw = random.Random(seed)
    caps = [None, None, draw.randint(0, 300)]
    costs = [
        RankCost(
            unit_s=draw.choice([1.0, 0.5, draw.uniform(0.1, 3.0)]),
            start_s=draw.choice([0.0, 0.0, draw.uniform(0, 60.0)]),
            cap=draw.choice(caps),
        )
        for _ in range(draw.randint(1, 9))
    ]
    costs.append(RankCost(unit_s=draw.uniform(0.1, 3.0)))
    units = draw.randint(50, 700)
    assert one_by_one(units, costs) == min_max_shares(units, costs)


@pytest.mark.parametrize("ranks", [8, 71, 72])
def test_min_max_shares_of_all_columns_fill_the_ideal_time(ranks: int) -> None:
    """28,672 single columns: everybody is within one column of the ideal end."""
    draw = random.Random(ranks)
    costs = [RankCost(unit_s=draw.uniform(1.0, 2.0)) for _ in range(ranks)]
    shares = min_max_shares(28672, costs)
    ideal_s = ideal_time_s(28672, costs)
    assert sum(shares) == 28672
    for n, c in zip(shares, costs, strict=True):
        assert ideal_s - c.unit_s < c.time_s(n) < ideal_s + c.unit_s


@pytest.mark.parametrize("seed", range(200))
def test_ideal_time_by_joining_ranks_equals_bisection(seed: int) -> None:
    """Two formulas for the fractional bound: who starts in time joins; and room by a given time."""
    draw = random.Random(seed)
    costs = [
        RankCost(unit_s=draw.uniform(0.1, 3.0), start_s=draw.choice([0.0, draw.uniform(0, 40)]))
        for _ in range(draw.randint(1, 6))
    ]
    units = draw.randint(1, 30)
    low, high = 0.0, costs[0].time_s(units)
    for _ in range(100):
        middle = (low + high) / 2
        room = sum(max(0.0, middle - c.start_s) / c.unit_s for c in costs)
        low, high = (low, middle) if room >= units else (middle, high)
    assert ideal_time_s(units, costs) == pytest.approx(high)
    assert max_time_s(min_max_shares(units, costs), costs) >= high * (1 - 1e-12)


def test_min_max_shares_floor_keeps_what_ends_before_it() -> None:
    """If 9 s pass anyway, shares that end by then stay where they are."""
    costs = [RankCost(unit_s=1.0)] * 3
    assert min_max_shares(12, costs, present=(8, 2, 2)) == (4, 4, 4)
    assert min_max_shares(12, costs, present=(8, 2, 2), floor_s=9.0) == (8, 2, 2)


def test_keep_placement_units_of_a_rank_that_is_gone_find_an_owner() -> None:
    """Survivors keep theirs and share what the dead rank held."""
    new = keep_placement((3, 3), Layout((((0, 2),), ((4, 6),))))
    assert tuple(new.units(r) for r in range(2)) == ((0, 1, 2), (3, 4, 5))


SHAPES = {"groups": 8, "heads": 64, "tiles": 224}
"""Attention of Llama-70B by KV groups and by query heads, its FFN in tiles of 128 columns."""

GRANULES = {  # speed of one of eight GPUs -> time over ideal; 0: dead
    0.9: (1.097, 1.097, 1.023, 1.036, 1.036),
    0.8: (1.219, 1.097, 1.010, 1.047, 1.025),
    0.7: (1.375, 1.083, 1.031, 1.092, 1.040),
    0.5: (1.875, 1.055, 1.004, 1.158, 1.013),
    0.0: (1.750, 1.094, 1.000, 1.132, 1.017),
}
ATTENTION_PART = 0.176
"""Part of attention in the matrix multiplications of a layer."""


@pytest.mark.parametrize("speed", GRANULES)
def test_granules_cost_what_the_table_says(speed: float) -> None:
    """KV groups, query heads and tiles on TP8 with one GPU slow or dead, within printed digits."""
    costs = [RankCost(unit_s=1.0)] * 7 + ([RankCost(unit_s=1 / speed)] if speed else [])
    groups, heads, tiles = (over_ideal(min_max_shares(n, costs), costs) for n in SHAPES.values())
    by_groups = ATTENTION_PART * groups + (1 - ATTENTION_PART) * tiles
    by_heads = ATTENTION_PART * heads + (1 - ATTENTION_PART) * tiles
    assert (groups, heads, tiles, by_groups, by_heads) == pytest.approx(GRANULES[speed], abs=6e-4)


@pytest.mark.parametrize(
    ("units", "ranks", "largest"),
    [(128, 32, 4), (128, 30, 5), (128, 28, 5), (8, 7, 2), (64, 72, 1), (128, 72, 2), (128, 71, 2)],
)
def test_equal_ranks_get_the_ceiling_and_no_more(units: int, ranks: int, largest: int) -> None:
    """Some rank must have ceil(units / ranks); nobody has more, and shares differ by 1 at most."""
    shares = min_max_shares(units, [RankCost(unit_s=1.0)] * ranks)
    assert max(shares) == -(-units // ranks) == largest
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == units
