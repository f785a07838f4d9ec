"""What does not fit is refused on every rank in the same words, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest

from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import UnitKind
from tests.process.test_parallelize import LAYOUTS, SPLIT_LAYOUTS, plan_for
from tests.support.bodies_refusal import RULES, Told, parallelize_block, parallelize_model
from tests.support.rank_pool import RankPool

A, M, V, E = UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCAB, UnitKind.EXPERT


def plan_of(counts: dict[UnitKind, int], degrees: tuple[int, ...] = (2, 1)) -> Plan:
    """Contiguous layouts, about even."""
    replicas, first = [], 0
    for d in degrees:
        layouts = {
            k: Layout.contiguous([n // d + (i < n % d) for i in range(d)])
            for k, n in counts.items()
        }
        ranks = tuple(range(first, first + d))
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=1))
        first += d
    return Plan.build(counts, replicas)


GOOD = plan_of({M: 6, V: 5})


def check(told: list[Told], *words: str, kind: str = "ModelMismatch") -> None:
    """One error on all ranks; it holds the words; nothing was made or changed, nobody waits."""
    assert len({(t.kind, t.words) for t in told}) == 1, [t.words for t in told]
    assert told[0].kind == kind
    for word in words:
        assert word in told[0].words
    for t in told:
        assert t.groups == {0}, "only the world"
        assert t.is_whole
        assert t.met == len(told)


BLOCKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no rule": ({"rules": {k: v for k, v in RULES.items() if k != "up"}}, ("'up.weight'", "give")),
    "unknown style": (
        {"rules": RULES | {"up": "column:mlp"}},
        ("'column'", "'up'", "colwise"),
    ),
    "unknown units": ({"rules": RULES | {"up": "colwise:heads"}}, ("'up'", "heads")),
    "style of another module": (
        {"rules": RULES | {"conv": "colwise:mlp"}, "plan": plan_of({M: 1, V: 5})},
        ("'conv'", "Conv1d", "nn.Linear"),
    ),
    "units that leave one empty": ({"plan": plan_of({M: 23, V: 5})}, ("'up.weight'", "fewer")),
    "units that are not counted": (
        {"plan": plan_of({M: 6})},
        ("'embed.weight'", "vocab units"),
    ),
    "units that cut nothing": (
        {"plan": plan_of({M: 6, V: 5, A: 4})},
        ("4 attention units", "cut no tensor", "Leave"),
    ),
    "random numbers": ({"drop": 0.1}, ("'drop'", "p = 0.1", "UnitDropout")),
    "one rank has other rules": (
        {"odd_rank": 1, "odd_rules": RULES | {"conv": "replicated_with_grad_allreduce"}},
        ("rank 1", "rules", "replicated_with_grad_allreduce", "Ranks [1] differ"),
    ),
    "one rank has another model": (
        {"odd_rank": 2, "odd_columns": 30},
        ("rank 2", "'up.weight'", "30", "24"),
    ),
    "one rank has rules that do not fit": (
        {"odd_rank": 1, "odd_rules": RULES | {"down": "rowwize"}},
        ("rank 1", "'rowwize'", "'down'"),
    ),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_module_that_does_not_fit_is_refused_on_every_rank(rank_pool: RankPool, case: str) -> None:
    """The error names tensor or module and the fix; all ranks are still in step."""
    changes, words = BLOCKS[case]
    asked = {"plan": GOOD, "rules": RULES} | changes
    check(rank_pool.run(parallelize_block, 3, timeout_s=20, **asked), *words)


def test_module_that_fits_is_taken(rank_pool: RankPool) -> None:
    """The same body with nothing wrong: no error, and parameters are cut."""
    for told in rank_pool.run(parallelize_block, 3, plan=GOOD, rules=RULES):
        assert (told.kind, told.words, told.is_whole) == ("", "", False)
        assert told.groups == {0}, "its groups are made later, by whoever trains it"


@pytest.mark.parametrize("world_size", [2, 4])
def test_world_of_another_size_is_refused(rank_pool: RankPool, world_size: int) -> None:
    """Too few ranks and too many: both numbers and the fix."""
    told = rank_pool.run(parallelize_block, world_size, plan=GOOD, rules=RULES, timeout_s=20)
    check(told, "[0, 1, 2]", f"{world_size} ranks", "Start", kind="PlanError")


def test_one_rank_alone_is_told_the_same(rank_pool: RankPool) -> None:
    """A world of one has nobody to agree with."""
    plan = plan_of({M: 23, V: 5}, (1,))
    check(rank_pool.run(parallelize_block, 1, plan=plan, rules=RULES), "'up.weight'")


MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "half a head to a unit": (
        {"name": "llama", "plan": plan_of({A: 6, M: 5, V: 7})},
        ("6 attention units", "self_attn", "3 KV heads", "hf_counts"),
    ),
    "heads that do not divide into units": (
        {"name": "gpt2", "plan": plan_of({A: 4, M: 9, V: 7})},
        ("4 attention units", "attn", "6 KV heads"),
    ),
    "KV heads where query heads are split": (
        {"name": "qwen3", "plan": plan_of({A: 3, M: 5, V: 7}), "split_heads": True},
        ("3 attention units", "6 query heads", "split_heads=True"),
    ),
    "KV heads that do not divide the heads": (
        {
            "name": "llama",
            "plan": plan_of({A: 3, M: 5, V: 7}),
            "config": {"num_key_value_heads": 4},
        },
        ("6 query heads", "4 KV heads", "num_key_value_heads"),
    ),
    "a plan for another architecture": (
        {"name": "mixtral", "plan": plan_of({A: 3, M: 5, V: 7})},
        ("experts", "expert units"),
    ),
    "dropout of attention": (
        {
            "name": "llama",
            "plan": plan_of({A: 3, M: 5, V: 7}),
            "modules": {"model.layers.1.self_attn.attention_dropout": 0.1},
        },
        ("model.layers.1.self_attn", "attention_dropout = 0.1"),
    ),
    "dropout of a module": (
        {
            "name": "gpt2",
            "plan": plan_of({A: 6, M: 9, V: 7}),
            "modules": {"transformer.h.0.attn.resid_dropout.p": 0.2},
        },
        ("transformer.h.0.attn.resid_dropout", "p = 0.2"),
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_model_that_does_not_fit_is_refused_on_every_rank(rank_pool: RankPool, case: str) -> None:
    """Units must be whole heads, and the plan that of the model's architecture."""
    changes, words = MODELS[case]
    check(rank_pool.run(parallelize_model, 3, timeout_s=20, **changes), *words)


@pytest.mark.parametrize("split", [False, True])
def test_model_that_fits_is_taken(rank_pool: RankPool, *, split: bool) -> None:
    """Several KV heads to a unit are as good as one."""
    layout = SPLIT_LAYOUTS["4 of 6 query heads"] if split else LAYOUTS["3"]
    plan = plan_for("llama", layout, split_heads=split)
    for told in rank_pool.run(
        parallelize_model, len(plan.ranks), name="llama", plan=plan, split_heads=split
    ):
        assert told.kind == ""
    coarse = plan_of({A: 1, M: 5, V: 7}, (1,))
    assert rank_pool.run(parallelize_model, 1, name="llama", plan=coarse)[0].kind == ""
