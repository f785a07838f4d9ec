"""Keepers: every block is kept once, by a rank that holds it, in even parts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ntp_core.keepers import held_by_keepers, keepers
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.reshard import blocks_held
from ntp_core.units import ModelUnits, TensorSpec
from tests.support.random_plans import A, random_model, random_plan, random_share_change

SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_keepers_every_block_is_kept_by_one_rank_that_holds_it(seed: int) -> None:
    """The keeper is among the holders, and the lists by rank say the same as those by block."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    by_block, by_rank = keepers(plan, model), held_by_keepers(plan, model)
    for t, kept, held in zip(model.tensors, by_block, by_rank, strict=True):
        assert len(kept) == (1 if t.kind is None else model.counts[t.kind])
        for block, rank in enumerate(kept):
            assert block in blocks_held(plan, t, rank)
            assert [rank] == [g for g, blocks in held.items() if block in blocks]


@pytest.mark.parametrize("seed", SEEDS)
def test_keepers_replicas_take_turns(seed: int) -> None:
    """Over a tensor's blocks, replicas differ by one block at most."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    for t, kept in zip(model.tensors, keepers(plan, model), strict=True):
        if t.kind is None:
            continue
        counts = Counter(plan.place(g)[0] for g in kept)
        numbers = [counts[r] for r in range(len(plan.replicas))]
        assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_keepers_stay_unless_their_replica_gives_the_block_away(seed: int) -> None:
    """After a change of shares a block has a new keeper only where it has a new owner."""
    draw = random.Random(seed)
    model = random_model(draw)
    old = random_plan(draw, model)
    new = random_share_change(draw, old)
    before, after = keepers(old, model), keepers(new, model)
    for t, a, b in zip(model.tensors, before, after, strict=True):
        for block, (had, has) in enumerate(zip(a, b, strict=True)):
            assert old.place(had)[0] == new.place(has)[0]
            assert had == has or block not in blocks_held(new, t, had)


def test_keepers_shared_blocks_belong_to_the_owner_of_their_first_unit() -> None:
    """Two query heads of one KV head on two ranks: one of the two copies is the keeper's."""
    split = ReplicaPlan(ranks=(0, 1), layouts={A: Layout.of_units([[0, 2], [1, 3]])}, batch=1)
    whole = ReplicaPlan(ranks=(2,), layouts={A: Layout.contiguous((4,))}, batch=1)
    kv = TensorSpec(name="k", shape=(2, 1), kind=A, sharing=2)
    model = ModelUnits(counts={A: 4}, tensors=(kv,))
    assert keepers(Plan.build({A: 4}, [split]), model) == ((0, 0),)
    assert keepers(Plan.build({A: 4}, [split, whole]), model) == ((0, 2),)
