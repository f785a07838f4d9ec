"""Plans for whoever is left: whole, at home, and only from what is still there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_core.errors import PlanError, StateLost
from ntp_core.planning.regroup import RegroupPolicy, missing_units, regroup
from tests.support.tiny_job import GROUPED, even

UNITS = GROUPED.units()
WORK = GROUPED.work(16)
HOME = even(GROUPED, (3, 2, 2), (3, 2, 2))
REPLICA_OF = {g: i for i, r in enumerate(HOME.replicas) for g in r.ranks}


@given(st.sets(st.sampled_from(HOME.ranks), min_size=1), st.sets(st.integers(7, 9), max_size=2))
def test_regroup_keeps_ranks_at_home_and_the_batch_whole(alive: set[int], new: set[int]) -> None:
    """Any survivors, any newcomers: a whole plan of members, or words about what is lost."""
    members = alive | new
    try:
        made = regroup(HOME, members, HOME, UNITS, WORK, survivors=alive)
    except StateLost:
        assert missing_units(HOME, alive, UNITS)
        return
    assert not missing_units(HOME, alive, UNITS)
    plan = made.plan
    assert set(plan.ranks) | set(made.standby) == members
    assert plan.global_batch == HOME.global_batch
    assert plan.epoch == HOME.epoch + 1
    for r in plan.replicas:
        assert len({REPLICA_OF[g] for g in r.ranks if g in REPLICA_OF}) <= 1


@given(st.sets(st.sampled_from(HOME.ranks), min_size=1))
def test_missing_units_are_those_that_no_holder_has(holders: set[int]) -> None:
    """Against a count unit by unit."""
    lacking = False
    for t in UNITS.tensors:
        if t.kind is None:
            continue
        for unit in range(UNITS.counts[t.kind]):
            owners = {
                r.ranks[r.layout(t.kind, t.layer).owners(UNITS.counts[t.kind])[unit]]
                for r in HOME.replicas
            }
            lacking = lacking or not owners & holders
    assert bool(missing_units(HOME, holders, UNITS)) == lacking


def test_regroup_drops_a_weak_replica_and_takes_it_back() -> None:
    """Half of replica 1 is below the wanted part; its last rank stands by."""
    policy = RegroupPolicy(least_part=0.6)
    made = regroup(HOME, {0, 1, 2, 3, 5, 6}, HOME, UNITS, WORK, policy=policy)
    assert [r.ranks for r in made.plan.replicas] == [(0, 1, 2), (5, 6)]
    assert made.standby == (3,)
    back = regroup(made.plan, HOME.ranks, HOME, UNITS, WORK, survivors={0, 1, 2, 5, 6})
    assert [r.ranks for r in back.plan.replicas] == [(0, 1, 2), (3, 4), (5, 6)]


def test_regroup_keeps_a_weak_replica_that_alone_holds_a_part() -> None:
    """Nobody else has what rank 3 has."""
    first = even(GROUPED, (2, 2), (2, 2))
    policy = RegroupPolicy(least_part=1.0)
    made = regroup(first, {0, 3}, first, UNITS, WORK, policy=policy)
    assert made.plan.ranks == (0, 3)


def test_regroup_of_nobody_says_so() -> None:
    """No member, no plan; members that hold nothing hold nothing."""
    with pytest.raises(StateLost, match="held by lost ranks only"):
        regroup(HOME, {7, 8}, HOME, UNITS, WORK, survivors=())
    with pytest.raises((StateLost, PlanError)):
        regroup(HOME, (), HOME, UNITS, WORK)


def test_regroup_gives_shares_by_speed() -> None:
    """The slower of the two that are left gets the smaller share."""
    first = even(GROUPED, (3,), (3,))
    speeds = {0: 3.0, 1: 1.0, 2: 1.0}
    made = regroup(first, {0, 1}, first, UNITS, WORK, survivors=first.ranks, speeds=speeds)
    (replica,) = made.plan.replicas
    assert all(layout.shares[0] > layout.shares[1] for layout in replica.layouts.values())
