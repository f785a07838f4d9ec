"""Exact min-max shares, against brute force."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.errors import PlanError
from ntp_core.plan import Layout
from ntp_core.planner import (
    RankCost,
    ideal_time_s,
    keep_placement,
    max_time_s,
    min_max_shares,
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
