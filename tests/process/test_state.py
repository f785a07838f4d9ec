"""Masters, dealt optimizer state, micro-batches, dropout and recomputation on real ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ntp_core.job import TrainConfig
from ntp_core.observe import ChangeStatus, Op
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits
from tests.support import bodies_checkpoint, bodies_state
from tests.support.bodies_state import Told, train
from tests.support.dense_llama import DenseTrainer
from tests.support.dense_masters import DenseMasters
from tests.support.logical import assemble, is_equal, largest_difference, rms_difference
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of
from tests.support.tiny_job import (
    GROUPED,
    A,
    M,
    V,
    even,
    plan_of,
    reshared,
    scattered,
    text_for,
    train_config,
)
from tests.support.whole_files import manifest_body

STEPS = 6
LOSS_TOLERANCE = 1e-6  # relative, float32
PARAM_TOLERANCE = 2e-5  # absolute; a step is at most 3e-3
BF16_TOLERANCE = 5e-3  # relative; a bfloat16 has 8 bits
UNITS: ModelUnits = GROUPED.units()
UNEVEN = scattered(random.Random(2), GROUPED, (2, 1), (2, 4))
EMPTY = plan_of(
    GROUPED,
    [{A: (0, 6), M: (5, 7), V: (12, 0)}, {A: (6,), M: (12,), V: (12,)}],
    (2, 4),
)
THREE = scattered(random.Random(4), GROUPED, (2, 1, 1), (2, 1, 3))


def run(pool: RankPool, config: TrainConfig, plan: Plan, **more: object) -> list[Told]:
    """What every rank tells."""
    told: list[Told] = pool.run(
        train, len(plan.ranks), config=config, plan=plan, steps=STEPS, **more
    )
    return told


def check_replicas(told: list[Told], plan: Plan) -> None:
    """After each step all replicas hold the same bits, and losses and norms are one."""
    for step in range(STEPS):
        replicas = assemble(plan, UNITS, [_bits(t.params[step]) for t in told])
        assert all(is_equal(replicas[0], r) for r in replicas[1:]), f"step {step + 1}"
    for t in told:
        assert (t.losses, t.norms) == (told[0].losses, told[0].norms)


def _bits(local: bodies_state.Local) -> bodies_state.Local:
    return {n: t.float() for n, t in local.items()}  # exact: every bfloat16 is a float32


@pytest.mark.parametrize("grads", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", [UNEVEN, EMPTY, THREE], ids=["2+1", "empty", "2+1+1"])
def test_masters_replicas_agree_and_parameters_are_masters_rounded(
    rank_pool: RankPool, plan: Plan, grads: str
) -> None:
    """bfloat16 trains like the whole model in bfloat16, at any layout, in either sum."""
    config = train_config(param_dtype="bfloat16", grad_dtype=grads)
    told = run(rank_pool, config, plan)
    check_replicas(told, plan)
    assert [t.wrong for t in told] == [0] * len(told)
    oracle = DenseMasters(config, text_for(config))
    losses = [oracle.train_step(6) for _ in range(STEPS)]
    assert pytest.approx(losses, rel=BF16_TOLERANCE) == told[0].losses
    masters = assemble(plan, UNITS, [t.planes[1] for t in told])
    start, end = (
        {n: m.detach() for n, m in whole.masters.items()}
        for whole in (DenseMasters(config, text_for(config)), oracle)
    )
    assert all(rms_difference(m, end) < 0.2 * rms_difference(start, end) for m in masters)
    assert all(is_equal(masters[0], m) for m in masters[1:])


def test_parameter_that_is_not_its_master_is_named(rank_pool: RankPool) -> None:
    """One bit changed at rest shows without another replica, with the tensor's name."""
    config = train_config(param_dtype="bfloat16")
    for found in rank_pool.run(bodies_state.spoil, 3, config=config, plan=UNEVEN):
        assert found[0] == {}
        assert found[1] in ({}, {"layers.0.q.weight": 1})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", [UNEVEN, EMPTY, THREE], ids=["2+1", "empty", "2+1+1"])
def test_zero_has_the_bits_of_the_unsharded_optimizer(
    rank_pool: RankPool, plan: Plan, dtype: str
) -> None:
    """Every parameter after every step; the job holds the state once instead of once a replica."""
    plain = run(rank_pool, train_config(param_dtype=dtype), plan)
    dealt = run(rank_pool, train_config(param_dtype=dtype, zero=True), plan)
    check_replicas(dealt, plan)
    assert [t.wrong for t in dealt] == [0] * len(dealt)
    for a, b in zip(plain, dealt, strict=True):
        assert (a.losses, a.norms) == (b.losses, b.norms)
        assert all(is_equal(_bits(x), _bits(y)) for x, y in zip(a.params, b.params, strict=True))
    planes = 2 if dtype == "float32" else 3
    assert sum(t.state_bytes for t in dealt) == 4 * planes * sum(t.numel for t in UNITS.tensors)
    assert all(d.state_bytes < p.state_bytes for d, p in zip(dealt, plain, strict=True))


def test_zero_with_one_replica_exchanges_nothing(rank_pool: RankPool) -> None:
    """The same collectives as without, and the same bits."""
    plan = even(GROUPED, (2,), (4,))
    plain = run(rank_pool, train_config(), plan)
    dealt = run(rank_pool, train_config(zero=True), plan)
    for a, b in zip(plain, dealt, strict=True):
        assert a.losses == b.losses
        begins = (calls_of(t.calls, "collective_begin") for t in (a, b))
        first, second = ([(op, n) for op, _, _, n in calls] for calls in begins)
        assert first == second


def test_zero_sends_each_block_to_each_other_holder_once(rank_pool: RankPool) -> None:
    """Bytes of the exchange: the parameters, for every replica but the keeper's."""
    told = run(rank_pool, train_config(zero=True), even(GROUPED, (1, 1), (3, 3)))
    sent = sum(
        n
        for t in told
        for op, _, _, n in calls_of(t.calls, "collective_begin")
        if op == Op.ALL_TO_ALL
    )
    sizes = 2 * 2 * 8  # first every rank tells each other how much comes, in 8 bytes
    assert sent == STEPS * (4 * sum(t.numel for t in UNITS.tensors) + sizes)


@pytest.mark.parametrize(
    "settings",
    [{"zero": True}, {"param_dtype": "bfloat16"}, {"param_dtype": "bfloat16", "zero": True}],
    ids=["zero", "masters", "masters-zero"],
)
def test_change_carries_every_plane(
    rank_pool: RankPool, tmp_path: Path, settings: dict[str, object]
) -> None:
    """Shares, degrees and the number of replicas change: what is saved stays, bit by bit."""
    config = train_config(**settings)
    changes = (
        reshared(UNEVEN, [{A: (1, 5), M: (12, 0), V: (4, 8)}, {A: (6,), M: (12,), V: (12,)}]),
        even(GROUPED, (3,), (6,)),
        even(GROUPED, (1, 1, 1), (2, 2, 2)),
        UNEVEN,
    )
    told = rank_pool.run(
        bodies_checkpoint.change_between_saves,
        3,
        config=config,
        plan=UNEVEN,
        changes=changes,
        folder=tmp_path / "job",
    )
    losses, paths = told[0]
    for before, after in zip(paths[::2], paths[1::2], strict=True):
        a, b = manifest_body(Path(before)), manifest_body(Path(after))
        assert a["plan_digest"] != b["plan_digest"]
        assert [_prints(p) for p in a["planes"]] == [_prints(p) for p in b["planes"]]
    steady = run(rank_pool, config, UNEVEN)[0].losses
    rel = LOSS_TOLERANCE if config.param_dtype == "float32" else BF16_TOLERANCE
    assert pytest.approx(steady[: len(losses)], rel=rel) == losses
    assert all(losses == other for other, _ in told)


def _prints(plane: dict[str, list[dict[str, str]]]) -> list[str]:
    return [t["fingerprints"] for t in plane["tensors"]]


def test_change_of_shares_moves_dealt_state_only_with_its_units(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """State whose keeper gives no units away stays; what moved is what had to, told as such."""
    config = train_config(zero=True)
    new = reshared(UNEVEN, [{A: (1, 5), M: (12, 0), V: (4, 8)}, {A: (6,), M: (12,), V: (12,)}])
    told = run(rank_pool, config, UNEVEN, changes=((3, new),), folder=tmp_path)
    (end,) = calls_of(told[0].calls, "change_end")
    assert end[1] == ChangeStatus.COMMITTED
    assert end[2] == end[3] > 0
    plain = run(rank_pool, train_config(), UNEVEN, changes=((3, new),), folder=tmp_path)
    (whole,) = calls_of(plain[0].calls, "change_end")
    assert end[2] < 0.8 * whole[2], "half of the moments are kept by the replica that stays"
    check_replicas_last(told, new)
    assert [t.losses for t in plain] == [t.losses for t in told]


def check_replicas_last(told: list[Told], plan: Plan) -> None:
    """The last step's replicas hold the same bits."""
    replicas = assemble(plan, UNITS, [t.params[-1] for t in told])
    assert all(is_equal(replicas[0], r) for r in replicas[1:])


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_add_up_to_one_batch(rank_pool: RankPool, size: int) -> None:
    """Losses and norms are those of the whole batch, and of the dense oracle."""
    config = train_config(micro_batch=size)
    told = run(rank_pool, config, UNEVEN)
    whole = run(rank_pool, train_config(), UNEVEN)
    check_replicas(told, UNEVEN)
    assert pytest.approx(whole[0].losses, rel=LOSS_TOLERANCE) == told[0].losses
    assert pytest.approx(whole[0].norms, rel=1e-5) == told[0].norms
    oracle = DenseTrainer(config, text_for(config), torch.float64)
    losses = [oracle.train_step(6) for _ in range(STEPS)]
    assert pytest.approx(losses, rel=LOSS_TOLERANCE) == told[0].losses


@pytest.mark.parametrize("plan", [UNEVEN, EMPTY, THREE], ids=["2+1", "empty", "2+1+1"])
def test_recompute_keeps_every_bit_and_all_ranks_in_step(rank_pool: RankPool, plan: Plan) -> None:
    """Each layer's two sums run once more in backward, on all ranks of a replica in one order."""
    plain = run(rank_pool, train_config(), plan)
    told = run(rank_pool, train_config(recompute=True), plan)
    for a, b in zip(plain, told, strict=True):
        assert (a.losses, a.norms) == (b.losses, b.norms)
        assert all(is_equal(x, y) for x, y in zip(a.params, b.params, strict=True))
    for r in plan.replicas:
        if len(r.ranks) == 1:
            continue
        orders = []
        for g in r.ranks:
            before, after = (
                [c[:2] for c in calls_of(t[g].calls, "collective_begin")] for t in (plain, told)
            )
            assert len(after) - len(before) == STEPS * GROUPED.layers * 2
            orders.append([c for c in after if c in _of_replica(plan, r.ranks, told)])
        assert all(o == orders[0] for o in orders)


def _of_replica(plan: Plan, ranks: tuple[int, ...], told: list[Told]) -> set[tuple[int, int]]:
    """(op, group) of collectives that only these ranks take part in."""
    mine = [{c[:2] for c in calls_of(told[g].calls, "collective_begin")} for g in ranks]
    rest = [
        {c[:2] for c in calls_of(told[g].calls, "collective_begin")}
        for g in plan.ranks
        if g not in ranks
    ]
    return set.intersection(*mine) - set().union(*rest)


DROPPING = replace(GROUPED, dropout=0.2)
PLANS = {"1": even(GROUPED, (1,), (6,)), "2+1": UNEVEN, "empty": EMPTY, "2+1+1": THREE}


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 1}, {"micro_batch": 2}], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_dropout_is_that_of_the_whole_model_at_any_layout(
    rank_pool: RankPool, name: str, settings: dict[str, int]
) -> None:
    """The same elements of the same sequences are dropped, in whatever micro-batch they come."""
    config = train_config(DROPPING, **settings)
    told = run(rank_pool, config, PLANS[name])
    check_replicas(told, PLANS[name])
    oracle = DenseTrainer(config, text_for(config), torch.float64)
    losses = [oracle.train_step(6) for _ in range(STEPS)]
    assert pytest.approx(losses, rel=LOSS_TOLERANCE) == told[0].losses
    weights = {n: w.detach() for n, w in oracle.weights.items()}
    replica = assemble(PLANS[name], UNITS, [t.params[-1] for t in told])[0]
    assert largest_difference(weights, replica) <= PARAM_TOLERANCE
    plain = DenseTrainer(train_config(), text_for(config), torch.float64)
    without = [plain.train_step(6) for _ in range(STEPS)]
    assert max(abs(a - b) / b for a, b in zip(losses, without, strict=True)) > 1e-4, "it drops"


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_dropout_of_recomputed_layers_is_the_same(rank_pool: RankPool, micro_batch: int) -> None:
    """Run again in backward a layer drops what it dropped: no bit differs."""
    told = [
        run(rank_pool, train_config(DROPPING, micro_batch=micro_batch, recompute=r), THREE)
        for r in (False, True)
    ]
    for a, b in zip(*told, strict=True):
        assert a.losses == b.losses
        assert all(is_equal(x, y) for x, y in zip(a.params, b.params, strict=True))


def test_dropout_goes_on_through_a_change_of_plan(rank_pool: RankPool, tmp_path: Path) -> None:
    """What is dropped follows the units to their new ranks."""
    config = train_config(DROPPING)
    new = reshared(UNEVEN, [{A: (1, 5), M: (12, 0), V: (4, 8)}, {A: (6,), M: (12,), V: (12,)}])
    told = run(rank_pool, config, UNEVEN, changes=((3, new),), folder=tmp_path)
    steady = run(rank_pool, config, UNEVEN)
    assert calls_of(told[0].calls, "change_end")[0][1] == ChangeStatus.COMMITTED
    assert pytest.approx(steady[0].losses, rel=LOSS_TOLERANCE) == told[0].losses
