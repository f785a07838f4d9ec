"""Sums of several element types in one job, frozen tensors, and low precision in both modes."""

from __future__ import annotations

import random

import pytest
import torch

from ntp_core.elements import Elements
from ntp_core.paper_sync import reshard_traffic
from ntp_core.plan import Plan
from ntp_core.runtime.sync.modes import SyncMode, SyncOptions
from ntp_core.traffic import least_bytes, segment_traffic
from tests.support import bodies_grad
from tests.support.bodies_state import Told, train
from tests.support.logical import Whole, assemble, cut, is_equal
from tests.support.rank_pool import RankPool
from tests.support.tiny_job import GROUPED, A, M, V, even, plan_of, scattered, train_config

UNITS = GROUPED.units()
SMALL = SyncOptions(bucket_bytes=2000)
RESHARD = SyncOptions(mode=SyncMode.RESHARD)
STEPS = 5
BF16_TOLERANCE = 5e-3  # relative; a bfloat16 has 8 bits
FROZEN = ("layers.0.k.weight", "layers.1.mlp_norm.weight", "layers.1.down.weight")


def type_of(index: int) -> torch.dtype:
    """Gains and every second matrix are float32."""
    t = UNITS.tensors[index]
    return torch.float32 if len(t.shape) == 1 or index % 2 else torch.bfloat16


def grads_of(plan: Plan, types: list[torch.dtype]) -> list[Whole]:
    """Small whole numbers, whose sums are exact in every type; by rank."""
    generator = torch.Generator().manual_seed(5)
    by_replica = [
        {
            t.name: torch.randint(-9, 9, t.shape, generator=generator).to(dtype)
            for t, dtype in zip(UNITS.tensors, types, strict=True)
        }
        for _ in plan.replicas
    ]
    return [cut(plan, UNITS, g, by_replica[plan.place(g)[0]]) for g in plan.ranks]


def whole_sum(plan: Plan, grads: list[Whole]) -> Whole:
    """The dense sum over replicas, in float32."""
    replicas = assemble(plan, UNITS, [{n: g.float() for n, g in x.items()} for x in grads])
    return {n: sum(r[n] for r in replicas) for n in replicas[0]}


@pytest.mark.parametrize("degrees", [(3, 2), (2, 1, 2)], ids=str)
def test_sums_of_mixed_types_send_the_bytes_of_each(
    rank_pool: RankPool, degrees: tuple[int, ...]
) -> None:
    """bfloat16 matrices beside float32 ones: each sum has one type; the bytes are the bound."""
    types = [type_of(i) for i in range(len(UNITS.tensors))]
    elements = Elements.named([str(d).removeprefix("torch.") for d in types])
    plans = [scattered(random.Random(s), GROUPED, degrees) for s in range(3)]
    grads = [grads_of(plan, types) for plan in plans]
    answers = rank_pool.run(
        bodies_grad.sync, sum(degrees), model=UNITS, plans=plans, grads=grads, options=SMALL
    )
    for i, plan in enumerate(plans):
        traffic = segment_traffic(plan, UNITS, SMALL.bucket_bytes, elements)
        bound = least_bytes(plan, UNITS, elements)
        assert bound != least_bytes(plan, UNITS), "types matter"
        for rank, answer in enumerate(answers):
            assert bound[rank] == traffic[rank].num_bytes == sum(answer[i].sums)
            assert traffic[rank].collectives == len(answer[i].sums)
            held = zip(UNITS.tensors, types, strict=True)
            assert all(answer[i].grads[t.name].dtype == dtype for t, dtype in held)
        local = [{n: g.float() for n, g in a[i].grads.items()} for a in answers]
        expected = whole_sum(plan, grads[i])
        assert all(is_equal(expected, replica) for replica in assemble(plan, UNITS, local))


@pytest.mark.parametrize("options", [SMALL, RESHARD], ids=["segments", "reshard"])
def test_frozen_tensors_are_not_summed_and_cost_nothing(
    rank_pool: RankPool, options: SyncOptions
) -> None:
    """They get no gradient, so that no optimizer decays them; the rest is summed as ever."""
    plan = scattered(random.Random(3), GROUPED, (3, 2))
    types = [torch.float32] * len(UNITS.tensors)
    grads = grads_of(plan, types)
    answers = rank_pool.run(
        bodies_grad.sync,
        5,
        model=UNITS,
        plans=[plan],
        grads=[grads],
        options=options,
        frozen=FROZEN,
    )
    elements = Elements.named([None if t.name in FROZEN else "float32" for t in UNITS.tensors])
    traffic = segment_traffic(plan, UNITS, options.bucket_bytes, elements)
    if options.mode is SyncMode.RESHARD:
        traffic = reshard_traffic(plan, UNITS, elements)
    for rank, (answer,) in enumerate(answers):
        assert traffic[rank].num_bytes == sum(answer.sums) + sum(answer.exchanges)
        assert traffic[rank].collectives == len(answer.sums) + len(answer.exchanges)
        assert set(FROZEN) <= answer.without
    expected = whole_sum(plan, grads)
    expected |= {n: torch.zeros_like(expected[n]) for n in FROZEN}
    for replica in assemble(plan, UNITS, [a[0].grads for a in answers]):
        assert is_equal(expected, replica)


def bits(local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exact in float32."""
    return {n: t.float() for n, t in local.items()}


@pytest.mark.parametrize("grads", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
def test_masters_train_alike_in_both_modes(rank_pool: RankPool, grads: str, *, zero: bool) -> None:
    """bfloat16 with float32 masters: replicas are one at every step, whichever way they sum."""
    config = train_config(param_dtype="bfloat16", grad_dtype=grads, zero=zero)
    plan = scattered(random.Random(6), GROUPED, (3, 2), (3, 2))
    told: dict[SyncMode, list[Told]] = {}
    for options in (SMALL, RESHARD):
        told[options.mode] = rank_pool.run(
            train, 5, config=config, plan=plan, steps=STEPS, sync=options
        )
        of_mode = told[options.mode]
        assert [t.wrong for t in of_mode] == [0] * 5, "a parameter is its master rounded"
        assert all((t.losses, t.norms) == (of_mode[0].losses, of_mode[0].norms) for t in of_mode)
        for step in range(STEPS):
            first, second = assemble(plan, UNITS, [bits(t.params[step]) for t in of_mode])
            assert is_equal(first, second), f"{options.mode}, step {step + 1}"
        masters = assemble(plan, UNITS, [t.planes[1] for t in of_mode]) if not zero else []
        assert all(is_equal(masters[0], other) for other in masters[1:])
    ours, papers = told[SyncMode.SEGMENTS][0], told[SyncMode.RESHARD][0]
    # Two numbers have one sum in either order: with two replicas no bit may differ.
    assert ours.losses == papers.losses
    assert pytest.approx(ours.norms, rel=1e-12) == papers.norms


def test_masters_of_three_replicas_train_alike_within_rounding(rank_pool: RankPool) -> None:
    """Three numbers do not have one sum; all replicas have the same one all the same."""
    config = train_config(param_dtype="bfloat16", grad_dtype="bfloat16")
    plan = even(GROUPED, (2, 1, 2), (2, 1, 3))
    losses = {}
    for options in (SMALL, RESHARD):
        told = rank_pool.run(train, 5, config=config, plan=plan, steps=STEPS, sync=options)
        for step in range(STEPS):
            replicas = assemble(plan, UNITS, [bits(t.params[step]) for t in told])
            assert all(is_equal(replicas[0], r) for r in replicas[1:])
        losses[options.mode] = told[0].losses
    assert pytest.approx(losses[SyncMode.SEGMENTS], rel=BF16_TOLERANCE) == losses[SyncMode.RESHARD]


def test_reshard_of_lanes_without_units_sums_what_there_is(rank_pool: RankPool) -> None:
    """A rank of the smallest replica may hold no unit: its lane has nothing to sum."""
    shares = {A: (6, 0), M: (12, 0), V: (12, 0)}
    plan = plan_of(GROUPED, [shares, {A: (1, 5), M: (5, 7), V: (12, 0)}])
    grads = grads_of(plan, [torch.float32] * len(UNITS.tensors))
    answers = rank_pool.run(
        bodies_grad.sync, 4, model=UNITS, plans=[plan], grads=[grads], options=RESHARD
    )
    traffic = reshard_traffic(plan, UNITS)
    for rank, (answer,) in enumerate(answers):
        assert traffic[rank].collectives == len(answer.sums) + len(answer.exchanges)
        assert traffic[rank].num_bytes == sum(answer.sums) + sum(answer.exchanges)
    expected = whole_sum(plan, grads)
    assert all(is_equal(expected, r) for r in assemble(plan, UNITS, [a[0].grads for a in answers]))
