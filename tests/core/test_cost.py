"""Work of a plan: counted element by element on small models."""

from __future__ import annotations

import random

import pytest

from ntp_core.cost import FLOPS_PER_WEIGHT, Work, WorkShape, work_of_model
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import ModelUnits, TensorSpec
from tests.support.random_plans import A, M, V, random_model, random_plan


def test_work_of_model_counts_each_weight_once() -> None:
    """A unit's work is six times the elements it owns, plus what its shape adds."""
    model = ModelUnits(
        counts={A: 2, M: 4},
        tensors=(
            TensorSpec(name="q", shape=(8, 3), kind=A),
            TensorSpec(name="o", shape=(3, 8), kind=A, dim=1),
            TensorSpec(name="up", shape=(4, 3), kind=M),
            TensorSpec(name="norm", shape=(3,)),
        ),
    )
    work = work_of_model(model, WorkShape(seq=7, extra_per_unit={A: 5.0}, per_rank=11.0))
    assert work.unit == {A: 6 * 24 + 5.0, M: 6 * 3.0}
    assert work.rank == 11.0


def test_work_of_rank_is_units_times_batch() -> None:
    """A rank's work is its own units' and the fixed part, for each sequence of its replica."""
    layouts = {A: Layout.contiguous((1, 3)), M: Layout.contiguous((5, 0))}
    plan = Plan.build({A: 4, M: 5}, [ReplicaPlan(ranks=(4, 2), layouts=layouts, batch=3)])
    work = Work(unit={A: 10.0, M: 1.0}, rank=0.5)
    assert work.of_rank(plan, 4) == 3 * (10 + 5 + 0.5)
    assert work.of_rank(plan, 2) == 3 * (30 + 0.5)


@pytest.mark.parametrize("seed", range(30))
def test_work_of_all_ranks_is_that_of_the_model(seed: int) -> None:
    """However units are dealt, a replica does the model's work for each of its sequences."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    work = work_of_model(model, WorkShape(seq=1))
    elements = sum(t.numel for t in model.tensors if t.kind is not None)
    for r in plan.replicas:
        total = sum(work.of_rank(plan, g) for g in r.ranks)
        assert pytest.approx(FLOPS_PER_WEIGHT * elements * r.batch) == total


@pytest.mark.parametrize("seed", range(30))
def test_expected_shares_add_up_and_follow_speed(seed: int) -> None:
    """Shares of time sum to 1; a rank of half the speed takes twice the time of its work."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    work = work_of_model(model, WorkShape(seq=1, per_rank=3.0))
    equal = work.expected_shares(plan)
    assert pytest.approx(1.0) == sum(equal.values())
    speeds = {g: draw.uniform(0.2, 2.0) for g in plan.ranks}
    shares = work.expected_shares(plan, speeds)
    assert pytest.approx(1.0) == sum(shares.values())
    first = plan.ranks[0]
    for g in plan.ranks:
        ratio = (equal[g] / speeds[g]) / (equal[first] / speeds[first])
        assert pytest.approx(ratio) == shares[g] / shares[first]


def test_work_of_the_little_llama_adds_attention_scores() -> None:
    """Scores cost 12 * seq * head_dim per query head, halved by the causal mask, in each layer."""
    model = LlamaConfig(width=48, heads=12, kv_heads=6, ffn=48, mlp_block=4, vocab_block=24)
    with_scores, without = model.work(seq=10), model.work(seq=0)
    assert with_scores.unit[A] - without.unit[A] == 2 * 2 * (12 * 10 * 4 / 2)
    assert without.unit[M] == with_scores.unit[M] == 6 * 2 * 3 * 4 * 48
    assert with_scores.unit[V] == pytest.approx(6 * 256 * 48 / 11)
