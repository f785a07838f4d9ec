"""A new plan from measured speeds. Pure: the plan, the work and the speeds come in as arguments.

The everyday form of `ntp_core.planning.job`: the same ranks in the same replicas, one speed each.
"""

from __future__ import annotations

from collections.abc import Mapping

from ntp_core.cost import Work
from ntp_core.errors import PlanError
from ntp_core.plan import Plan
from ntp_core.planning.job import Prediction, plan_job, predict_plan
from ntp_core.planning.phases import RankSpeed, phases_of_work
from ntp_core.planning.replica import RankState, ReplicaModel
from ntp_core.units import ModelUnits


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
    model = ReplicaModel(counts=plan.counts, phases=phases_of_work(work))
    states = _states(speeds)
    return predict_plan(plan, [model.of([states[g] for g in r.ranks]) for r in plan.replicas])


def rebalance(plan: Plan, work: Work, speeds: Mapping[int, float]) -> Plan:
    """The plan of the next epoch: shares and batches to measured speeds, few units moved.

    Every rank stays in its replica. Returns a plan of equal content when nothing can be gained.
    """
    model = ModelUnits(counts=plan.counts, tensors=())
    states = _states(speeds)
    replicas = [[states[g] for g in r.ranks] for r in plan.replicas]
    return plan_job(model, work, replicas, plan.global_batch, present=plan).plan


def _states(speeds: Mapping[int, float]) -> dict[int, RankState]:
    return {g: RankState(rank=g, speed=RankSpeed(flops_per_s=v)) for g, v in speeds.items()}
