"""One norm for the whole job: right, counted once, and the same bits on every rank."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ntp_core.plan import Plan
from tests.support import bodies_grad
from tests.support.logical import assemble, is_equal
from tests.support.rank_pool import RankPool
from tests.support.tiny_job import GROUPED, even, scattered

UNITS = GROUPED.units()


def random_grads(seed: int) -> dict[str, torch.Tensor]:
    """Gradients over six orders of magnitude, so that the order of a sum would show."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=generator)
        * 10.0 ** (6 * torch.rand(t.shape, generator=generator) - 3)
        for t in UNITS.tensors
    }


@pytest.mark.parametrize("degrees", [(1,), (3,), (3, 2), (2, 2, 1)], ids=str)
def test_clip_norm_equals_dense_norm_and_is_the_same_on_all_ranks(
    rank_pool: RankPool, degrees: tuple[int, ...]
) -> None:
    """The norm is that of the whole gradient, each element once; loss and control add up."""
    plans: list[Plan] = [scattered(random.Random(s), GROUPED, degrees) for s in range(4)]
    plans.append(even(GROUPED, degrees))
    grads = random_grads(3)
    dense = math.sqrt(math.fsum(float(g.double().square().sum()) for g in grads.values()))
    world = sum(degrees)
    answers = rank_pool.run(bodies_grad.clip, world, model=UNITS, plans=plans, grads=grads)
    for i in range(len(plans)):
        told = [answer[i] for answer in answers]
        assert pytest.approx(dense, rel=1e-12) == told[0].norm
        assert sum(2.0**-r for r in range(world)) == told[0].loss_sum
        assert (1 << world) - 1 == told[0].control
        assert all(t == told[0] for t in told)


def test_clip_scale_multiplies_every_gradient(rank_pool: RankPool) -> None:
    """Scaling reaches all elements on all ranks, once."""
    plan, grads = scattered(random.Random(5), GROUPED, (3, 2)), random_grads(5)
    answers = rank_pool.run(
        bodies_grad.clip_scale, 5, model=UNITS, plan=plan, grads=grads, factor=0.25
    )
    expected = {n: g * 0.25 for n, g in grads.items()}
    for replica in assemble(plan, UNITS, answers):
        assert is_equal(expected, replica)
