"""Allocation changes in a running job: nothing is lost, nothing more than needed moves."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from ntp_core.observe import ChangePhase, ChangeStatus, Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.change import MAX_TRIES
from ntp_core.units import ModelUnits
from tests.support import bodies_change
from tests.support.bodies_train import Told, train
from tests.support.logical import assemble, is_equal, places_of
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of
from tests.support.tiny_job import (
    GROUPED,
    KINDS,
    A,
    M,
    V,
    even,
    plan_of,
    reshared,
    scattered,
    train_config,
)

STEPS = 6
LOSS_TOLERANCE = 1e-6  # relative; another layout adds in another order
PLANES, FLOAT_BYTES = 3, 4  # parameter and two moments, all float32
CONFIG = train_config(GROUPED)
UNITS: ModelUnits = GROUPED.units()
Changes = tuple[tuple[int, Plan], ...]


@pytest.fixture(scope="module")
def unchanged(rank_pool: RankPool) -> list[float]:
    """Losses of a job of the same global batch that never changed."""
    return run(rank_pool, even(GROUPED, (2, 1), (3, 3)))[0].losses


def run(
    pool: RankPool, plan: Plan, changes: Changes = (), folder: Path | None = None
) -> list[Told]:
    """What every rank of the job tells."""
    told: list[Told] = pool.run(
        train,
        len(plan.ranks),
        config=CONFIG,
        plan=plan,
        steps=STEPS,
        changes=changes,
        folder=folder,
    )
    return told


def check_changes(told: list[Told], plan: Plan, changes: Changes) -> None:
    """Every change was committed, kept all bits of all planes and moved just what was missing."""
    plans = [plan, *(new for _, new in changes)]
    assert len(changes) == len(told[0].changes)
    for n in range(len(changes)):
        old, new = plans[n], plans[n + 1]
        for plane in range(PLANES):
            before = assemble(old, UNITS, [t.changes[n][0][plane] for t in told])
            after = assemble(new, UNITS, [t.changes[n][1][plane] for t in told])
            for replica in after:
                assert is_equal(before[0], replica), f"change {n}, plane {plane}"
        end = calls_of(told[0].calls, "change_end")[n]
        assert (new.with_epoch(n + 2).epoch, ChangeStatus.COMMITTED) == end[:2]
        assert bytes_missing(old, new) == end[2]
    for t in told:
        assert (plans[-1].digest, 1 + len(changes)) == (t.digest, t.epoch)


def bytes_missing(old: Plan, new: Plan) -> int:
    """Bytes of the new plan that their ranks do not hold under the old one, all planes."""
    total = 0
    for t in UNITS.tensors:
        line = t.numel // t.shape[t.dim]
        for g in new.ranks:
            missing = set(places_of(new, t, g)) - set(places_of(old, t, g))
            total += len(missing) * line
    return total * PLANES * FLOAT_BYTES


def assert_close(expected: list[float], actual: list[float]) -> None:
    """The losses are those of the other job but for rounding."""
    assert pytest.approx(expected, rel=LOSS_TOLERANCE) == actual


def test_change_several_in_a_row_and_back_keeps_state_and_losses(
    rank_pool: RankPool, unchanged: list[float], tmp_path: Path
) -> None:
    """Shares go away from even, further, and back; each change moves the fewest bytes."""
    first = even(GROUPED, (2, 1), (3, 3))
    whole = {A: (6,), M: (12,), V: (12,)}
    second = reshared(first, [{A: (5, 1), M: (4, 8), V: (9, 3)}, whole])
    third = reshared(second, [{A: (2, 4), M: (12, 0), V: (0, 12)}, whole])
    back = reshared(third, [{A: (3, 3), M: (6, 6), V: (6, 6)}, whole])
    changes = ((2, second), (3, third), (4, back))
    told = run(rank_pool, first, changes, tmp_path)
    check_changes(told, first, changes)
    for *_, moved, bound, _ in calls_of(told[0].calls, "change_end"):
        assert bound == moved
    assert_close(unchanged, told[0].losses)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_change_between_random_layouts_keeps_state_and_losses(
    rank_pool: RankPool, unchanged: list[float], tmp_path: Path, seed: int
) -> None:
    """From any scattered layout to any other, replicas of unequal degree."""
    draw = random.Random(seed)
    plans = [scattered(draw, GROUPED, (3, 2), (3, 3)) for _ in range(3)]
    changes = ((2, plans[1]), (4, plans[2]))
    told = run(rank_pool, plans[0], changes, tmp_path)
    check_changes(told, plans[0], changes)
    assert_close(unchanged, told[0].losses)


def test_change_batch_shares_moves_nothing_and_keeps_losses(
    rank_pool: RankPool, unchanged: list[float], tmp_path: Path
) -> None:
    """A replica may take more of the same global batch; no byte of state moves for it."""
    first = even(GROUPED, (2, 1), (5, 1))
    changes = ((3, even(GROUPED, (2, 1), (2, 4))),)
    told = run(rank_pool, first, changes, tmp_path)
    check_changes(told, first, changes)
    assert [moved for _, _, moved, _, _ in calls_of(told[0].calls, "change_end")] == [0]
    assert_close(unchanged, told[0].losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degrees", [(2,), (2, 1)], ids=["2", "2+1"])
def test_change_rank_gets_its_first_units_of_a_kind(
    rank_pool: RankPool, unchanged: list[float], tmp_path: Path, kind: str, degrees: tuple[int, ...]
) -> None:
    """A rank that had no head, column or row before goes on as if it always had them."""
    halves = {A: (3, 3), M: (6, 6), V: (6, 6)}
    whole = [{A: (6,), M: (12,), V: (12,)}] * (len(degrees) - 1)
    lacking = {k: (sum(v), 0) if k == kind else v for k, v in halves.items()}
    batches = (6,) if degrees == (2,) else (3, 3)
    first = plan_of(GROUPED, [lacking, *whole], batches)
    changes = ((3, reshared(first, [halves, *whole])),)
    told = run(rank_pool, first, changes, tmp_path)
    check_changes(told, first, changes)
    assert_close(unchanged, told[0].losses)


def test_change_ranks_move_between_replicas(
    rank_pool: RankPool, unchanged: list[float], tmp_path: Path
) -> None:
    """3 + 2 ranks become 2 + 3: a rank serves another replica, with another group."""
    first = even(GROUPED, (3, 2), (3, 3))
    changes = ((2, even(GROUPED, (2, 3), (3, 3))), (4, first))
    told = run(rank_pool, first, changes, tmp_path)
    check_changes(told, first, changes)
    assert_close(unchanged, told[0].losses)


def test_change_number_of_replicas(
    rank_pool: RankPool, unchanged: list[float], tmp_path: Path
) -> None:
    """Two replicas become three, then one, then two in another order of ranks."""
    first = even(GROUPED, (2, 1), (3, 3))
    layouts = [
        {k: Layout.contiguous((n,)) for k, n in UNITS.counts.items()},
        {k: Layout.contiguous((0, n)) for k, n in UNITS.counts.items()},
    ]
    turned = Plan.build(
        UNITS.counts,
        [
            ReplicaPlan(ranks=(2,), layouts=layouts[0], batch=1),
            ReplicaPlan(ranks=(1, 0), layouts=layouts[1], batch=5),
        ],
    )
    plans = (even(GROUPED, (1, 1, 1), (2, 2, 2)), even(GROUPED, (3,), (6,)), turned)
    changes = tuple(zip((2, 3, 4), plans, strict=True))
    told = run(rank_pool, first, changes, tmp_path)
    check_changes(told, first, changes)
    assert_close(unchanged, told[0].losses)


def test_change_is_told_in_order_on_every_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    """Begin, quiesce, regroup, transfer, verify, resume, end, and the new plan, on each rank."""
    first = even(GROUPED, (2, 1), (3, 3))
    new = reshared(first, [{A: (5, 1), M: (4, 8), V: (9, 3)}, {A: (6,), M: (12,), V: (12,)}])
    told = run(rank_pool, first, ((3, new),), tmp_path)
    expected = [
        ChangePhase.QUIESCE,
        ChangePhase.REGROUP,
        ChangePhase.TRANSFER,
        ChangePhase.VERIFY,
        ChangePhase.RESUME,
    ]
    for t in told:
        begin = (2, Reason.OPERATOR, first.digest, new.digest, 3)
        assert [begin] == calls_of(t.calls, "change_begin")
        phases = calls_of(t.calls, "change_phase")
        assert expected == [phase for _, phase, *_ in phases]
        for (_, _, begin_ns, end_ns, _), after in pairwise(phases):
            assert begin_ns <= end_ns <= after[2]
        assert [(1, first.digest), (2, new.digest)] == [
            call[:2] for call in calls_of(t.calls, "plan")
        ]
    received = [c[4] for t in told for c in calls_of(t.calls, "change_phase") if c[1] == 5]
    assert bytes_missing(first, new) == sum(received)


@pytest.mark.parametrize("damage", [bodies_change.flip_bit, bodies_change.lose_end])
@pytest.mark.parametrize("rank", [0, 1])
def test_change_damaged_in_flight_is_rolled_back(
    rank_pool: RankPool, tmp_path: Path, damage: bodies_change.Damage, rank: int
) -> None:
    """Bytes that arrive wrong or not at all: plan A stays on all ranks, not a bit is lost."""
    first = even(GROUPED, (2, 1), (3, 3))
    new = reshared(first, [{A: (2, 4), M: (8, 4), V: (9, 3)}, {A: (6,), M: (12,), V: (12,)}])
    plain = run(rank_pool, first)
    answers = rank_pool.run(
        bodies_change.train_with_damage,
        3,
        config=CONFIG,
        plan=first,
        steps=STEPS,
        changes=((2, new),),
        folder=tmp_path,
        rank=rank,
        damage=damage,
        times=MAX_TRIES,
    )
    told = [t for t, _ in answers]
    assert sum(damaged for _, damaged in answers) == MAX_TRIES, "the fault fired"
    for t, p in zip(told, plain, strict=True):
        assert (first.digest, 1) == (t.digest, t.epoch)
        (end,) = calls_of(t.calls, "change_end")
        assert end[1] == ChangeStatus.ROLLED_BACK
        assert calls_of(t.calls, "change_phase")[-1][1] == ChangePhase.ROLLBACK
        assert p.losses == t.losses
        assert all(is_equal(a, b) for a, b in zip(*t.changes[0], strict=True))


def test_change_after_a_rollback_is_committed(rank_pool: RankPool, tmp_path: Path) -> None:
    """A damaged transfer leaves nothing behind that the next try would trip over."""
    first = even(GROUPED, (2, 1), (3, 3))
    new = reshared(first, [{A: (2, 4), M: (8, 4), V: (9, 3)}, {A: (6,), M: (12,), V: (12,)}])
    answers = rank_pool.run(
        bodies_change.train_with_damage,
        3,
        config=CONFIG,
        plan=first,
        steps=STEPS,
        changes=((2, new), (3, new)),
        folder=tmp_path,
        rank=1,
        damage=bodies_change.flip_bit,
        times=MAX_TRIES,
    )
    for told, _ in answers:
        assert (new.digest, 2) == (told.digest, told.epoch)


@pytest.mark.parametrize("damage", [bodies_change.flip_bit, bodies_change.lose_end])
def test_change_damaged_once_is_fetched_again(
    rank_pool: RankPool, tmp_path: Path, damage: bodies_change.Damage
) -> None:
    """What came wrong comes again, from other holders where there are; then it is verified."""
    first = even(GROUPED, (2, 1), (3, 3))
    new = reshared(first, [{A: (2, 4), M: (8, 4), V: (9, 3)}, {A: (6,), M: (12,), V: (12,)}])
    plain = run(rank_pool, first, ((2, new),), tmp_path)
    answers = rank_pool.run(
        bodies_change.train_with_damage,
        3,
        config=CONFIG,
        plan=first,
        steps=STEPS,
        changes=((2, new),),
        folder=tmp_path,
        rank=1,
        damage=damage,
        times=1,
    )
    assert sum(damaged for _, damaged in answers) == 1, "the fault fired"
    for (told, _), p in zip(answers, plain, strict=True):
        (end,) = calls_of(told.calls, "change_end")
        assert end[1] == ChangeStatus.COMMITTED
        assert end[3] < end[2] <= 2 * end[3], "moved twice, but for what was lost"
        assert (new.digest, 2) == (told.digest, told.epoch)
        assert p.losses == told.losses


@pytest.mark.parametrize("case", ["plan", "step"])
def test_change_ranks_that_disagree_all_refuse(rank_pool: RankPool, case: str) -> None:
    """One rank with another plan or step: every rank raises, none hangs, the job can go on."""
    first = even(GROUPED, (2, 1), (3, 3))
    whole = {A: (6,), M: (12,), V: (12,)}
    new = reshared(first, [{A: (5, 1), M: (4, 8), V: (9, 3)}, whole])
    other = reshared(first, [{A: (4, 2), M: (4, 8), V: (9, 3)}, whole])
    answers = rank_pool.run(
        bodies_change.disagree,
        3,
        config=CONFIG,
        plan=first,
        wanted=[new, other if case == "plan" else new, new],
        steps_ahead=[0, 0, 1 if case == "step" else 0],
    )
    plain = run(rank_pool, first)[0].losses[:2]
    for message, losses in answers:
        assert "ranks do not stand at the same step and plan" in message
        assert plain == losses
