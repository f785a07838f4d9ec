"""New plans from measured speeds: never worse, less for the slow, nothing without need."""

from __future__ import annotations

import random

import pytest

from ntp_core.cost import Work, WorkShape, work_of_model
from ntp_core.errors import PlanError
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.replan import measured_speeds, predict, rebalance
from ntp_core.units import ModelUnits
from tests.support.random_plans import A, M, V, random_model, random_plan, without_overrides

COUNTS = {A: 12, M: 48, V: 24}
WORK = Work(unit={A: 40.0, M: 12.0, V: 20.0}, rank=5.0)


def even_plan(degrees: tuple[int, ...], batches: tuple[int, ...]) -> Plan:
    """Equal shares in each replica; degrees divide all counts."""
    replicas, first = [], 0
    for degree, batch in zip(degrees, batches, strict=True):
        layouts = {k: Layout.contiguous([n // degree] * degree) for k, n in COUNTS.items()}
        ranks = tuple(range(first, first + degree))
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=batch))
        first += degree
    return Plan.build(COUNTS, replicas)


@pytest.mark.parametrize("seed", range(300))
def test_rebalance_is_never_predicted_worse(seed: int) -> None:
    """From any plan and any speeds, the new plan's predicted step is not longer."""
    draw = random.Random(seed)
    model: ModelUnits = random_model(draw)
    plan = without_overrides(random_plan(draw, model))
    work = work_of_model(model, WorkShape(seq=4, per_rank=draw.choice([0.0, 10.0])))
    speeds = {g: draw.choice([1.0, draw.uniform(0.1, 1.0)]) for g in plan.ranks}
    new = rebalance(plan, work, speeds)
    before, after = predict(plan, work, speeds), predict(new, work, speeds)
    assert after.step_s <= before.step_s * (1 + 1e-12)
    assert after.step_s >= after.ideal_s * (1 - 1e-12)
    assert plan.epoch + 1 == new.epoch
    assert plan.global_batch == new.global_batch
    assert [r.ranks for r in plan.replicas] == [r.ranks for r in new.replicas]


@pytest.mark.parametrize("slow", range(6))
@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8])
def test_rebalance_slow_rank_gets_less(slow: int, speed: float) -> None:
    """The slow rank loses units of some kind and gains none; its fellows gain none less."""
    plan = even_plan((4, 2), (4, 2))
    speeds = {g: speed if g == slow else 1.0 for g in plan.ranks}
    new = rebalance(plan, WORK, speeds)
    replica, tp_rank = plan.place(slow)
    for kind in COUNTS:
        old_shares = plan.replicas[replica].layouts[kind].shares
        new_shares = new.replicas[replica].layouts[kind].shares
        assert new_shares[tp_rank] <= old_shares[tp_rank]
        assert all(
            n >= o
            for i, (n, o) in enumerate(zip(new_shares, old_shares, strict=True))
            if i != tp_rank
        )
    assert WORK.of_rank(new, slow) < WORK.of_rank(plan, slow)
    assert predict(new, WORK, speeds).step_s < predict(plan, WORK, speeds).step_s


@pytest.mark.parametrize("degrees", [(1,), (4,), (2, 2), (4, 4, 4)])
def test_rebalance_equal_speeds_on_an_even_plan_change_nothing(degrees: tuple[int, ...]) -> None:
    """Nothing to gain, nothing to move: the content is equal, only the epoch is next."""
    plan = even_plan(degrees, (3,) * len(degrees))
    assert plan.with_epoch(2) == rebalance(plan, WORK, dict.fromkeys(plan.ranks, 2.5))


def test_rebalance_is_stable() -> None:
    """Rebalancing again with the same speeds changes nothing more."""
    draw = random.Random(4)
    for _ in range(50):
        plan = even_plan((4, 2), (4, 2))
        speeds = {g: draw.uniform(0.3, 1.0) for g in plan.ranks}
        once = rebalance(plan, WORK, speeds)
        assert once.digest == rebalance(once, WORK, speeds).digest


def test_rebalance_slow_replica_takes_fewer_sequences() -> None:
    """A replica at half the speed throughout takes a third of the batch."""
    plan = even_plan((2, 2), (6, 6))
    speeds = {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}
    assert [r.batch for r in rebalance(plan, WORK, speeds).replicas] == [8, 4]


@pytest.mark.parametrize("seed", range(20))
def test_measured_speeds_recover_what_made_the_times(seed: int) -> None:
    """Times made from known speeds give those speeds back."""
    draw = random.Random(seed)
    plan = even_plan((4, 2), (4, 2))
    speeds = {g: draw.uniform(0.3, 2.0) for g in plan.ranks}
    busy = {g: WORK.of_rank(plan, g) / speeds[g] for g in plan.ranks}
    assert pytest.approx(speeds) == measured_speeds(busy, plan, WORK)


@pytest.mark.parametrize("busy", [{0: 1.0}, {0: 1.0, 1: 0.0}, {0: 1.0, 1: -2.0}])
def test_measured_speeds_without_a_measurement_are_refused(busy: dict[int, float]) -> None:
    """A rank that was not measured is named."""
    with pytest.raises(PlanError, match="rank 1"):
        measured_speeds(busy, even_plan((2,), (1,)), WORK)


def test_predict_is_the_slowest_rank_and_the_ideal_shares_all_work() -> None:
    """Two ranks of speed 1 and 1/2 with equal work: the slow one's time, and two thirds of it."""
    plan = even_plan((2,), (1,))
    work = Work(unit={A: 1.0, M: 1.0, V: 1.0})
    predicted = predict(plan, work, {0: 1.0, 1: 0.5})
    assert predicted.step_s == 84.0
    assert predicted.ideal_s == pytest.approx(84 / 1.5)
