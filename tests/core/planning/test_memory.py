"""One memory pool for several kinds of units, against brute force."""

from __future__ import annotations

import itertools
import math
import random
import re
from functools import cache

import pytest

from ntp_core.errors import PlanError
from ntp_core.planner import CompletionTime, RankCost
from ntp_core.planning.memory import (
    GIB,
    MemoryNeed,
    MemoryShares,
    RankMemory,
    StateBytes,
    memory_of_model,
    shares_in_memory,
)
from ntp_core.planning.search import Pool
from ntp_core.units import ModelUnits, TensorSpec, UnitKind, blocks_of_units, local_shape
from tests.support.random_plans import A, M, V

Case = tuple[
    dict[UnitKind, int], dict[UnitKind, list[CompletionTime]], MemoryNeed, list[RankMemory]
]
DRAWS = 250


def draw_case(seed: int) -> Case:
    """2-3 ranks, 1-3 kinds of few units, memory from too little to plenty."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 3)
    kinds = [A, M, V][: draw.choice([1, 2, 2, 3])]
    counts = {k: draw.randint(1, 5 if ranks == 3 else 7) for k in kinds}
    costs: dict[UnitKind, list[CompletionTime]] = {
        k: [
            RankCost(
                unit_s=draw.choice([1.0, draw.uniform(0.2, 3)]),
                start_s=draw.choice([0.0, draw.uniform(0, 1)]),
                cap=draw.choice([None, None, None, draw.randint(0, 5)]),
            )
            for _ in range(ranks)
        ]
        for k in kinds
    }
    need = MemoryNeed(unit={k: float(draw.randint(1, 6)) for k in kinds}, rank=2.0)
    total = sum(need.unit[k] * n for k, n in counts.items())
    tight = draw.choice([0.9, 1.1, 1.3, 2.0])
    cuts = [draw.uniform(0.3, 1.0) for _ in range(ranks)]
    memory = [
        RankMemory(rank=10 + i, size_bytes=2.0 + round(tight * total * c / sum(cuts)))
        for i, c in enumerate(cuts)
    ]
    return counts, costs, need, memory


@cache
def splits(units: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """All shares of so many units."""
    every = itertools.product(range(units + 1), repeat=ranks)
    return tuple(s for s in every if sum(s) == units)


def fastest(case: Case) -> float | None:
    """Brute force over all shares of all kinds; None when nothing fits."""
    counts, costs, _, memory = case
    best: float | None = None
    for combined in itertools.product(*(splits(n, len(memory)) for n in counts.values())):
        shares = dict(zip(counts, combined, strict=True))
        if not fits(shares, case):
            continue
        time_s = sum(
            max(c.time_s(n) for c, n in zip(costs[k], own, strict=True))
            for k, own in shares.items()
        )
        best = time_s if best is None else min(best, time_s)
    return best


def fits(shares: dict[UnitKind, tuple[int, ...]], case: Case) -> bool:
    """Bytes and caps, counted anew."""
    _, costs, need, memory = case
    for i, m in enumerate(memory):
        if need.rank + sum(need.unit[k] * n[i] for k, n in shares.items()) > m.size_bytes:
            return False
    return all(
        c.cap is None or n <= c.cap
        for k, own in shares.items()
        for c, n in zip(costs[k], own, strict=True)
    )


def planned(case: Case, nodes: int = 10**9) -> MemoryShares | None:
    """The planner's result, None when it refuses."""
    try:
        return shares_in_memory(*case, search_nodes=nodes)
    except PlanError:
        return None


@pytest.mark.parametrize("part", range(5))
def test_shares_in_memory_equal_brute_force(part: int) -> None:
    """In small cases the result is the optimum and says so; refused only where nothing fits."""
    for seed in range(part * DRAWS // 5, (part + 1) * DRAWS // 5):
        case = draw_case(seed)
        best, found = fastest(case), planned(case)
        assert (found is None) == (best is None), seed
        if found is not None and best is not None:
            assert fits(found.shares, case), seed
            assert found.is_exact, seed
            assert found.time_s == pytest.approx(best, rel=1e-12), seed


def test_shares_in_memory_without_search_are_within_the_stated_bound() -> None:
    """Placing, moves and swaps alone: what is found fits, and the optimum is above the bound."""
    found, optimal, missed = 0, 0, 0
    for seed in range(DRAWS):
        case = draw_case(seed)
        best, quick = fastest(case), planned(case, nodes=0)
        if best is None:
            assert quick is None
            continue
        if quick is None:
            missed += 1
            continue
        found += 1
        assert fits(quick.shares, case)
        assert quick.lower_bound_s * (1 - 1e-12) <= best <= quick.time_s * (1 + 1e-12)
        assert quick.time_s <= (1 + quick.gap) * best * (1 + 1e-12)
        assert not quick.is_exact or quick.time_s == pytest.approx(best)
        optimal += quick.time_s <= best * (1 + 1e-12)
    assert found > 0.9 * (found + missed)
    assert optimal > 0.9 * found


def test_shares_in_memory_that_never_binds_are_the_free_optimum() -> None:
    """Endless memory: each kind by time alone, the present shares kept in ties."""
    costs: dict[UnitKind, list[CompletionTime]] = {A: [RankCost(unit_s=1.0)] * 3}
    memory = [RankMemory(rank=i, size_bytes=math.inf) for i in range(3)]
    need = MemoryNeed(unit={A: 5.0})
    found = shares_in_memory({A: 5}, costs, need, memory, present={A: (1, 2, 2)})
    assert found.shares == {A: (1, 2, 2)}
    assert found.is_exact
    assert found.gap == 0.0


def test_small_memory_makes_way_for_the_kind_that_needs_speed() -> None:
    """A fast rank with room for four units: two kinds share it, by hand."""
    costs: dict[UnitKind, list[CompletionTime]] = {
        k: [RankCost(unit_s=1.0), RankCost(unit_s=4.0)] for k in (A, M)
    }
    memory = [RankMemory(rank=0, size_bytes=4.0), RankMemory(rank=1, size_bytes=100.0)]
    found = shares_in_memory({A: 4, M: 4}, costs, MemoryNeed(unit={A: 1.0, M: 1.0}), memory)
    assert found.is_exact
    assert found.time_s == 16.0
    assert sum(n[0] for n in found.shares.values()) == 4


def test_tp72_memory_that_binds_is_planned_and_its_gap_is_known() -> None:
    """Far beyond exact search: valid shares and a bound on what they miss."""
    draw = random.Random(1)
    counts = {A: 128, M: 224, V: 250}
    costs: dict[UnitKind, list[CompletionTime]] = {
        k: [RankCost(unit_s=draw.uniform(1.0, 1.3)) for _ in range(72)] for k in counts
    }
    need = MemoryNeed(unit={A: 9.0, M: 12.0, V: 3.0}, rank=5.0)
    total = sum(need.unit[k] * n for k, n in counts.items())
    memory = [RankMemory(rank=i, size_bytes=5 + total / 72 * 1.15) for i in range(72)]
    found = shares_in_memory(counts, costs, need, memory)
    case = (counts, costs, need, memory)
    assert fits(found.shares, case)
    assert {k: sum(v) for k, v in found.shares.items()} == counts
    assert found.gap < 0.5


@pytest.mark.parametrize(
    ("sizes", "unit", "words"),
    [
        ((1.0, 9.0), 1.0, ["rank 7 has 1 GiB", "takes 2 GiB", "Leave the rank out"]),
        (
            (4.0, 5.0),
            2.0,
            [
                "ranks [7, 8] have 5 GiB",
                "take 6 GiB (attention 6 GiB)",
                "rank 7 with 4 GiB",
                "1 GiB",
            ],
        ),
        ((5.0, 5.0), 2.0, ["do not fit the ranks [7, 8]", "2 GiB", "smaller units"]),
    ],
)
def test_what_does_not_fit_is_named(
    sizes: tuple[float, ...], unit: float, words: list[str]
) -> None:
    """Rank, its memory, what is missing, and what to do."""
    memory = [RankMemory(rank=7 + i, size_bytes=s * GIB) for i, s in enumerate(sizes)]
    costs: dict[UnitKind, list[CompletionTime]] = {A: [RankCost(unit_s=1.0)] * 2}
    need = MemoryNeed(unit={A: unit * GIB}, rank=2 * GIB)
    with pytest.raises(PlanError) as error:
        shares_in_memory({A: 3}, costs, need, memory)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("seed", range(30))
def test_memory_of_model_bounds_the_tensors_of_any_run_of_units(seed: int) -> None:
    """What is charged covers the real tensors, element by element, and not much more."""
    draw = random.Random(seed)
    sharing = draw.randint(1, 4)
    units = sharing * draw.randint(1, 5)
    model = ModelUnits(
        counts={A: units},
        tensors=(
            TensorSpec(name="q", shape=(units * 3, 4), kind=A),
            TensorSpec(name="k", shape=(units // sharing * 3, 4), kind=A, sharing=sharing),
            TensorSpec(name="norm", shape=(4,)),
        ),
    )
    state = StateBytes(activation={A: 7.0}, rank_activation=11.0)
    need = memory_of_model(model, state)
    n = draw.randint(1, units)
    first = draw.randint(0, units - n)
    own = tuple(range(first, first + n))
    elements = 4
    for t in model.tensors[:2]:
        elements += math.prod(local_shape(t, units, blocks_of_units(t, own)))
    real = elements * state.per_element + 7.0 * n + 11.0
    charged = need.rank + n * need.unit[A]
    assert real <= charged * (1 + 1e-12)
    assert charged - real <= 2 * 12 * state.per_element * (1 + 1e-12)


def test_improve_swaps_where_no_single_move_fits() -> None:
    """Two full ranks, each with the kind the other is good at: only a swap helps."""
    fast, slow = RankCost(unit_s=1.0), RankCost(unit_s=5.0)
    pool = Pool(
        counts={A: 2, M: 2},
        costs={A: (fast, slow), M: (slow, fast)},
        unit_bytes={A: 1.0, M: 1.0},
        room_bytes=(2.0, 2.0),
    )
    better = pool.improve({A: (0, 2), M: (2, 0)})
    assert better == {A: (2, 0), M: (0, 2)}
    assert not re.search("[^0-9.]", str(pool.time_s(better)))
