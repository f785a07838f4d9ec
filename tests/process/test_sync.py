"""Gradient sync by segments equals a dense sum over replicas, at any mix of layouts."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch

from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, TensorSpec
from tests.support import bodies_grad
from tests.support.logical import assemble, is_equal, places_of
from tests.support.rank_pool import RankPool
from tests.support.tiny_job import GROUPED, A, M, V, even, scattered

# What the little model lacks: fused parts, a short last block within parts, both dims.
UNITS = ModelUnits(
    counts=GROUPED.units().counts,
    tensors=(
        TensorSpec(name="gain", shape=(7,)),
        TensorSpec(name="qkv", shape=(3 * 12, 4), kind=A, parts=3),
        TensorSpec(name="out", shape=(4, 12), kind=A, dim=1),
        TensorSpec(name="gate_up", shape=(2 * 23, 3), kind=M, parts=2),
        TensorSpec(name="down", shape=(3, 23), kind=M, dim=1),
        TensorSpec(name="embed", shape=(58, 4), kind=V),
        TensorSpec(name="bias", shape=(12,), kind=A),
    ),
)


def whole_numbers(seed: int) -> Mapping[str, torch.Tensor]:
    """Gradients of one replica whose sums are exact, so that order cannot matter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randint(-1000, 1000, t.shape, generator=generator).float()
        for t in UNITS.tensors
    }


def bytes_needed(plan: Plan, rank: int) -> int:
    """Each element a rank holds, once."""
    return 4 * sum(
        len(places_of(plan, t, rank)) * (t.numel // t.shape[t.dim]) for t in UNITS.tensors
    )


@pytest.mark.parametrize("degrees", [(1, 1), (3, 2), (4, 2), (2, 2, 1), (1, 2, 3)], ids=str)
def test_sync_equals_dense_sum_and_sends_each_element_once(
    rank_pool: RankPool, degrees: tuple[int, ...]
) -> None:
    """Every gradient becomes the sum over replicas; whole tensors count once per replica."""
    plans = [scattered(random.Random(seed), GROUPED, degrees) for seed in range(4)]
    plans.append(even(GROUPED, degrees))
    grads = [
        [whole_numbers(100 * i + replica) for replica in range(len(degrees))]
        for i in range(len(plans))
    ]
    answers = rank_pool.run(bodies_grad.sync, sum(degrees), model=UNITS, plans=plans, grads=grads)
    for i, plan in enumerate(plans):
        expected = {t.name: sum(g[t.name] for g in grads[i]) for t in UNITS.tensors}
        replicas = assemble(plan, UNITS, [answer[i][0] for answer in answers])
        assert all(is_equal(expected, replica) for replica in replicas), f"seed {i}"
        for rank, answer in enumerate(answers):
            assert bytes_needed(plan, rank) == answer[i][1], f"seed {i}, rank {rank}"


def test_sync_single_replica_changes_nothing_and_sends_nothing(rank_pool: RankPool) -> None:
    """With one replica there is nothing to sum."""
    plan, grads = scattered(random.Random(1), GROUPED, (3,)), whole_numbers(1)
    answers = rank_pool.run(bodies_grad.sync, 3, model=UNITS, plans=[plan], grads=[[grads]])
    assert is_equal(dict(grads), assemble(plan, UNITS, [a[0][0] for a in answers])[0])
    assert [a[0][1] for a in answers] == [0, 0, 0]
