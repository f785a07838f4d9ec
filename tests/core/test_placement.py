"""Placement of units for given shares: always a partition, never more groups than need be."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.errors import PlanError
from ntp_core.placement import (
    SyncShape,
    contiguous,
    core_extra,
    place,
    place_kinds,
    place_plan,
    sync_shape,
)
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.segments import segments, sync_groups
from ntp_core.traffic import least_bytes, segment_traffic
from ntp_core.units import ModelUnits, TensorSpec
from tests.support.random_plans import A, M, random_model, random_plan, random_shares

Shares = list[tuple[int, ...]]


@st.composite
def mixes(draw: st.DrawFn) -> Shares:
    """Shares of 1-5 replicas of 1-7 ranks, zeros among them."""
    count = draw(st.integers(1, 40))
    source = random.Random(draw(st.integers(0, 2**32)))
    degrees = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    return [random_shares(source, count, d) for d in degrees]


def owners_by_unit(layouts: tuple[Layout, ...], count: int) -> list[tuple[int, ...]]:
    """For each unit its owners, looked up unit by unit; fails where one has none or two."""
    columns = []
    for unit in range(count):
        owners = []
        for layout in layouts:
            (owner,) = [
                i for i, runs in enumerate(layout.runs) if any(a <= unit < b for a, b in runs)
            ]
            owners.append(owner)
        columns.append(tuple(owners))
    return columns


def even_shares(count: int, degree: int) -> tuple[int, ...]:
    """Shares that differ by one at most."""
    return tuple(count // degree + (i < count % degree) for i in range(degree))


@given(mixes())
@settings(max_examples=300, deadline=None)
def test_place_gives_each_rank_its_share_and_each_unit_one_owner(shares: Shares) -> None:
    """A partition in every replica, whatever the shares."""
    for way in (place, core_extra):
        layouts = way(shares)
        assert shares == [layout.shares for layout in layouts]
        owners_by_unit(layouts, sum(shares[0]))


@given(mixes())
@settings(max_examples=300, deadline=None)
def test_place_has_no_more_groups_than_contiguous_layouts_and_few_segments(shares: Shares) -> None:
    """Groups at most those of contiguous layouts; segments at most ranks - (replicas - 1)."""
    ours, naive = sync_shape([place(shares)]), sync_shape([contiguous(shares)])
    assert ours.groups <= naive.groups
    most = sum(len(s) for s in shares) - (len(shares) - 1)
    assert ours.segments <= most
    assert sync_shape([core_extra(shares)]).segments <= most


@given(mixes())
@settings(max_examples=100, deadline=None)
def test_sync_shape_equals_a_count_unit_by_unit(shares: Shares) -> None:
    """The figures are those of looking at every unit."""
    layouts = core_extra(shares)
    columns = owners_by_unit(layouts, sum(shares[0]))
    lane = [len(s) for s in shares].index(min(len(s) for s in shares))
    groups = set(columns)
    members = [(r, owner) for group in groups for r, owner in enumerate(group)]
    expected = SyncShape(
        groups=len(groups),
        segments=1 + sum(a != b for a, b in pairwise(columns)),
        off_lane=sum(o != column[lane] for column in columns for o in column),
        busiest=max(members.count(m) for m in members),
    )
    assert expected == sync_shape([layouts])


@pytest.mark.parametrize(("first", "second"), list(product(range(1, 8), repeat=2)))
def test_place_two_even_replicas_have_the_fewest_groups_there_can_be(
    first: int, second: int
) -> None:
    """Degrees d and e need d + e - gcd(d, e) groups, however units are placed."""
    count = math.lcm(first, second)
    shape = sync_shape([place([even_shares(count, first), even_shares(count, second)])])
    assert first + second - math.gcd(first, second) == shape.groups


def test_fewest_groups_of_two_even_replicas_by_brute_force() -> None:
    """No placement of 6 units on 3 and on 2 ranks has fewer than 4 groups."""
    reduced = [0, 0, 0, 1, 1, 1]
    counts = [
        len(set(zip(owners, reduced, strict=True)))
        for owners in product(range(3), repeat=6)
        if all(owners.count(i) == 2 for i in range(3))
    ]
    assert min(counts) == 4 == sync_shape([place([(2, 2, 2), (3, 3)])]).groups


@pytest.mark.parametrize("reduced", [28, 30, 31])
def test_place_of_the_papers_example_meets_rank_by_rank(reduced: int) -> None:
    """Layers at 32 ranks and fewer: cores meet on their lane, contiguous ranks do not."""
    count = 12 * math.lcm(32, reduced)
    shares = [even_shares(count, 32), even_shares(count, reduced)]
    ours, naive = sync_shape([place(shares)]), sync_shape([contiguous(shares)])
    assert naive.groups == ours.groups
    assert count * (32 - reduced) // 32 == ours.off_lane, "the tails, no unit more"
    assert ours.off_lane < naive.off_lane / 4


def test_place_lets_equal_shares_meet_uncut() -> None:
    """Replicas with the same shares on other ranks need no more groups than ranks."""
    shape = sync_shape([place([(2, 4, 3, 3), (3, 3, 4, 2)])])
    assert (shape.groups, shape.segments) == (4, 4)


def test_place_cuts_no_unit_range_of_equal_replicas() -> None:
    """Replicas that are alike stay contiguous and meet rank by rank."""
    layouts = place([(3, 2, 1)] * 3)
    assert (Layout.contiguous((3, 2, 1)),) * 3 == layouts
    assert SyncShape(groups=3, segments=3, off_lane=0, busiest=1) == sync_shape([layouts])


@pytest.mark.parametrize("shares", [[(1, 2), (4,)], [(3, -1), (2,)]])
def test_place_refuses_shares_that_do_not_add_up(shares: Shares) -> None:
    """Replicas of unlike sums, or shares below none, are named."""
    with pytest.raises(PlanError, match="add up to"):
        place(shares)


def test_place_kinds_chooses_for_all_kinds_together() -> None:
    """Groups are counted once for kinds that share them."""
    shares = [{A: (2, 2, 1, 1), M: (12,) * 4}, {A: (2, 2, 2), M: (16,) * 3}]
    placed = place_kinds(shares)
    found = sync_shape([tuple(r[k] for r in placed) for k in (A, M)])
    assert found.groups == 6
    assert shares == [{k: layout.shares for k, layout in r.items()} for r in placed]
    assert place_kinds([]) == []


@pytest.mark.parametrize("seed", range(60))
def test_place_plan_keeps_shares_and_sends_each_byte_once(seed: int) -> None:
    """Any plan placed anew: same shares and batches, bytes per rank at the lower bound."""
    draw = random.Random(seed)
    model = random_model(draw)
    degrees = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
    plan = random_plan(draw, model, degrees)
    placed = place_plan(plan)
    for old, new in zip(plan.replicas, placed.replicas, strict=True):
        assert (old.ranks, old.batch) == (new.ranks, new.batch)
        assert {k: v.shares for k, v in old.layouts.items()} == {
            k: v.shares for k, v in new.layouts.items()
        }
    bound = least_bytes(placed, model)
    assert bound == {g: t.num_bytes for g, t in segment_traffic(placed, model).items()}


def test_sync_shape_agrees_with_the_groups_of_a_plan() -> None:
    """What placement counts is what the sync builds."""
    shares = [(4, 4, 4), (6, 2, 4), (7, 5)]
    first, replicas = 0, []
    for layout in place(shares):
        ranks = tuple(range(first, first + len(layout.runs)))
        replicas.append(ReplicaPlan(ranks=ranks, layouts={M: layout}, batch=1))
        first += len(ranks)
    plan = Plan.build({M: 12}, replicas)
    t = TensorSpec(name="w", shape=(12, 1), kind=M)
    shape = sync_shape([place(shares)])
    assert shape.segments == len(segments(plan, t))
    model = ModelUnits(counts={M: 12}, tensors=(t,))
    assert shape.groups == len(sync_groups(plan, model))


def test_place_without_lanes_keeps_the_busiest_rank_in_few_groups() -> None:
    """Eight ranks beside seven: the extra rank of the lanes meets all, contiguous ones meet two."""
    shares = [even_shares(56, 8), even_shares(56, 7)]
    by_lane, flat = (sync_shape([place(shares, by_lane=b)]) for b in (True, False))
    assert (by_lane.groups, flat.groups) == (14, 14)
    assert (by_lane.busiest, flat.busiest) == (7, 2)
    assert by_lane.off_lane < flat.off_lane
