"""Segments: every unit of every replica in just one, with its owners, and no byte twice."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ntp_core.plan import Plan
from ntp_core.segments import launches, segments, sync_groups, whole_tensors
from ntp_core.traffic import least_bytes, segment_traffic
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


SHARED = ModelUnits(
    counts={A: 12},
    tensors=(
        TensorSpec(name="gain", shape=(5,)),
        TensorSpec(name="q", shape=(12, 4), kind=A, layer=0),
        TensorSpec(name="k", shape=(8, 4), kind=A, layer=0, sharing=3),
        TensorSpec(name="q_norm", shape=(2,), layer=0, partial_grad=True),
        TensorSpec(name="q1", shape=(12, 4), kind=A, layer=1),
        TensorSpec(name="k1", shape=(8, 4), kind=A, layer=1, sharing=3),
    ),
)


@pytest.mark.parametrize("seed", range(30))
def test_sync_groups_of_shared_blocks_are_all_their_holders(seed: int) -> None:
    """A KV head is summed once, by every rank that holds a query head of it, in all replicas."""
    draw = random.Random(seed)
    plan = random_plan(draw, SHARED, [draw.randint(1, 4) for _ in range(draw.randint(1, 3))])
    for index, t in enumerate(SHARED.tensors):
        if t.kind is None:
            continue
        seen = {}
        for group in sync_groups(plan, SHARED, [index]):
            for block in group.pieces[0].blocks:
                assert block not in seen
                seen[block] = group.ranks
        for block in range(12 // t.sharing):
            units = range(block * t.sharing, (block + 1) * t.sharing)
            holders = {owner(plan, r, t, u) for r in range(len(plan.replicas)) for u in units}
            assert holders == set(seen[block])
            assert len(holders) == len(seen[block])
            places = [plan.place(g) for g in seen[block]]
            assert sorted(places) == places, "replica by replica, by tp_rank"


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 30])
def test_launches_hold_what_must_be_summed_once_in_one_order(seed: int, bucket_bytes: int) -> None:
    """Every block of more than one holder, last layers first, whole tensors at the end."""
    draw = random.Random(seed)
    plan = random_plan(draw, SHARED, [draw.randint(1, 3) for _ in range(draw.randint(1, 3))])
    found = launches(plan, SHARED, bucket_bytes)
    keys = [(launch.bucket, launch.ranks) for launch in found]
    assert sorted(set(keys)) == keys
    seen = {(p.tensor, b): x.ranks for x in found for p in x.pieces for b in p.blocks}
    assert len(seen) == sum(len(p.blocks) for x in found for p in x.pieces)
    expected = {
        (p.tensor, b): g.ranks
        for g in sync_groups(plan, SHARED)
        for p in g.pieces
        for b in p.blocks
        if len(g.ranks) > 1
    }
    world = {(i, 0): plan.ranks for i in whole_tensors(plan, SHARED)}
    assert expected | (world if len(plan.ranks) > 1 else {}) == seen
    first = {}  # tensor -> its bucket
    for x in found:
        for p in x.pieces:
            first.setdefault(p.tensor, x.bucket)
    cut = [i for i in sorted(first, reverse=True) if SHARED.tensors[i].kind is not None]
    assert sorted(first[i] for i in cut) == [first[i] for i in cut]
    last = max((first[i] for i in cut), default=-1)
    assert all(first[i] > last for i in first if SHARED.tensors[i].kind is None)


def test_whole_tensors_of_one_replica_are_those_of_partial_gradients() -> None:
    """One replica sums only what its ranks hold parts of; several sum all."""
    draw = random.Random(1)
    assert whole_tensors(random_plan(draw, SHARED, [3]), SHARED) == (3,)
    assert whole_tensors(random_plan(draw, SHARED, [3, 1]), SHARED) == (0, 3)


@pytest.mark.parametrize("seed", range(40))
def test_launch_bytes_are_the_lower_bound(seed: int) -> None:
    """A rank puts into sums each element that it holds and others hold too, once."""
    draw = random.Random(seed)
    model = SHARED if seed % 2 else random_model(draw)
    plan = random_plan(draw, model, [draw.randint(1, 4) for _ in range(draw.randint(1, 3))])
    for bucket_bytes in (1, 1 << 30):
        traffic = segment_traffic(plan, model, bucket_bytes)
        assert least_bytes(plan, model) == {g: t.num_bytes for g, t in traffic.items()}
    assert all(t.messages == t.collectives for t in traffic.values())
