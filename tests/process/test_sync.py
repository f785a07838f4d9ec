"""Gradient sync equals a dense sum over replicas, at any mix of layouts, in every mode."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from ntp_core.paper_sync import reshard_traffic
from ntp_core.plan import Plan
from ntp_core.runtime.sync.modes import SyncMode, SyncOptions
from ntp_core.traffic import least_bytes, segment_traffic
from ntp_core.units import ModelUnits, TensorSpec
from tests.support import bodies_grad
from tests.support.bodies_grad import Synced
from tests.support.logical import Whole, assemble, is_equal, places_of
from tests.support.rank_pool import RankPool
from tests.support.tiny_job import GROUPED, A, M, V, even, scattered

# What the little model lacks: fused parts on both dims, a short last block within parts, blocks
# that units share, whole tensors whose gradient is partial on each rank.
UNITS = ModelUnits(
    counts=GROUPED.units().counts,
    tensors=(
        TensorSpec(name="gain", shape=(7,)),
        TensorSpec(name="qkv", shape=(3 * 12, 4), kind=A, parts=3),
        TensorSpec(name="out", shape=(4, 12), kind=A, dim=1),
        TensorSpec(name="out_fused", shape=(4, 3 * 6), kind=A, dim=1, parts=3),
        TensorSpec(name="k", shape=(9, 4), kind=A, sharing=2),
        TensorSpec(name="kv", shape=(2 * 5, 3), kind=A, sharing=3, parts=2),
        TensorSpec(name="kv_bias", shape=(9,), kind=A, sharing=2),
        TensorSpec(name="kv_columns", shape=(3, 2 * 5), kind=A, sharing=2, dim=1, parts=2),
        TensorSpec(name="q_norm", shape=(5,), partial_grad=True),
        TensorSpec(name="gate_up", shape=(2 * 23, 3), kind=M, parts=2),
        TensorSpec(name="down", shape=(3, 23), kind=M, dim=1),
        TensorSpec(name="down_fused", shape=(3, 2 * 23), kind=M, dim=1, parts=2),
        TensorSpec(name="embed", shape=(58, 4), kind=V),
        TensorSpec(name="bias", shape=(12,), kind=A),
        TensorSpec(name="gain_2", shape=(3, 2)),
    ),
)
SMALL_BUCKETS = 200
OVERLAP = SyncOptions(overlap=True, bucket_bytes=SMALL_BUCKETS)
AFTER = SyncOptions(overlap=False, bucket_bytes=SMALL_BUCKETS)
ONE_BUCKET = SyncOptions(overlap=False)
STRAIGHT = SyncOptions(overlap=True, bucket_bytes=1)  # a bucket for each tensor
RESHARD = SyncOptions(mode=SyncMode.RESHARD)
EVERY = pytest.mark.parametrize(
    "options",
    [OVERLAP, AFTER, ONE_BUCKET, STRAIGHT, RESHARD],
    ids=["overlap", "after", "one-bucket", "straight", "reshard"],
)

Locals = list[Whole]  # by rank


def local_grads(plan: Plan, seed: int, *, exact: bool = True) -> Locals:
    """What each rank's backward gives it; whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    by_rank: Locals = [{} for _ in plan.ranks]
    for t in UNITS.tensors:
        for r in plan.replicas:
            for g in r.ranks:
                shape = list(t.shape)
                shape[t.dim] = len(places_of(plan, t, g)) if t.kind else t.shape[t.dim]
                if t.kind is None and not t.partial_grad and g != r.ranks[0]:
                    by_rank[g][t.name] = by_rank[r.ranks[0]][t.name].clone()
                    continue
                drawn = torch.randint(-1000, 1000, shape, generator=generator).float()
                by_rank[g][t.name] = 6 * drawn if exact else drawn / 7
    return by_rank


def dense_sum(plan: Plan, by_rank: Locals, unused: Sequence[Sequence[str]] = ()) -> Whole:
    """Each contribution once: cut and partial tensors from all ranks, whole ones per replica."""
    total = {t.name: torch.zeros(t.shape) for t in UNITS.tensors}
    for t in UNITS.tensors:
        for r in plan.replicas:
            for g in r.ranks:
                if unused and t.name in unused[g]:
                    continue
                grad = by_rank[g][t.name]
                if t.kind is not None:
                    places = torch.tensor(places_of(plan, t, g), dtype=torch.int64)
                    total[t.name].index_add_(t.dim, places, grad)
                elif t.partial_grad or g == r.ranks[0]:
                    total[t.name] += grad
    return total


def drawn_plans(degrees: tuple[int, ...]) -> list[Plan]:
    """Scattered layouts with holes and empty shares, and an even one."""
    plans = [scattered(random.Random(seed), GROUPED, degrees) for seed in range(3)]
    return [*plans, even(GROUPED, degrees)]


def check_sums(
    plans: list[Plan], grads: list[Locals], answers: list[list[Synced]], **changes: object
) -> None:
    """Every rank of every replica holds the dense sum."""
    for i, plan in enumerate(plans):
        expected = dense_sum(plan, grads[i], **changes)  # type: ignore[arg-type]
        replicas = assemble(plan, UNITS, [answer[i].grads for answer in answers])
        assert all(is_equal(expected, replica) for replica in replicas), f"plan {i}"


@EVERY
@pytest.mark.parametrize("degrees", [(3,), (1, 1), (3, 2), (4, 2), (2, 2, 1), (1, 2, 3)], ids=str)
def test_sync_equals_dense_sum_and_sends_what_was_counted(
    rank_pool: RankPool, degrees: tuple[int, ...], options: SyncOptions
) -> None:
    """Each gradient becomes the sum of all contributions, each once, on every holder."""
    plans = drawn_plans(degrees)
    grads = [local_grads(plan, 100 * i) for i, plan in enumerate(plans)]
    answers = rank_pool.run(
        bodies_grad.sync, sum(degrees), model=UNITS, plans=plans, grads=grads, options=options
    )
    check_sums(plans, grads, answers)
    for i, plan in enumerate(plans):
        if options.mode is SyncMode.RESHARD:
            traffic = reshard_traffic(plan, UNITS)
        else:
            traffic = segment_traffic(plan, UNITS, options.bucket_bytes)
        for rank, answer in enumerate(answers):
            sent = sum(answer[i].sums) + sum(answer[i].exchanges)
            assert traffic[rank].num_bytes == sent, f"plan {i}, rank {rank}"
            calls = len(answer[i].sums) + len(answer[i].exchanges)
            assert traffic[rank].collectives == calls, f"plan {i}, rank {rank}"
            if options.mode is SyncMode.SEGMENTS:
                assert least_bytes(plan, UNITS)[rank] == sent, f"plan {i}, rank {rank}"
                assert answer[i].exchanges == []


@pytest.mark.parametrize("degrees", [(3, 2), (2, 2, 1)], ids=str)
def test_sync_overlap_changes_no_bit(rank_pool: RankPool, degrees: tuple[int, ...]) -> None:
    """Sums that start during backward are, bit for bit, those that start after it."""
    plans = drawn_plans(degrees)
    grads = [local_grads(plan, i, exact=False) for i, plan in enumerate(plans)]
    told: list[list[list[Synced]]] = [
        rank_pool.run(
            bodies_grad.sync, sum(degrees), model=UNITS, plans=plans, grads=grads, options=o
        )
        for o in (OVERLAP, AFTER)
    ]
    for overlapped, after in zip(*told, strict=True):
        for a, b in zip(overlapped, after, strict=True):
            assert is_equal(a.grads, b.grads)
            assert a.sums == b.sums


@EVERY
def test_sync_modes_agree_and_replicas_are_bit_identical(
    rank_pool: RankPool, options: SyncOptions
) -> None:
    """With rounding, too: all holders have the same bits, close to the dense sum."""
    plans = drawn_plans((3, 2))
    grads = [local_grads(plan, i, exact=False) for i, plan in enumerate(plans)]
    answers = rank_pool.run(
        bodies_grad.sync, 5, model=UNITS, plans=plans, grads=grads, options=options
    )
    for i, plan in enumerate(plans):
        expected = dense_sum(plan, grads[i])
        first, second = assemble(plan, UNITS, [answer[i].grads for answer in answers])
        assert is_equal(first, second)
        for name, total in expected.items():
            torch.testing.assert_close(first[name], total, rtol=1e-5, atol=1e-3)


@EVERY
def test_sync_repeated_micro_batched_and_with_unused_parameters(
    rank_pool: RankPool, options: SyncOptions
) -> None:
    """Buffers serve step after step; a gradient that never comes on a rank counts as zero."""
    plans = drawn_plans((3, 2))
    grads = [local_grads(plan, i) for i, plan in enumerate(plans)]
    unused = (("qkv", "gain_2"), ("down", "q_norm"), ("gain_2",), ("embed", "k"), ())
    answers = rank_pool.run(
        bodies_grad.sync,
        5,
        model=UNITS,
        plans=plans,
        grads=grads,
        options=options,
        unused=unused,
        micro_batches=3,
        times=3,
    )
    check_sums(plans, grads, answers, unused=unused)
