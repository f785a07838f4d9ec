"""Moves from plan A to plan B: complete, from those who hold, and not one block too many."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.reshard import Move, blocks_held, elements_lower_bound, moves
from ntp_core.units import ModelUnits, TensorSpec, block_numel
from tests.support.random_plans import (
    A,
    M,
    random_model,
    random_plan,
    random_share_change,
    without_overrides,
)


def drawn(seed: int) -> tuple[random.Random, ModelUnits, Plan]:
    """A random model and a plan for it."""
    draw = random.Random(seed)
    model = random_model(draw)
    return draw, model, random_plan(draw, model)


def check_moves(old: Plan, new: Plan, model: ModelUnits, found: tuple[Move, ...]) -> None:
    """Afterwards every rank has just its new blocks; what moved was needed, and was there."""
    got: dict[int, set[tuple[int, int]]] = {g: set() for g in new.ranks}
    for m in found:
        t = model.tensors[m.tensor]
        assert t.kind is not None
        assert m.src != m.dst
        assert m.block in blocks_held(old, t, m.src), "the source holds it"
        assert m.numel == block_numel(t, model.counts[t.kind], m.block)
        assert (m.tensor, m.block) not in got[m.dst], "nothing comes twice"
        got[m.dst].add((m.tensor, m.block))
    for g in new.ranks:
        for i, t in enumerate(model.tensors):
            had = set(blocks_held(old, t, g)) if g in old.ranks else set()
            want = set(blocks_held(new, t, g))
            if t.kind is not None:
                assert want - had == {b for tensor, b in got[g] if tensor == i}


@pytest.mark.parametrize("seed", range(100))
def test_moves_between_any_plans_are_complete_and_minimal(seed: int) -> None:
    """Any plan to any plan of the same ranks, replicas and degrees of their own."""
    draw, model, old = drawn(seed)
    world = len(old.ranks)
    degrees = [1] * draw.randint(1, world)
    for _ in range(world - len(degrees)):
        degrees[draw.randrange(len(degrees))] += 1
    new = random_plan(draw, model, degrees)
    found = moves(old, new, model)
    check_moves(old, new, model, found)
    assert sum(m.numel for m in found) >= elements_lower_bound(old, new, model)


@pytest.mark.parametrize("seed", range(300))
def test_moves_of_a_share_change_meet_the_lower_bound(seed: int) -> None:
    """With units kept where they can be, the bytes moved are the fewest any change needs."""
    draw, model, plan = drawn(seed)
    old = without_overrides(plan)
    new = random_share_change(draw, old)
    found = moves(old, new, model)
    check_moves(old, new, model, found)
    assert elements_lower_bound(old, new, model) == sum(m.numel for m in found)


def test_lower_bound_is_a_bound_by_brute_force() -> None:
    """No choice of units for the new shares moves less, the short last block included."""
    t = TensorSpec(name="w", shape=(9, 1), kind=A)  # blocks of 2, 2, 2, 2 and 1
    model = ModelUnits(counts={A: 5}, tensors=(t,))

    def plan(owners: tuple[int, ...]) -> Plan:
        units = [[u for u in range(5) if owners[u] == r] for r in range(3)]
        layouts = {A: Layout.of_units(units)}
        return Plan.build({A: 5}, [ReplicaPlan(ranks=(0, 1, 2), layouts=layouts, batch=1)])

    every = [plan(tuple(n // 3**i % 3 for i in range(5))) for n in range(3**5)]
    for old in every[::7]:
        least: dict[tuple[int, ...], int] = {}
        bounds: dict[tuple[int, ...], int] = {}
        for new in every:
            shares = new.replicas[0].layouts[A].shares
            moved = sum(m.numel for m in moves(old, new, model))
            least[shares] = min(moved, least.get(shares, moved))
            bounds[shares] = elements_lower_bound(old, new, model)
        assert least == bounds


@pytest.mark.parametrize("seed", range(30))
def test_moves_to_the_same_plan_are_none(seed: int) -> None:
    """Nothing moves where nothing changes, nor where only the batch does."""
    _, model, plan = drawn(seed)
    assert moves(plan, plan.with_epoch(9), model) == ()
    assert elements_lower_bound(plan, plan, model) == 0


@pytest.mark.parametrize("seed", range(50))
def test_moves_sources_are_balanced_where_all_may_give(seed: int) -> None:
    """A new rank that needs all is fed by every replica alike, within one block of the ideal."""
    draw = random.Random(seed)
    replicas, units = draw.randint(2, 5), draw.randint(1, 40)
    t = TensorSpec(name="w", shape=(units * 3, 2), kind=A)
    model = ModelUnits(counts={A: units}, tensors=(t,))

    def whole(rank: int) -> ReplicaPlan:
        return ReplicaPlan(ranks=(rank,), layouts={A: Layout.contiguous((units,))}, batch=1)

    old = Plan.build({A: units}, [whole(g) for g in range(replicas)])
    new = Plan.build({A: units}, [whole(g) for g in range(replicas + 1)])
    given = Counter(dict.fromkeys(range(replicas), 0))
    for m in moves(old, new, model):
        given[m.src] += m.numel
    assert units * 6 == given.total()
    assert max(given.values()) - min(given.values()) <= 6


def test_moves_of_shared_blocks_bring_each_copy_once() -> None:
    """A rank that holds one query head of a group already has the KV head of the others."""
    t = TensorSpec(name="k", shape=(2, 4), kind=A, sharing=3)
    model = ModelUnits(counts={A: 6, M: 2}, tensors=(t,))
    mlp = Layout.contiguous((1, 1))

    def plan(shares: tuple[int, int]) -> Plan:
        layouts = {A: Layout.contiguous(shares), M: mlp}
        return Plan.build(model.counts, [ReplicaPlan(ranks=(0, 1), layouts=layouts, batch=1)])

    assert moves(plan((4, 2)), plan((5, 1)), model) == ()
    assert (Move(0, 0, 0, 1, 4),) == moves(plan((3, 3)), plan((2, 4)), model)
    assert elements_lower_bound(plan((3, 3)), plan((2, 4)), model) == 4
