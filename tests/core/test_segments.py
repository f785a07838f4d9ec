"""Segments: every unit of every replica in just one, with its owners, and no byte twice."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ntp_core.plan import Plan
from ntp_core.segments import segments, sync_groups
from ntp_core.units import ModelUnits, TensorSpec, block_numel
from tests.support.random_plans import A, random_model, random_plan


def drawn(seed: int) -> tuple[ModelUnits, Plan]:
    """A random model and a plan for it, 2-4 replicas of 1-5 ranks."""
    draw = random.Random(seed)
    model = random_model(draw)
    return model, random_plan(draw, model, [draw.randint(1, 5) for _ in range(draw.randint(2, 4))])


def owner(plan: Plan, replica: int, t: TensorSpec, unit: int) -> int:
    """The rank that holds a unit, looked up run by run."""
    r = plan.replicas[replica]
    assert t.kind is not None
    layout = r.overrides.get((t.kind, t.layer), r.layouts[t.kind])
    (found,) = [
        g for g, runs in zip(r.ranks, layout.runs, strict=True) for a, b in runs if a <= unit < b
    ]
    return found


@pytest.mark.parametrize("seed", range(100))
def test_segments_cover_each_unit_once_with_its_owners(seed: int) -> None:
    """Segments ascend without gap, end where an owner changes, and name the owners in order."""
    model, plan = drawn(seed)
    for t in model.tensors:
        if t.kind is None:
            continue
        found = segments(plan, t)
        ends = [0, *(s.stop for s in found)]
        assert ends[:-1] == [s.start for s in found]
        assert ends[-1] == model.counts[t.kind]
        for s in found:
            for unit in range(s.start, s.stop):
                owners = tuple(owner(plan, r, t, unit) for r in range(len(plan.replicas)))
                assert owners == s.owners
        assert all(a.owners != b.owners for a, b in pairwise(found)), "as few as can be"


@pytest.mark.parametrize("seed", range(100))
def test_sync_groups_sum_each_block_once_in_the_group_of_its_owners(seed: int) -> None:
    """Every block of every cut tensor is in one piece of one group, one rank per replica."""
    model, plan = drawn(seed)
    groups = sync_groups(plan, model)
    seen: dict[tuple[int, int], tuple[int, ...]] = {}
    for group in groups:
        assert [plan.place(g)[0] for g in group.ranks] == list(range(len(plan.replicas)))
        for piece in group.pieces:
            for block in piece.blocks:
                assert (piece.tensor, block) not in seen
                seen[piece.tensor, block] = group.ranks
    expected = {
        (i, b): tuple(owner(plan, r, t, b) for r in range(len(plan.replicas)))
        for i, t in enumerate(model.tensors)
        if t.kind is not None
        for b in range(model.counts[t.kind])
    }
    assert expected == seen


@pytest.mark.parametrize("seed", range(100))
def test_sync_bytes_are_the_lower_bound(seed: int) -> None:
    """A rank puts into sums just the elements it holds: less cannot be summed."""
    model, plan = drawn(seed)
    sent = dict.fromkeys(plan.ranks, 0)
    for group in sync_groups(plan, model):
        for piece in group.pieces:
            t = model.tensors[piece.tensor]
            assert t.kind is not None
            numel = sum(block_numel(t, model.counts[t.kind], b) for b in piece.blocks)
            for g in group.ranks:
                sent[g] += numel
    for g in plan.ranks:
        replica = plan.place(g)[0]
        held = sum(
            block_numel(t, model.counts[t.kind], u)
            for t in model.tensors
            if t.kind is not None
            for u in range(model.counts[t.kind])
            if owner(plan, replica, t, u) == g
        )
        assert held == sent[g]


@pytest.mark.parametrize("seed", range(20))
def test_sync_groups_come_in_one_global_order(seed: int) -> None:
    """Sorted by ranks, each group once: no two ranks can wait for each other in a circle."""
    model, plan = drawn(seed)
    ranks = [group.ranks for group in sync_groups(plan, model)]
    assert sorted(set(ranks)) == ranks


def test_sync_groups_of_shared_blocks_sum_each_block_once() -> None:
    """A KV head that several query heads share is summed once, by its first unit's owners."""
    draw = random.Random(2)
    t = TensorSpec(name="k", shape=(8, 4), kind=A, sharing=3)
    model = ModelUnits(counts={A: 12}, tensors=(t,))
    for _ in range(30):
        plan = random_plan(draw, model, (3, 2))
        blocks = [b for g in sync_groups(plan, model) for p in g.pieces for b in p.blocks]
        assert sorted(blocks) == [0, 1, 2, 3]
