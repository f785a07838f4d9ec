"""Hugging Face models whose layers run again in backward, over uneven ranks."""

from __future__ import annotations

import pytest

from tests.process.test_parallelize import (
    LAYOUTS,
    SEQ,
    SPLIT_LAYOUTS,
    STEPS,
    check,
    plan_for,
)
from tests.support.bodies_hf import Trained, train_hf
from tests.support.logical import is_equal
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of

LAYERS = 2
WAYS = {"plain": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
CASES = [
    ("llama", LAYOUTS["3"], False),
    ("gpt2", LAYOUTS["2+3"], False),
    ("mixtral", LAYOUTS["2+3"], False),
    ("qwen3", SPLIT_LAYOUTS["4 of 6 query heads"], True),
    ("llama", SPLIT_LAYOUTS["5+1 query heads"], True),
]


def sums_of(told: Trained) -> list[tuple[int, ...]]:
    """(op, group) of each collective, in order."""
    return [call[:2] for call in calls_of(told.calls, "collective_begin")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "layout", "split"), CASES, ids=lambda x: str(x)[:24])
def test_recomputed_layers_keep_losses_and_gradients(
    rank_pool: RankPool,
    name: str,
    layout: list[dict[str, tuple[int, ...]]],
    way: str,
    *,
    split: bool,
) -> None:
    """Every loss and gradient has the bits it has without, those of copied KV heads too."""
    plan = plan_for(name, layout, split_heads=split)
    asked = {"name": name, "plan": plan, "steps": STEPS, "seq": SEQ, "split_heads": split}
    plain: list[Trained] = rank_pool.run(train_hf, len(plan.ranks), **asked)
    told: list[Trained] = rank_pool.run(train_hf, len(plan.ranks), recompute=WAYS[way], **asked)
    check(told, plan, name)
    for a, b in zip(plain, told, strict=True):
        assert a.losses == b.losses
        assert a.norms == b.norms
        assert is_equal(a.grads, b.grads)
        assert all(is_equal(x, y) for x, y in zip(a.params, b.params, strict=True))
    # torch's own way stops a layer's second run before its last sum; on all ranks, or none.
    again = STEPS * LAYERS * (1 if way == "plain" else 2)
    for r in plan.replicas:
        if len(r.ranks) > 1:
            more = {len(sums_of(told[g])) - len(sums_of(plain[g])) for g in r.ranks}
            assert more == {again}, "ranks without heads or columns run the same sums"
