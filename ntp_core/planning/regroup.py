"""Who does what once ranks are gone or have come: a pure function of the plan and the members.

A rank serves in the replica that the job's first plan gave it; one that this plan does not know
strengthens the weakest. A replica with too little left is dropped and its sequences go to the
others, unless it alone still holds a part of the state. Its ranks stand by until it can return.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from ntp_core.cost import Work
from ntp_core.errors import PlanError, StateLost
from ntp_core.plan import Plan
from ntp_core.planning.job import plan_job
from ntp_core.planning.phases import RankSpeed
from ntp_core.planning.replica import RankState
from ntp_core.units import ModelUnits


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupPolicy:
    """When a replica is dropped.

    Attributes:
        least_part: a replica with less than this part of its first degree is dropped, in [0, 1].
    """

    least_part: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """The outcome.

    Attributes:
        plan: of the ranks that go on; its epoch follows the present one.
        standby: members without a place in it.
    """

    plan: Plan
    standby: tuple[int, ...]


def regroup(
    present: Plan,
    members: Collection[int],
    home: Plan,
    units: ModelUnits,
    work: Work,
    *,
    survivors: Collection[int] | None = None,
    speeds: Mapping[int, float] | None = None,
    policy: RegroupPolicy | None = None,
) -> Regrouped:
    """The plan of the members that are there.

    Args:
        present: the plan in force until now.
        members: global ranks that are there, newcomers included.
        home: the job's first plan: which replica each rank belongs to.
        survivors: members that hold what `present` gave them; default: all it gave something.
        speeds: rank -> speed; ranks without one count as the median.

    Raises:
        StateLost: survivors do not hold the whole state any more.
        PlanError: nobody is left, or the batch is smaller than the number of replicas.
    """
    policy = policy or RegroupPolicy()
    holders = set(present.ranks).intersection(members if survivors is None else survivors)
    if lost := missing_units(present, holders, units):
        raise StateLost(lost)
    there = [(r, degree) for r, degree in _at_home(home, sorted(members)) if r]
    if not there:
        raise PlanError("no rank is left to plan for")
    strong = [r for r, degree in there if len(r) >= policy.least_part * degree]
    kept = {g for r in strong for g in r}
    if not strong or missing_units(present, holders & kept, units):
        strong = [r for r, _ in there]  # a weak replica may hold what no other does
    states = [[_state(g, speeds or {}) for g in ranks] for ranks in strong]
    made = plan_job(units, work, states, present.global_batch, present=present)
    plan = made.plan.with_epoch(present.epoch + 1)
    return Regrouped(plan=plan, standby=tuple(sorted(set(members).difference(plan.ranks))))


def missing_units(plan: Plan, holders: Collection[int], units: ModelUnits) -> str:
    """Which units no holder has under a plan, in words; "" when all are there."""
    for t in units.tensors:
        if t.kind is None:
            continue
        count = units.counts[t.kind]
        have: set[int] = set()
        for r in plan.replicas:
            layout = r.layout(t.kind, t.layer)
            for tp_rank, g in enumerate(r.ranks):
                if g in holders:
                    have.update(layout.units(tp_rank))
        if len(have) < count:
            first = min(set(range(count)) - have)
            return (
                f"{count - len(have)} of {count} {t.kind} units of '{t.name}' (the first is "
                f"{first}) were held by lost ranks only"
            )
    return "" if holders else "no rank is left that holds anything"


def _at_home(home: Plan, members: list[int]) -> list[tuple[list[int], int]]:
    """(members, first degree) of each replica of the home plan."""
    replicas = [[g for g in r.ranks if g in set(members)] for r in home.replicas]
    for g in set(members).difference(home.ranks):
        min(replicas, key=len).append(g)
    return [(ranks, len(r.ranks)) for ranks, r in zip(replicas, home.replicas, strict=True)]


def _state(rank: int, speeds: Mapping[int, float]) -> RankState:
    typical = median(speeds.values()) if speeds else 1.0
    return RankState(rank=rank, speed=RankSpeed(flops_per_s=speeds.get(rank, typical)))
