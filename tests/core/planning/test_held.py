"""What ranks hold, in their replica, in another one, and alone."""

from __future__ import annotations

import random

import pytest

from ntp_core.planning.held import Held
from tests.support.random_plans import random_model, random_plan, without_overrides


@pytest.mark.parametrize("seed", range(40))
def test_held_layouts_are_the_units_of_the_ranks_each_once(seed: int) -> None:
    """Any ranks in any order: none has what it did not hold, and nothing held is lost."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = without_overrides(random_plan(draw, model))
    ranks = draw.sample([*plan.ranks, 998, 999], draw.randint(1, len(plan.ranks)))
    for kind, layout in Held(plan).layouts(ranks).items():
        owned = {}
        for g in ranks:
            places = [(r, r.ranks.index(g)) for r in plan.replicas if g in r.ranks]
            owned[g] = {u for r, i in places for u in r.layouts[kind].units(i)}
        shown = [layout.units(i) for i in range(len(ranks))]
        flat = [u for units in shown for u in units]
        assert len(flat) == len(set(flat))
        assert set(flat) == set().union(*owned.values())
        assert all(set(units) <= owned[g] for g, units in zip(ranks, shown, strict=True))


def test_held_of_a_whole_replica_is_its_own_layout_and_batch() -> None:
    """The everyday case: the same ranks in the same order."""
    draw = random.Random(1)
    plan = random_plan(draw, random_model(draw), degrees=(3, 2))
    held = Held(plan)
    for r in plan.replicas:
        assert held.layouts(r.ranks) == r.layouts
        assert held.batch(r.ranks) == r.batch
        assert held.batch((*r.ranks, 77)) == r.batch
    assert held.batch((77,)) == 0


def test_held_without_a_plan_is_nothing() -> None:
    """A first plan starts from nothing."""
    assert Held(None).layouts((0, 1)) == {}
    assert Held(None).batch((0, 1)) == 0
