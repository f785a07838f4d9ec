"""Batch shares from measured times; gradients by tokens."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.errors import InvalidInput, PlanError
from ntp_core.planner import RankCost, max_time_s
from ntp_core.planning.batch import batch_shares, fit_batch_cost, gradient_weights


@pytest.mark.parametrize("seed", range(200))
def test_batch_shares_equal_brute_force(seed: int) -> None:
    """The global batch stays, each replica takes some, and no other shares are faster."""
    draw = random.Random(seed)
    costs = [
        RankCost(unit_s=draw.uniform(0.5, 2.0), start_s=draw.choice([0.0, draw.uniform(0, 2)]))
        for _ in range(draw.randint(1, 4))
    ]
    batch = draw.randint(len(costs), 10)
    best = min(
        max_time_s(shares, costs)
        for shares in itertools.product(range(1, batch + 1), repeat=len(costs))
        if sum(shares) == batch
    )
    shares = batch_shares(batch, costs)
    assert sum(shares) == batch
    assert min(shares) >= 1
    assert max_time_s(shares, costs) == best


@given(
    batch=st.integers(1, 5000),
    granule=st.integers(1, 300),
    times=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
)
@settings(deadline=None)
def test_batch_shares_in_granules_add_up(batch: int, granule: int, times: list[float]) -> None:
    """All shares but the largest are whole granules; the sum is the global batch; or a refusal."""
    costs = [RankCost(unit_s=t) for t in times]
    if -(-batch // granule) < len(times):
        with pytest.raises(PlanError, match="too small for"):
            batch_shares(batch, costs, granule=granule)
        return
    shares = batch_shares(batch, costs, granule=granule)
    assert sum(shares) == batch
    assert min(shares) >= 1
    assert sum(n % granule != 0 for n in shares) <= 1


def test_batch_shares_finer_granules_waste_less() -> None:
    """One GPU of 32 lost: 8 sequences lose an eighth, token granules a thirty-second."""
    healthy = RankCost(unit_s=1.0)
    reduced = RankCost(unit_s=32 / 31)
    coarse = batch_shares(8 * 16, [healthy] * 15 + [reduced])
    assert max_time_s(coarse, [healthy] * 15 + [reduced]) > 8
    fine = [RankCost(unit_s=c.unit_s / 64) for c in [healthy] * 15 + [reduced]]
    shares = batch_shares(8 * 16 * 64, fine)
    assert max_time_s(shares, fine) / (8 * 16 / (15 + 31 / 32)) < 1.003


def test_batch_shares_ties_keep_the_present_ones() -> None:
    """Where nothing is gained nothing changes."""
    costs = [RankCost(unit_s=1.0)] * 3
    assert batch_shares(7, costs, present=(2, 3, 2)) == (2, 3, 2)


@pytest.mark.parametrize("seed", range(50))
def test_fit_batch_cost_recovers_the_line_that_made_the_times(seed: int) -> None:
    """Exact times of two or more sizes give fixed part and slope back."""
    draw = random.Random(seed)
    start_s, unit_s = draw.uniform(0, 5), draw.uniform(0.1, 2)
    sizes = draw.sample(range(1, 40), draw.randint(2, 6))
    cost = fit_batch_cost([(n, start_s + n * unit_s) for n in sizes], granule=3)
    assert cost.start_s == pytest.approx(start_s, abs=1e-9)
    assert cost.unit_s == pytest.approx(3 * unit_s)


def test_fit_batch_cost_of_one_size_or_of_noise_is_proportional() -> None:
    """No slope can be known from one size; a falling or negative line is noise."""
    assert fit_batch_cost([(4, 2.0), (4, 2.2)]) == RankCost(unit_s=pytest.approx(0.525))
    assert fit_batch_cost([(4, 2.0), (8, 1.0)]).start_s == 0.0
    assert fit_batch_cost([(4, 1.0), (8, 4.0)]).start_s == 0.0


@pytest.mark.parametrize("measured", [[], [(0, 1.0)], [(4, 0.0)], [(4, -1.0)], [(4, float("nan"))]])
def test_fit_batch_cost_without_a_measurement_is_refused(measured: list[tuple[int, float]]) -> None:
    """Times and sizes must be positive."""
    with pytest.raises(InvalidInput, match="batch times"):
        fit_batch_cost(measured)


@given(st.lists(st.lists(st.integers(-50, 50), min_size=0, max_size=8), min_size=1, max_size=5))
@settings(deadline=None)
def test_gradient_weights_give_the_mean_over_all_tokens(losses: list[list[int]]) -> None:
    """Weighted means of the replicas are the mean over tokens, exactly; means of means are not."""
    tokens = [len(x) for x in losses]
    if not sum(tokens):
        with pytest.raises(InvalidInput):
            gradient_weights(tokens)
        return
    everything = Fraction(sum(map(sum, losses)), sum(tokens))
    means = [Fraction(sum(x), len(x)) if x else Fraction(0) for x in losses]
    weights = gradient_weights(tokens)
    total = sum(w * float(m) for w, m in zip(weights, means, strict=True))
    assert total == pytest.approx(float(everything), abs=1e-9)


def test_granule_below_one_is_refused() -> None:
    """There is no half token."""
    with pytest.raises(InvalidInput, match="granule = 0"):
        batch_shares(4, [RankCost(unit_s=1.0)], granule=0)
