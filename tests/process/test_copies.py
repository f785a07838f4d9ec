"""KV heads copied to each rank that holds some of their query heads: one tensor, the same bits."""

from __future__ import annotations

import random

import pytest

from ntp_core.faults import When, flip_bit
from ntp_core.observe import Blame
from ntp_core.plan import Layout, Plan
from ntp_core.runtime.change import MAX_TRIES
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.sync.modes import SyncMode, SyncOptions
from tests.support.bodies_copies import Told, train, train_with_damage
from tests.support.copies_model import CopiesModel, DenseCopies, E, Heads, plan_of
from tests.support.logical import assemble, is_equal, largest_difference, places_of
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of

STEPS = 5
SIX = Heads(6, 3)
LOSS_TOLERANCE = 1e-6  # relative
PARAM_TOLERANCE = 2e-5  # absolute; Adam steps are 1e-2
MODES = {
    "overlap": SyncOptions(bucket_bytes=500),
    "after": SyncOptions(bucket_bytes=500, overlap=False),
    "reshard": SyncOptions(mode=SyncMode.RESHARD),
}
WHOLE = Layout.contiguous((6,))
THIRDS = Layout.of_units([[0, 3], [1, 4], [2, 5]])
HALVES = Layout.of_units([[0, 1, 5], [2, 3, 4]])
PLANS = {
    # KV head 0 or 1 lies on two ranks of the first replica, on one of the second.
    "2": plan_of(SIX, [Layout.contiguous((4, 2))], (4,)),
    "2+1": plan_of(SIX, [Layout.contiguous((2, 4)), WHOLE], (3, 1)),
    # Scattered, three holders of both KV heads; a rank without any head.
    "3+2": plan_of(SIX, [THIRDS, Layout.contiguous((0, 6))], (2, 2)),
    "2+2": plan_of(SIX, [Layout.contiguous((1, 5)), Layout.contiguous((5, 1))], (2, 2)),
    "1+1+2": plan_of(SIX, [WHOLE, WHOLE, HALVES], (2, 1, 1)),
}


@pytest.fixture(scope="module")
def dense() -> tuple[list[float], dict[str, object]]:
    """Losses and last weights of the oracle, batch 4."""
    oracle = DenseCopies(SIX)
    losses = [oracle.train_step(4) for _ in range(STEPS)]
    assert losses[-1] < losses[0]
    return losses, {n: w.detach() for n, w in oracle.weights.items()}


def run(pool: RankPool, plan: Plan, **kwargs: object) -> list[Told]:
    """What every rank tells."""
    told: list[Told] = pool.run(train, len(plan.ranks), heads=SIX, plan=plan, steps=STEPS, **kwargs)
    return told


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLANS)
def test_copies_train_like_the_whole_model(
    rank_pool: RankPool, dense: tuple[list[float], dict], name: str, mode: str
) -> None:
    """Parameters and losses are the oracle's; all copies are the same bits after each step."""
    plan = PLANS[name]
    told = run(rank_pool, plan, sync=MODES[mode])
    losses, weights = dense
    for step in range(STEPS):
        replicas = assemble(plan, SIX.units(), [t.params[step] for t in told])
        assert all(is_equal(replicas[0], r) for r in replicas[1:]), f"step {step + 1}"
    assert largest_difference(weights, replicas[0]) <= PARAM_TOLERANCE
    for t in told:
        assert pytest.approx(losses, rel=LOSS_TOLERANCE) == t.losses
        assert told[0].norms == t.norms
        assert calls_of(t.calls, "divergence") == []


def test_copies_overlap_and_micro_batches(
    rank_pool: RankPool, dense: tuple[list[float], dict]
) -> None:
    """Sums start in the last micro-batch only; overlap changes no bit of any step."""
    plan = plan_of(SIX, [Layout.contiguous((4, 2)), Layout.contiguous((1, 3, 2))], (2, 2))
    told = [run(rank_pool, plan, sync=MODES[m], micro_batches=2) for m in ("overlap", "after")]
    assert pytest.approx(dense[0], rel=LOSS_TOLERANCE) == told[0][0].losses
    for a, b in zip(*told, strict=True):
        assert a.losses == b.losses
        assert all(is_equal(x, y) for x, y in zip(a.params, b.params, strict=True))


@pytest.mark.parametrize("name", ["2", "2+1", "3+2"])
def test_copies_that_drift_at_rest_are_named_and_repaired(rank_pool: RankPool, name: str) -> None:
    """A bit of a copy on a rank that does not speak for it: named, put right, no trace left."""
    plan = PLANS[name]
    fault = flip_bit(1, "1.k", 3, 12, step=3)
    assert set(places_of(plan, SIX.units().tensor("1.k"), 0)) & set(
        places_of(plan, SIX.units().tensor("1.k"), 1)[:1]
    ), "the flipped row is a copy"
    clean, told = run(rank_pool, plan), run(rank_pool, plan, faults=(fault,))
    ((_, *said, _),) = calls_of(told[0].calls, "divergence")
    names = [t.name for t in SIX.units().tensors]
    assert [Blame.AT_REST, 0, 1, names.index("1.k")] == said
    for a, b in zip(clean, told, strict=True):
        assert a.losses == b.losses
        assert all(is_equal(x, y) for x, y in zip(a.params, b.params, strict=True))


def test_copies_that_drift_after_a_step_are_named_by_majority(rank_pool: RankPool) -> None:
    """All holders vote, those of one replica too: three of four outvote the one."""
    plan = PLANS["3+2"]
    fault = flip_bit(2, "0.v", 0, 9, step=2, when=When.AFTER_OPTIMIZER)
    told = run(rank_pool, plan, faults=(fault,))
    said = [call[1:4] for call in calls_of(told[0].calls, "divergence")]
    assert said == [(Blame.MAJORITY, 0, 2)]
    for step in range(2, STEPS):
        replicas = assemble(plan, SIX.units(), [t.params[step] for t in told])
        assert is_equal(*replicas), f"step {step + 1}"


@pytest.mark.parametrize("mode", ["overlap", "reshard"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_copies_follow_their_query_heads_in_a_change(
    rank_pool: RankPool, dense: tuple[list[float], dict], seed: int, mode: str
) -> None:
    """A rank that gets a head gets its KV head, and nothing that it has already; losses go on."""
    draw = random.Random(seed)

    def layout(degree: int) -> Layout:
        of_unit = [draw.randrange(degree) for _ in range(6)]
        return Layout.of_units([[u for u in range(6) if of_unit[u] == i] for i in range(degree)])

    plans = [plan_of(SIX, [layout(2), layout(3)], (2, 2)) for _ in range(3)]
    changes = ((2, plans[1]), (4, plans[2]))
    told = run(rank_pool, plans[0], changes=changes, sync=MODES[mode])
    assert pytest.approx(dense[0], rel=LOSS_TOLERANCE) == told[0].losses
    assert all(t.changed == [True, True] for t in told)
    for step in range(STEPS):
        plan = plans[(step >= 1) + (step >= 3)]
        replicas = assemble(plan, SIX.units(), [t.params[step] for t in told])
        assert is_equal(*replicas)
    for n, end in enumerate(calls_of(told[0].calls, "change_end")):
        missing = 0
        for t in SIX.units().tensors:
            for g in plans[0].ranks:
                new, old = (set(places_of(p, t, g)) for p in (plans[n + 1], plans[n]))
                missing += len(new - old) * (t.numel // t.shape[t.dim])
        assert missing * 3 * 4 == end[2], "three planes of four bytes"


def test_copies_damaged_in_flight_are_rolled_back(rank_pool: RankPool) -> None:
    """A wrong bit in a copy that no rank speaks for is found like any other."""
    first = plan_of(SIX, [Layout.contiguous((3, 3)), WHOLE], (2, 2))
    new = plan_of(SIX, [Layout.of_units([[0, 1, 2, 4], [3, 5]]), WHOLE], (2, 2))
    # Rank 0 gets head 4 and with it a copy of KV head 1; rank 1 speaks for that one.
    kv = SIX.units().tensor("0.k")
    assert len(places_of(new, kv, 0)) == 2 * len(places_of(first, kv, 0))
    start = CopiesModel(SIX, TensorParallelGroup(Comm(0, 1), (0,)), plan_of(SIX, [WHOLE], (1,)), 0)
    copy = start.weights[start.names.index("0.k")].detach()[E:]
    answers = rank_pool.run(
        train_with_damage,
        3,
        heads=SIX,
        plan=first,
        steps=2,
        changes=((1, new),),
        rank=0,
        target=copy.contiguous().numpy().tobytes(),
    )
    assert [damaged for _, damaged in answers] == [MAX_TRIES, 0, 0]
    assert all(told.changed == [False] for told, _ in answers)
