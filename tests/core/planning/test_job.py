"""Plans of whole jobs: valid, optimal where it can be counted, calm, and explained."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from ntp_core.cost import Work
from ntp_core.errors import ModelMismatch, PlanError
from ntp_core.plan import Plan
from ntp_core.planner import RankCost
from ntp_core.planning.job import PlanOptions, plan_job, predict_plan
from ntp_core.planning.members import RingCollectives
from ntp_core.planning.memory import MemoryNeed
from ntp_core.planning.phases import Phase, RankSpeed, SharedBlockCost, phases_of_work
from ntp_core.planning.replica import RankState, ReplicaModel
from ntp_core.units import ModelUnits, TensorSpec, blocks_of_units
from tests.support.random_plans import A, M, V

WORK = Work(unit={A: 4.0, M: 1.0}, rank=2.0)


def ranks_of(speeds: list[list[float]], memory: float = math.inf) -> list[list[RankState]]:
    """Ranks numbered through, one list of speeds per replica."""
    numbers = itertools.count()
    return [
        [
            RankState(rank=next(numbers), speed=RankSpeed(flops_per_s=v), memory_bytes=memory)
            for v in row
        ]
        for row in speeds
    ]


def model_of(heads: int, columns: int) -> ModelUnits:
    """Units without tensors."""
    return ModelUnits(counts={A: heads, M: columns}, tensors=())


def splits(units: int, ranks: int, least: int = 0) -> list[tuple[int, ...]]:
    """All shares."""
    every = itertools.product(range(least, units + 1), repeat=ranks)
    return [s for s in every if sum(s) == units]


def step_s(units: dict, works: dict, speeds: list[float]) -> float:
    """Time of a sequence, counted anew: for each kind the slowest rank, fixed work by size."""
    total = sum(works[k] * sum(n) for k, n in units.items())
    parts = {k: WORK.rank * works[k] * sum(n) / total for k, n in units.items()}
    return sum(
        max((parts[k] + works[k] * n) / v for n, v in zip(own, speeds, strict=True))
        for k, own in units.items()
    )


@pytest.mark.parametrize("seed", range(60))
def test_plan_job_equals_brute_force_over_shares_and_batches(seed: int) -> None:
    """No shares in any replica and no batches make a shorter step."""
    draw = random.Random(seed)
    heads, columns = draw.randint(1, 5), draw.randint(1, 7)
    speeds = [
        [draw.choice([1.0, draw.uniform(0.2, 1.5)]) for _ in range(draw.randint(1, 3))]
        for _ in range(draw.randint(1, 3))
    ]
    batch = draw.randint(len(speeds), 7)
    made = plan_job(model_of(heads, columns), WORK, ranks_of(speeds), batch)
    fastest = [
        min(
            step_s({A: a, M: m}, {A: 4.0, M: 1.0}, row)
            for a in splits(heads, len(row))
            for m in splits(columns, len(row))
        )
        for row in speeds
    ]
    best = min(
        max(n * t for n, t in zip(b, fastest, strict=True))
        for b in splits(batch, len(speeds), least=1)
    )
    assert made.prediction.step_s == pytest.approx(best)
    assert 0 < made.prediction.efficiency <= 1 + 1e-12


@pytest.mark.parametrize("seed", range(60))
def test_plan_job_from_a_present_plan_is_as_fast_and_moves_no_more(seed: int) -> None:
    """The present plan costs no time, and ties keep what is where it is."""
    draw = random.Random(seed)
    speeds = [[1.0] * 3, [1.0] * 2]
    model = model_of(draw.randint(5, 12), draw.randint(6, 30))
    first = plan_job(model, WORK, ranks_of(speeds), 9).plan
    speeds[0][draw.randrange(3)] = draw.uniform(0.2, 0.9)
    fresh = plan_job(model, WORK, ranks_of(speeds), 9)
    again = plan_job(model, WORK, ranks_of(speeds), 9, present=first)
    assert again.prediction.step_s == pytest.approx(fresh.prediction.step_s)
    assert sum(again.moved.values()) <= moved_between(first, fresh.plan)
    assert sum(again.moved.values()) == moved_between(first, again.plan)
    assert again.plan.epoch == 2
    settled = plan_job(model, WORK, ranks_of(speeds), 9, present=again.plan)
    assert settled.is_kept
    assert settled.plan.digest == again.plan.digest


def moved_between(before: Plan, after: Plan) -> int:
    """Units at ranks that did not hold them, counted one by one."""
    held = {
        (g, k, u)
        for r in before.replicas
        for i, g in enumerate(r.ranks)
        for k, layout in r.layouts.items()
        for u in layout.units(i)
    }
    now = {
        (g, k, u)
        for r in after.replicas
        for i, g in enumerate(r.ranks)
        for k, layout in r.layouts.items()
        for u in layout.units(i)
    }
    return len(now - held)


@pytest.mark.parametrize("dead", range(4))
def test_plan_job_after_a_rank_died_moves_only_what_must(dead: int) -> None:
    """Survivors keep all they have; what the dead rank held is dealt out, and comes back."""
    model = model_of(8, 16)
    full = ranks_of([[1.0] * 4])
    before = plan_job(model, WORK, full, 4).plan
    less = [[m for m in full[0] if m.rank != dead]]
    reduced = plan_job(model, WORK, less, 4, present=before)
    assert dict(reduced.moved) == {A: 2, M: 4}
    assert reduced.plan.ranks == tuple(g for g in range(4) if g != dead)
    back = plan_job(model, WORK, full, 4, present=reduced.plan)
    assert dict(back.moved) == {A: 2, M: 4}
    assert [v.shares for v in back.plan.replicas[0].layouts.values()] == [(2,) * 4, (4,) * 4]


def test_replica_that_waits_anyway_keeps_its_shares() -> None:
    """A slow rank in a replica with slack is not worth moving units for."""
    model = model_of(8, 16)
    even = plan_job(model, WORK, ranks_of([[1.0] * 4, [1.0] * 4]), 3).plan
    assert [r.batch for r in even.replicas] == [2, 1]
    made = plan_job(model, WORK, ranks_of([[1.0] * 4, [1.0] * 3 + [0.6]]), 3, present=even)
    assert made.plan.digest == even.digest
    assert made.is_kept


@pytest.mark.parametrize(("min_gain", "is_kept"), [(0.0, False), (0.04, False), (0.2, True)])
def test_hysteresis_keeps_a_plan_that_is_nearly_as_good(min_gain: float, is_kept: bool) -> None:
    """A change must save the least gain asked for; the explanation says so."""
    model = ModelUnits(counts={M: 100}, tensors=())
    work = Work(unit={M: 1.0})
    before = plan_job(model, work, ranks_of([[1.0] * 4]), 1).plan
    states = ranks_of([[1.0] * 3 + [0.9]])
    made = plan_job(model, work, states, 1, before, PlanOptions(min_gain=min_gain))
    assert made.is_kept is is_kept
    assert made.before is not None
    assert made.before.step_s == pytest.approx(25 / 0.9)
    assert ("nothing worth a change" in made.explanation) is is_kept
    assert made.prediction.step_s == pytest.approx(25 / 0.9 if is_kept else 26.0)


@pytest.mark.parametrize("seed", range(60))
def test_may_drop_equals_brute_force_over_all_subsets(seed: int) -> None:
    """With one speed per rank, dropping the slowest first finds the best of all subsets."""
    draw = random.Random(seed)
    row = [draw.choice([1.0, draw.uniform(0.02, 1.0)]) for _ in range(draw.randint(2, 4))]
    ring = RingCollectives(calls=1, hop_s=draw.choice([0.0, 0.3, 2.0]))
    states = ranks_of([row])
    model = model_of(6, 9)
    made = plan_job(model, WORK, states, 1, options=PlanOptions(collective_s=ring, may_drop=True))
    best = min(
        plan_job(
            model, WORK, [list(members)], 1, options=PlanOptions(collective_s=ring)
        ).prediction.step_s
        for size in range(1, len(row) + 1)
        for members in itertools.combinations(states[0], size)
    )
    assert made.prediction.step_s == pytest.approx(best)
    assert sorted({*made.plan.ranks, *made.left_out}) == list(range(len(row)))
    assert made.trials[0][0].members == tuple(range(len(row)))
    assert min(t.time_s for t in made.trials[0]) == pytest.approx(best)


def test_left_out_rank_is_named_and_stays_out() -> None:
    """The explanation names it; with the same speeds nothing changes the next time."""
    states = ranks_of([[1.0, 1.0, 1.0, 0.02]])
    options = PlanOptions(collective_s=RingCollectives(calls=1, hop_s=0.1), may_drop=True)
    made = plan_job(model_of(6, 12), WORK, states, 2, options=options)
    assert made.left_out == (3,)
    assert "without rank 3" in made.explanation
    again = plan_job(model_of(6, 12), WORK, states, 2, made.plan, options)
    assert again.is_kept
    assert again.left_out == (3,)


def test_memory_binds_and_the_plan_fits() -> None:
    """The fast rank is small: shares within its memory, and a refusal that names ranks."""
    states = ranks_of([[4.0, 1.0]])
    states[0][0] = replace(states[0][0], memory_bytes=20.0)
    need = MemoryNeed(unit={A: 3.0, M: 1.0}, rank=4.0)
    made = plan_job(model_of(8, 8), WORK, states, 1, options=PlanOptions(need=need))
    shares = {k: v.shares for k, v in made.plan.replicas[0].layouts.items()}
    assert 3 * shares[A][0] + shares[M][0] <= 16
    assert shares[A][0] + shares[M][0] > 0
    small = [[replace(m, memory_bytes=17.0) for m in states[0]]]
    with pytest.raises(PlanError, match=r"ranks \[0, 1\] have"):
        plan_job(model_of(8, 8), WORK, small, 1, options=PlanOptions(need=need))


def test_phases_give_other_shares_than_arithmetic_alone() -> None:
    """Twice the arithmetic on equal memory: half as much gain in a step bound by memory."""
    speeds = [
        RankSpeed(flops_per_s=2.0, bytes_per_s=1.0),
        RankSpeed(flops_per_s=1.0, bytes_per_s=1.0),
    ]
    states = [[RankState(rank=i, speed=s) for i, s in enumerate(speeds)]]
    model = ModelUnits(counts={M: 12}, tensors=())
    train = [Phase(name="train", flops={M: 9.0}, moved_bytes={M: 1.0})]
    decode = [Phase(name="decode", flops={M: 0.1}, moved_bytes={M: 1.0})]
    shares = [
        plan_job(model, p, states, 1).plan.replicas[0].layouts[M].shares for p in (train, decode)
    ]
    assert shares == [(8, 4), (6, 6)]


def grouped(heads: int, kv_heads: int) -> ModelUnits:
    """Query heads as units; each KV head is shared by those that use it."""
    sharing = heads // kv_heads
    tensors = (
        TensorSpec(name="q", shape=(heads * 4, 8), kind=A),
        TensorSpec(name="k", shape=(kv_heads * 4, 8), kind=A, sharing=sharing),
        TensorSpec(name="up", shape=(224, 8), kind=M),
    )
    return ModelUnits(counts={A: heads, M: 224}, tensors=tensors)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(128, 8, 30), (128, 8, 28), (64, 8, 7), (128, 8, 72), (128, 16, 71), (8, 8, 7), (64, 8, 72)],
)
def test_any_degree_is_valid_and_as_even_as_can_be(heads: int, kv_heads: int, ranks: int) -> None:
    """By query heads: a partition, ceil(heads / ranks) at most, KV copies within the bound."""
    model = grouped(heads, kv_heads)
    plan = plan_job(model, WORK, ranks_of([[1.0] * ranks]), 1).plan
    plan.check_model(model)
    layout = plan.replicas[0].layouts[A]
    assert max(layout.shares) == -(-heads // ranks)
    assert sum(layout.shares) == heads
    assert -1 not in layout.owners(heads)
    sharing = heads // kv_heads
    bound = SharedBlockCost(units=RankCost(unit_s=1.0), sharing=sharing, blocks=kv_heads, block_s=0)
    copies = [len(blocks_of_units(model.tensors[1], layout.units(i))) for i in range(ranks)]
    assert all(c <= bound.touched(n) for c, n in zip(copies, layout.shares, strict=True))
    assert sum(copies) <= kv_heads + ranks - 1


@pytest.mark.parametrize("slow", [0.5, 0.9])
def test_head_split_on_uneven_ranks_reaches_the_lower_bound(slow: int) -> None:
    """128 heads on 30 ranks with a slow one: no time below what integer shares need fits them."""
    states = ranks_of([[1.0] * 29 + [slow]])
    model = ModelUnits(counts={A: 128}, tensors=())
    made = plan_job(model, Work(unit={A: 1.0}), states, 1)
    limit = made.prediction.step_s * (1 - 1e-9)
    assert sum(math.floor(limit * v) for v in [1.0] * 29 + [slow]) < 128


def test_prediction_has_each_ranks_own_time() -> None:
    """Own time is work over speed for the whole batch; the slowest waits for nobody."""
    states = ranks_of([[1.0, 0.5], [1.0]])
    made = plan_job(model_of(6, 12), WORK, states, 5)
    speeds = {m.rank: m.speed.flops_per_s for row in states for m in row}
    for g, own_s in made.prediction.rank_s.items():
        assert own_s == pytest.approx(WORK.of_rank(made.plan, g) / speeds[g])
        assert own_s <= made.prediction.step_s * (1 + 1e-12)
    model = ReplicaModel(counts=made.plan.counts, phases=phases_of_work(WORK))
    assert predict_plan(made.plan, [model.of(row) for row in states]) == made.prediction
    assert (
        f"busiest rank {max(speeds, key=lambda g: made.prediction.rank_s[g])}" in made.explanation
    )


def test_refusals_name_what_is_wrong() -> None:
    """Other units, no rank, no work, more replicas than sequences."""
    states = ranks_of([[1.0], [1.0]])
    plan = plan_job(model_of(2, 2), WORK, states, 2).plan
    with pytest.raises(ModelMismatch):
        plan_job(model_of(2, 3), WORK, states, 2, present=plan)
    with pytest.raises(PlanError, match="without ranks"):
        plan_job(model_of(2, 2), WORK, [states[0], []], 2)
    with pytest.raises(PlanError, match="no work at all"):
        plan_job(model_of(2, 2), Work(unit={A: 0.0, M: 0.0}), states, 2)
    with pytest.raises(PlanError, match="too small for 2 replicas"):
        plan_job(model_of(2, 2), WORK, states, 1)


def test_rank_moved_to_another_replica_keeps_its_units() -> None:
    """All replicas hold the same parameters, so a rank needs only what it lacks, wherever it is."""
    model = ModelUnits(counts={V: 12}, tensors=())
    work = Work(unit={V: 1.0})
    states = ranks_of([[1.0] * 2, [1.0] * 2])
    before = plan_job(model, work, states, 4).plan
    first, second = states
    mixed = [[first[0], second[1]], [second[0], first[1]]]
    made = plan_job(model, work, mixed, 4, present=before)
    assert dict(made.moved) == {V: 0}
    both_first = [[first[0], second[0]], [first[1], second[1]]]
    made = plan_job(model, work, both_first, 4, present=before)
    assert dict(made.moved) == {V: 12}
