"""Bits that change in a rank's memory: named, put right, and never built upon."""

from __future__ import annotations

import pytest

from ntp_core.faults import Fault, FaultKind, When, flip_bit, kill_at
from ntp_core.observe import Blame, ChangeStatus, Reason
from ntp_core.plan import Plan
from tests.support.bodies_train import Told, train
from tests.support.logical import assemble, is_equal
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of
from tests.support.tiny_job import GROUPED, even, train_config

STEPS = 5
TWO, THREE = even(GROUPED, (2, 1), (3, 3)), even(GROUPED, (2, 1, 1), (2, 2, 2))
CONFIG = train_config(GROUPED)
UNITS = GROUPED.units()
NAMES = [t.name for t in UNITS.tensors]
CUT_ROWS, CUT_COLUMNS, WHOLE = "layers.0.q.weight", "layers.1.down.weight", "norm.weight"
BEFORE_CHECK = (When.STEP_BEGIN, When.AFTER_FORWARD, When.AFTER_BACKWARD)


def run(pool: RankPool, plan: Plan, faults: tuple[Fault, ...] = ()) -> list[Told]:
    """What every rank of the job tells."""
    told: list[Told] = pool.run(
        train, len(plan.ranks), config=CONFIG, plan=plan, steps=STEPS, faults=faults
    )
    return told


@pytest.fixture(scope="module")
def clean(rank_pool: RankPool) -> dict[str, list[Told]]:
    """The same jobs without a fault, by digest of the plan."""
    return {plan.digest: run(rank_pool, plan) for plan in (TWO, THREE)}


def check_repaired(
    told: list[Told], clean: list[Told], plan: Plan, faults: tuple[Fault, ...], blame: Blame
) -> None:
    """Each fault fired, its rank was named and repaired, and the run equals the clean one."""
    for rank, (t, c) in enumerate(zip(told, clean, strict=True)):
        fired = [f for f in faults if f.rank == rank]
        assert len(fired) == len(calls_of(t.calls, "fault_injected"))
        assert c.losses == t.losses
        assert c.norms == t.norms
        assert all(is_equal(a, b) for a, b in zip(c.params, t.params, strict=True))
        assert (plan.digest, 1 + len(faults)) == (t.digest, t.epoch)
        assert len(faults) == sum(t.redone)
    said = [call[1:5] for call in calls_of(told[0].calls, "divergence")]
    expected = [(blame, plan.place(f.rank)[0], f.rank, NAMES.index(f.tensor)) for f in faults]
    assert expected == said
    for t in told[1:]:
        assert calls_of(t.calls, "divergence") == [], "told once for the job"
    for begin, end in zip(
        calls_of(told[0].calls, "change_begin"),
        calls_of(told[0].calls, "change_end"),
        strict=True,
    ):
        assert begin[1] == Reason.REPAIR
        assert end[1] == ChangeStatus.COMMITTED
        assert end[2] == end[3] > 0


@pytest.mark.parametrize("plan", [TWO, THREE], ids=["2-replicas", "3-replicas"])
@pytest.mark.parametrize("when", BEFORE_CHECK)
def test_repair_flip_before_the_check_names_the_rank_at_rest(
    rank_pool: RankPool, clean: dict[str, list[Told]], plan: Plan, when: When
) -> None:
    """Any bit, in cut and in whole tensors, on any rank: named, repaired, no trace in the run."""
    last = plan.ranks[-1]
    faults = (
        flip_bit(1, CUT_ROWS, 5, 0, step=2, when=when),
        flip_bit(0, CUT_COLUMNS, 11, 31, step=3, when=when),
        flip_bit(last, WHOLE, 3, 22, step=4, when=when),
        flip_bit(last, "embed.weight", 58 * 48 - 1, 30, step=5, when=when),
    )
    told = run(rank_pool, plan, faults)
    check_repaired(told, clean[plan.digest], plan, faults, Blame.AT_REST)


@pytest.mark.parametrize("when", [When.BEFORE_OPTIMIZER, When.AFTER_OPTIMIZER])
def test_repair_flip_outside_the_watch_is_undecided_with_two_replicas(
    rank_pool: RankPool, when: When
) -> None:
    """A difference older than any note names nobody; the observer hears it, the job goes on."""
    told = run(rank_pool, TWO, (flip_bit(1, CUT_ROWS, 5, 20, step=2, when=when),))
    for t in told:
        assert len(t.losses) == STEPS
        assert (TWO.digest, 1) == (t.digest, t.epoch)
        assert sum(t.redone) == 0
        assert calls_of(t.calls, "change_begin") == []
    said = calls_of(told[0].calls, "divergence")
    assert [call[0] for call in said] == [3, 4, 5], "told at every step since"
    assert {(Blame.UNDECIDED, -1, -1, NAMES.index(CUT_ROWS))} == {call[1:5] for call in said}


@pytest.mark.parametrize("tensor", [CUT_ROWS, CUT_COLUMNS])
def test_repair_flip_after_the_optimizer_is_named_by_majority(
    rank_pool: RankPool, clean: dict[str, list[Told]], tensor: str
) -> None:
    """Noted already wrong: with three replicas the other two outvote it before the next commit."""
    fault = flip_bit(2, tensor, 7, 12, step=2, when=When.AFTER_OPTIMIZER)
    told = run(rank_pool, THREE, (fault,))
    # The copy kept after step 2 was taken before the repair: it shows the flipped bit.
    assert not is_equal(clean[THREE.digest][2].params[1], told[2].params[1])
    told[2].params[1] = clean[THREE.digest][2].params[1]
    check_repaired(told, clean[THREE.digest], THREE, (fault,), Blame.MAJORITY)


def test_repair_flip_in_whole_tensor_is_named_by_majority_of_ranks(
    rank_pool: RankPool, clean: dict[str, list[Told]]
) -> None:
    """Every rank holds a gain, so even two replicas of 2 + 1 ranks have a majority."""
    fault = flip_bit(2, WHOLE, 0, 9, step=2, when=When.AFTER_OPTIMIZER)
    told = run(rank_pool, TWO, (fault,))
    told[2].params[1] = clean[TWO.digest][2].params[1]
    check_repaired(told, clean[TWO.digest], TWO, (fault,), Blame.MAJORITY)


def test_repair_flip_before_the_optimizer_with_three_replicas_is_repaired(
    rank_pool: RankPool,
) -> None:
    """The optimizer builds on the flipped bit once; the next check restores equal replicas."""
    fault = flip_bit(2, CUT_ROWS, 7, 12, step=2, when=When.BEFORE_OPTIMIZER)
    told = run(rank_pool, THREE, (fault,))
    said = [call[1:4] for call in calls_of(told[0].calls, "divergence")]
    assert said == [(Blame.MAJORITY, 1, 2)]
    for step in range(2, STEPS):
        replicas = assemble(THREE, UNITS, [t.params[step] for t in told])
        assert all(is_equal(replicas[0], other) for other in replicas[1:]), f"step {step + 1}"


def test_repair_two_ranks_in_one_step(rank_pool: RankPool, clean: dict[str, list[Told]]) -> None:
    """Two flips in different blocks of different ranks are both repaired in one go."""
    faults = (
        flip_bit(0, CUT_ROWS, 5, 3, step=3),
        flip_bit(2, CUT_COLUMNS, 100, 4, step=3),
    )
    told = run(rank_pool, TWO, faults)
    assert clean[TWO.digest][0].losses == told[0].losses
    assert [call[3] for call in calls_of(told[0].calls, "divergence")] == [0, 2]
    assert told[0].redone == [0, 0, 1, 0, 0]
    assert told[0].epoch == 2


def test_repair_clean_run_reports_equal_fingerprints_and_no_divergence(
    clean: dict[str, list[Told]],
) -> None:
    """Without a fault nothing is said, and each step's fingerprints agree over replicas."""
    for told in clean.values():
        values: dict[int, set[int]] = {}
        for t in told:
            assert calls_of(t.calls, "divergence") == []
            for step, _, value, _ in calls_of(t.calls, "fingerprint"):
                values.setdefault(step, set()).add(value)
        assert dict.fromkeys(range(1, STEPS + 1), 1) == {s: len(v) for s, v in values.items()}


@pytest.mark.parametrize("when", [When.STEP_BEGIN, When.AFTER_BACKWARD])
def test_fault_kill_ends_the_rank_at_that_point(rank_pool: RankPool, when: When) -> None:
    """A kill is told to the observer and takes the process away at once."""
    assert kill_at(0, 1, when).kind == FaultKind.KILL
    answers = rank_pool.run(
        train,
        1,
        expect_death={0},
        config=CONFIG,
        plan=even(GROUPED, (1,)),
        steps=2,
        faults=(kill_at(0, 2, when),),
    )
    assert answers == [None]
