"""Ranks are killed at every point of a step and of a change; the others go on, exactly.

Exactly: from the last committed step on, losses, parameters and optimizer state are bit for bit
those of a job that has had the new plan from that step on and never lost anybody.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntp_core.faults import Fault, When, kill_at, stop_at
from ntp_core.job import SaveConfig
from ntp_core.observe import ChangePhase, ChangeStatus, Reason
from ntp_core.plan import Plan
from tests.support.bodies_elastic import Story, Told, elastic, resumed
from tests.support.bodies_train import Local
from tests.support.logical import assemble, is_equal
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of
from tests.support.tiny_job import GROUPED, even, train_config

CONFIG = train_config(GROUPED)
UNITS = GROUPED.units()
PLAN = even(GROUPED, (3, 2), (3, 2))
STEPS = 6

pytestmark = pytest.mark.timeout(180)


def run(
    pool: RankPool,
    faults: Sequence[Fault],
    dead: set[int],
    plan: Plan = PLAN,
    steps: int = STEPS,
    late: tuple[int, ...] = (),
    save: SaveConfig | None = None,
    **more: Any,
) -> dict[int, Told]:
    """What each rank that is left tells."""
    size = max(plan.ranks) + 1
    answers = pool.run(
        elastic,
        size + len(late),
        expect_death=dead,
        config=CONFIG,
        plan=plan,
        steps=steps,
        story=Story(faults=tuple(faults), late=late, **more),
        save=save,
    )
    return {rank: told for rank, told in enumerate(answers) if told is not None}


def renumbered(plan: Plan) -> Plan:
    """The same plan for ranks 0, 1, 2, ..."""
    number = {g: i for i, g in enumerate(plan.ranks)}
    return Plan.build(
        plan.counts,
        [replace(r, ranks=tuple(number[g] for g in r.ranks)) for r in plan.replicas],
        epoch=plan.epoch,
    )


def check_as_if_never_lost(
    pool: RankPool, told: dict[int, Told], steps: Sequence[int], folder: Path, back: int = 0
) -> None:
    """Each stretch of the job is what a job does under its plan from the stretch's first state.

    Args:
        steps: the committed step from which each plan after the first was in force.
        back: steps that the job had made beyond that, and went back.
    """
    assert {t.error for t in told.values()} == {""}
    witness = min(told)
    plans = _plans(told[witness])
    begun = [c for c in calls_of(told[witness].calls, "change_begin") if c[0] in plans]
    assert [c[4] - back for c in begun] == list(steps)
    save = SaveConfig(folder=str(folder))
    losses: list[float] = []
    for plan, until in zip(plans.values(), [*steps, told[witness].at_step], strict=True):
        same = renumbered(plan)
        oracle = pool.run(
            resumed, len(plan.ranks), config=CONFIG, plan=same, save=save, steps=until
        )
        losses += oracle[0][0]
    assert set(plan.ranks) == set(told)
    assert all(t.losses == losses for t in told.values())
    for number in range(3):
        ours = assemble(plan, UNITS, _by_rank(plan, told, number))
        theirs = assemble(same, UNITS, [planes[number] for _, planes in oracle])
        assert all(is_equal(a, ours[0]) for a in (*ours, *theirs))


def _plans(told: Told) -> dict[int, Plan]:
    """Plans that were in force, by epoch, as the observer was told."""
    texts = {epoch: text for epoch, _, text, _ in calls_of(told.calls, "plan")}
    return {e: Plan.from_json(json.loads(t)["plan"]) for e, t in texts.items()}


def _by_rank(plan: Plan, told: dict[int, Told], number: int) -> list[Local]:
    """Planes by global rank; ranks that are gone have none."""
    return [told[g].planes[number] if g in told else {} for g in range(max(plan.ranks) + 1)]


STEP_POINTS = [
    (0, When.STEP_BEGIN, 3),
    (4, When.AFTER_FORWARD, 3),
    (1, When.AFTER_BACKWARD, 3),
    (0, When.BEFORE_OPTIMIZER, 3),
    (3, When.AFTER_OPTIMIZER, 4),
    (0, When.AFTER_OPTIMIZER, 4),
]
"""Who dies where in step 4, and the step that is committed then. After the optimizer step the
others have the step too, as the sum that decides it was over."""


@pytest.mark.parametrize(("victim", "when", "committed"), STEP_POINTS)
def test_rank_killed_in_a_step_is_as_if_it_had_never_been_there(
    rank_pool: RankPool, tmp_path: Path, victim: int, when: When, committed: int
) -> None:
    """In the forward pass, the backward pass, before and after the optimizer step."""
    told = run(rank_pool, [kill_at(victim, 4, when)], {victim})
    for t in told.values():
        (change,) = calls_of(t.calls, "change_begin")
        assert (change[0], change[1], change[4]) == (2, Reason.RANK_DIED, committed)
        (end,) = calls_of(t.calls, "change_end")
        assert end[1] == ChangeStatus.COMMITTED
        assert end[2] == end[3] > 0, "no byte too many"
    check_as_if_never_lost(rank_pool, told, [committed], tmp_path)


@pytest.mark.parametrize("deaf", [(1,), (0, 3), (0, 1, 3)])
def test_step_that_one_rank_made_final_is_made_final_by_all(
    rank_pool: RankPool, tmp_path: Path, deaf: tuple[int, ...]
) -> None:
    """A rank dies while the sum that decides a step ends: some know what came out, some do not."""
    # Three decisions were made before step 4's, which is the fourth.
    told = run(
        rank_pool, [kill_at(4, 4, When.AFTER_OPTIMIZER)], {4}, deaf=dict.fromkeys(deaf, (3, 3))
    )
    for t in told.values():
        (change,) = calls_of(t.calls, "change_begin")
        assert (change[1], change[4]) == (Reason.RANK_DIED, 4), "nobody went back"
        assert [c[0] for c in calls_of(t.calls, "step_end")] == [1, 2, 3, 4, 5, 6]
    check_as_if_never_lost(rank_pool, told, [4], tmp_path)


def test_step_that_nobody_knows_the_result_of_is_made_again(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """The only rank that knew is the one that died."""
    deaf = dict.fromkeys(range(4), (3, 3))
    told = run(rank_pool, [kill_at(4, 4, When.AFTER_OPTIMIZER)], {4}, deaf=deaf)
    for t in told.values():
        (change,) = calls_of(t.calls, "change_begin")
        assert change[4] == 3
    check_as_if_never_lost(rank_pool, told, [3], tmp_path)


@pytest.mark.parametrize(
    ("second", "when"),
    [
        *((g, w) for g in (0, 2) for w in (When.IN_TRANSFER, When.BEFORE_ADOPTION)),
        *((g, When.AFTER_ADOPTION) for g in (0, 3)),  # what rank 3 held as the last has been given
    ],
)
def test_rank_killed_inside_the_change_that_follows_a_loss(
    rank_pool: RankPool, tmp_path: Path, when: When, second: int
) -> None:
    """The second death comes while bytes move, before the new plan is decided, right after."""
    faults = [kill_at(1, 4, When.AFTER_BACKWARD), kill_at(second, 0, when)]
    told = run(rank_pool, faults, {1, second})
    for t in told.values():
        first, last = [c[1] for c in calls_of(t.calls, "change_end")]
        assert last == ChangeStatus.COMMITTED
        is_first_made = when is When.AFTER_ADOPTION
        assert first == (ChangeStatus.COMMITTED if is_first_made else ChangeStatus.FAILED)
        assert [c[0] for c in calls_of(t.calls, "change_begin")] == [2, 3]
    check_as_if_never_lost(rank_pool, told, [3, 3] if is_first_made else [3], tmp_path)


@pytest.mark.parametrize("deaf", [(0,), (2, 3)])
def test_plan_that_one_rank_adopted_is_adopted_by_all(
    rank_pool: RankPool, tmp_path: Path, deaf: tuple[int, ...]
) -> None:
    """A rank dies while the sum that decides a change ends."""
    faults = [kill_at(1, 4, When.AFTER_BACKWARD), kill_at(4, 0, When.AFTER_ADOPTION)]
    told = run(rank_pool, faults, {1, 4}, deaf=dict.fromkeys(deaf, (3, 3)))
    for t in told.values():
        begun = [(c[0], c[4]) for c in calls_of(t.calls, "change_begin")]
        assert begun == [(2, 3), (3, 3)]
        assert [c[1] for c in calls_of(t.calls, "change_end")] == [ChangeStatus.COMMITTED] * 2
    check_as_if_never_lost(rank_pool, told, [3, 3], tmp_path)


def test_two_ranks_killed_at_once(rank_pool: RankPool, tmp_path: Path) -> None:
    """One of each replica, rank 0 among them, at the same point of the same step."""
    faults = [kill_at(0, 4, When.AFTER_FORWARD), kill_at(4, 4, When.AFTER_FORWARD)]
    told = run(rank_pool, faults, {0, 4})
    check_as_if_never_lost(rank_pool, told, [3], tmp_path)


def test_three_deaths_one_after_the_other(rank_pool: RankPool, tmp_path: Path) -> None:
    """The job shrinks to a rank in each replica."""
    faults = [
        kill_at(3, 2, When.AFTER_FORWARD),
        kill_at(0, 3, When.BEFORE_OPTIMIZER),
        kill_at(2, 5, When.AFTER_BACKWARD),
    ]
    told = run(rank_pool, faults, {0, 2, 3})
    for t in told.values():
        assert t.plan is not None
        assert ([r.ranks for r in t.plan.replicas], t.plan.epoch) == ([(1,), (4,)], 4)
    check_as_if_never_lost(rank_pool, told, [1, 2, 4], tmp_path)


def test_whole_replica_goes_and_its_sequences_go_to_the_other(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """Rank by rank."""
    faults = [kill_at(3, 2, When.AFTER_FORWARD), kill_at(4, 4, When.BEFORE_OPTIMIZER)]
    told = run(rank_pool, faults, {3, 4})
    for t in told.values():
        assert t.plan is not None
        assert [(r.ranks, r.batch) for r in t.plan.replicas] == [((0, 1, 2), 5)]
    check_as_if_never_lost(rank_pool, told, [1, 3], tmp_path)


def test_state_that_only_dead_ranks_held_ends_the_job_in_words(rank_pool: RankPool) -> None:
    """Without a checkpoint there is nothing to go on from: all say so, none hangs."""
    plan = even(GROUPED, (3,), (5,))
    told = run(rank_pool, [kill_at(1, 4, When.AFTER_FORWARD)], {1}, plan)
    for t in told.values():
        assert "were held by lost ranks only; the job saves no checkpoints" in t.error


def test_state_that_only_dead_ranks_held_comes_from_the_last_checkpoint(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """One replica: the survivors go back to what was saved, under their own plan."""
    plan = even(GROUPED, (3,), (5,))
    save = SaveConfig(folder=str(tmp_path / "job"), every=2)
    told = run(rank_pool, [kill_at(1, 4, When.AFTER_FORWARD)], {1}, plan, save=save)
    for t in told.values():
        assert [c[1] for c in calls_of(t.calls, "change_phase")] == [ChangePhase.RESTORE]
    check_as_if_never_lost(rank_pool, told, [2], tmp_path / "oracle", back=1)


def test_last_rank_left_goes_on_alone(rank_pool: RankPool, tmp_path: Path) -> None:
    """Down to one rank that holds the whole model."""
    plan = even(GROUPED, (1, 1), (3, 2))
    told = run(rank_pool, [kill_at(0, 4, When.AFTER_FORWARD)], {0}, plan)
    check_as_if_never_lost(rank_pool, told, [3], tmp_path)


def test_newcomer_is_let_in_at_a_step_boundary_and_fed_by_its_peers(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """A rank that the job never had joins the weakest replica; nothing is restarted."""
    plan = even(GROUPED, (3, 2), (3, 3))
    told = run(rank_pool, [], set(), plan, late=(5,), let_in_at=3)
    for t in told.values():
        assert t.plan is not None
        assert [r.ranks for r in t.plan.replicas] == [(0, 1, 2), (3, 4, 5)]
        (change,) = calls_of(t.calls, "change_begin")
        assert (change[1], change[4]) == (Reason.RANK_RETURNED, 3)
        (end,) = calls_of(t.calls, "change_end")
        assert (end[1], end[2]) == (ChangeStatus.COMMITTED, end[3])
    check_as_if_never_lost(rank_pool, told, [3], tmp_path)


def test_rank_dies_while_a_newcomer_is_fed(rank_pool: RankPool, tmp_path: Path) -> None:
    """The newcomer has nothing yet; both are sorted out in one go."""
    faults = [kill_at(3, 0, When.IN_TRANSFER)]
    told = run(rank_pool, faults, {3}, late=(5,), let_in_at=3)
    for t in told.values():
        assert t.plan is not None
        assert [r.ranks for r in t.plan.replicas] == [(0, 1, 2), (4, 5)]
    check_as_if_never_lost(rank_pool, told, [3], tmp_path)


def test_newcomer_dies_while_it_is_fed(rank_pool: RankPool, tmp_path: Path) -> None:
    """The others stay with what they had."""
    plan = even(GROUPED, (3, 2), (3, 3))
    faults = [kill_at(5, 0, When.BEFORE_ADOPTION)]
    told = run(rank_pool, faults, {5}, plan, late=(5,), let_in_at=3)
    for t in told.values():
        assert t.plan is not None
        assert [r.ranks for r in t.plan.replicas] == [(0, 1, 2), (3, 4)]
    check_as_if_never_lost(rank_pool, told, [3], tmp_path)


def test_stopped_rank_is_left_behind_fenced_and_let_in_again(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """It wakes when the others have moved on: what it holds is old, and it knows."""
    told = run(
        rank_pool,
        [stop_at(4, 4, When.AFTER_FORWARD)],
        set(),
        steps=9,
        wake=(4, 5),
        let_in_at=7,
        give_up_s=3.0,
    )
    for rank, t in told.items():
        begun = [(c[1], c[4]) for c in calls_of(t.calls, "change_begin")]
        away, back = (Reason.RANK_DIED, 3), (Reason.RANK_RETURNED, 7)
        assert begun == ([back] if rank == 4 else [away, back])
    check_as_if_never_lost(rank_pool, told, [3, 7], tmp_path)


def test_weak_replica_is_dropped_and_returns_when_it_is_strong_again(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """Its sequences go to the other meanwhile, its last rank stands by and loses its state."""
    told = run(
        rank_pool,
        [kill_at(3, 3, When.AFTER_FORWARD)],
        {3},
        late=(5,),
        knock_after=1,
        let_in_at=5,
        least_part=0.6,
    )
    for t in told.values():
        assert t.plan is not None
        assert [r.ranks for r in t.plan.replicas] == [(0, 1, 2), (4, 5)]
    between = _plans(told[0])[2]
    assert [(r.ranks, r.batch) for r in between.replicas] == [((0, 1, 2), 5)]
    check_as_if_never_lost(rank_pool, told, [2, 5], tmp_path)


def test_only_ranks_of_the_dropped_replica_were_the_lowest(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """What is left starts at rank 3: it leads, reads and speaks."""
    told = run(rank_pool, [kill_at(1, 3, When.AFTER_FORWARD)], {1}, least_part=1.0, patience_s=3.0)
    assert {g for g, t in told.items() if t.plan is not None} == {3, 4}
    for rank in (0, 2):
        assert "Fenced" in told[rank].error
    left = {g: told[g] for g in (3, 4)}
    check_as_if_never_lost(rank_pool, left, [2], tmp_path)
