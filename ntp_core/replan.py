"""A new plan from measured speeds. Pure: the plan, the work and the speeds come in as arguments.

Two levels, each an exact min-max: inside a replica the units go to ranks, one unit kind after the
other because tensor parallelism waits after each block; over replicas the sequences of the global
batch go to replicas by their predicted time per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ntp_core.cost import Work
from ntp_core.errors import PlanError
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, keep_placement, min_max_shares
from ntp_core.units import UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan should take, with given speeds.

    Attributes:
        step_s: the ranks' own work per step, each waiting for the slowest after each block.
        ideal_s: the same if work could be cut into any fraction over all ranks.
    """

    step_s: float
    ideal_s: float


def measured_speeds(busy_s: Mapping[int, float], plan: Plan, work: Work) -> dict[int, float]:
    """Work per second of each rank, from its own time per step under `plan`.

    Raises:
        PlanError: when a rank of the plan has no positive measurement.
    """
    speeds = {}
    for g in plan.ranks:
        if busy_s.get(g, 0.0) <= 0.0:
            raise PlanError(f"no measured time for rank {g}; measure every rank of the plan first")
        speeds[g] = work.of_rank(plan, g) / busy_s[g]
    return speeds


def predict(plan: Plan, work: Work, speeds: Mapping[int, float]) -> Prediction:
    """Time of a plan's slowest replica, and the ideal that no cut can beat.

    In a replica all ranks wait for each other after each block, so a kind of block takes the time
    of its own slowest rank: a light share of one kind does not make up for a heavy one of another.
    """
    times = [r.batch * _sequence_s(r, work, speeds, plan.counts) for r in plan.replicas]
    total = sum(work.of_rank(plan, g) for g in plan.ranks)
    return Prediction(step_s=max(times), ideal_s=total / sum(speeds[g] for g in plan.ranks))


def rebalance(plan: Plan, work: Work, speeds: Mapping[int, float]) -> Plan:
    """The plan of the next epoch: shares and batches to measured speeds, few units moved.

    Every rank stays in its replica. Returns a plan of equal content when nothing can be gained.
    """
    replicas = [_rebalance_replica(r, work, speeds, plan.counts) for r in plan.replicas]
    batches = _batch_shares(plan, replicas, work, speeds)
    replicas = [replace(r, batch=b) for r, b in zip(replicas, batches, strict=True)]
    return Plan.build(plan.counts, replicas, epoch=plan.epoch + 1)


def _rebalance_replica(
    r: ReplicaPlan, work: Work, speeds: Mapping[int, float], counts: Mapping[UnitKind, int]
) -> ReplicaPlan:
    layouts: dict[UnitKind, Layout] = {}
    for kind, present in r.layouts.items():
        costs = _costs(r, kind, work, speeds, counts)
        shares = min_max_shares(counts[kind], costs, present=present.shares)
        layouts[kind] = keep_placement(shares, present)
    return replace(r, layouts=layouts, overrides={})


def _batch_shares(
    plan: Plan, replicas: list[ReplicaPlan], work: Work, speeds: Mapping[int, float]
) -> tuple[int, ...]:
    costs = []
    for index, r in enumerate(replicas):
        sequence_s = _sequence_s(r, work, speeds, plan.counts)
        if sequence_s <= 0:
            raise PlanError(f"replica {index} would do no work at all")
        costs.append(RankCost(unit_s=sequence_s))
    present = [r.batch for r in plan.replicas]
    return min_max_shares(plan.global_batch, costs, present=present, least=1)


def _sequence_s(
    r: ReplicaPlan, work: Work, speeds: Mapping[int, float], counts: Mapping[UnitKind, int]
) -> float:
    """Time of one sequence in a replica: for each kind that of its slowest rank."""
    total = 0.0
    for kind, layout in r.layouts.items():
        costs = _costs(r, kind, work, speeds, counts)
        total += max(c.time_s(n) for c, n in zip(costs, layout.shares, strict=True))
    return total


def _costs(
    r: ReplicaPlan,
    kind: UnitKind,
    work: Work,
    speeds: Mapping[int, float],
    counts: Mapping[UnitKind, int],
) -> list[RankCost]:
    """Time of each rank for its units of one kind.

    The work that every rank does goes with the kinds in proportion to their size, so that each
    barrier sees its part of a slow rank's fixed cost.
    """
    total = sum(work.unit[k] * n for k, n in counts.items())
    part = work.rank * (work.unit[kind] * counts[kind] / total if total else 0.0)
    return [RankCost(unit_s=work.unit[kind] / speeds[g], start_s=part / speeds[g]) for g in r.ranks]
