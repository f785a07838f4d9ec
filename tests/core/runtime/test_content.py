"""Content of shards: the same start, fingerprints and counts at any layout."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.content import (
    BlockIndex,
    block_fingerprints,
    counted_mask,
    fingerprint_vector,
    owned_by,
)
from ntp_core.runtime.shards import Placement, init_shard, shards_of
from ntp_core.units import ModelUnits
from tests.support.logical import assemble, cut, is_equal
from tests.support.random_plans import random_model, random_plan

SEEDS = range(15)
Vectors = npt.NDArray[np.int64]


def whole_plan(model: ModelUnits) -> Plan:
    """One rank holds all."""
    layouts = {k: Layout.contiguous((n,)) for k, n in model.counts.items()}
    return Plan.build(model.counts, [ReplicaPlan(ranks=(0,), layouts=layouts, batch=1)])


def whole_values(model: ModelUnits, seed: int) -> dict[str, torch.Tensor]:
    """Random whole tensors, with zeros of both signs and a NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    values = {t.name: torch.randn(t.shape, generator=generator) for t in model.tensors}
    values["embed"].view(-1)[0] = -0.0
    values["norm"][1] = torch.nan
    return values


def vector_of(model: ModelUnits, plan: Plan, rank: int, whole: dict[str, torch.Tensor]) -> Vectors:
    """A rank's placement and its fingerprints of one plane."""
    local = cut(plan, model, rank, whole)
    placement, index = Placement(model, plan, rank), BlockIndex(model)
    tensors = [local[t.name] for t in model.tensors]
    return fingerprint_vector(placement, [tensors], index, seed=3, check=8) * counted_mask(
        placement, index
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_fingerprints_of_a_replica_are_those_of_the_whole_model(seed: int) -> None:
    """Summed over a replica's ranks, every block's number is that of the one-rank layout."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan, whole = random_plan(draw, model), whole_values(model, seed)
    expected = vector_of(model, whole_plan(model), 0, whole)
    for r in plan.replicas:
        total = sum(vector_of(model, plan, g, whole) for g in r.ranks)
        assert (expected == total).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_fingerprint_flip_shows_in_its_block_alone(seed: int) -> None:
    """One bit of one element changes the number of the block it lies in, and no other."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan, whole = whole_plan(model), whole_values(model, seed)
    for shard in shards_of(model, plan, 0):
        tensor = whole[shard.spec.name].clone()
        before = block_fingerprints(shard, tensor, seed=1, check=1)
        line = draw.randrange(tensor.shape[shard.spec.dim])
        chosen = tensor.view(torch.int32).select(shard.spec.dim, line).view(-1)
        chosen[draw.randrange(len(chosen))] ^= 1 << draw.randrange(31)
        after = block_fingerprints(shard, tensor, seed=1, check=1)
        changed = [b for b in before if before[b] != after[b]]
        expected = [b for b in shard.blocks if any(a <= line < z for a, z in shard.spans((b,)))]
        assert expected == changed


@pytest.mark.parametrize("seed", SEEDS)
def test_every_block_is_counted_once_by_its_owner(seed: int) -> None:
    """In each replica one rank speaks for a block, and it is the one that owns it."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan, index = random_plan(draw, model), BlockIndex(model)
    for number, r in enumerate(plan.replicas):
        owners = owned_by(plan, model, index, number)
        masks = {g: counted_mask(Placement(model, plan, g), index) for g in r.ranks}
        for block, owner in enumerate(owners):
            assert [owner] == [g for g, mask in masks.items() if mask[block]]


def test_block_index_names_tensor_and_block() -> None:
    """Numbers run through all tensors; whole ones count as one block."""
    model = random_model(random.Random(1))
    index = BlockIndex(model)
    expected = [
        (i, b)
        for i, t in enumerate(model.tensors)
        for b in range(1 if t.kind is None else model.counts[t.kind])
    ]
    assert expected == [index.tensor_of(n) for n in range(index.total)]


@pytest.mark.parametrize("seed", SEEDS)
def test_initial_values_are_the_same_at_any_layout(seed: int) -> None:
    """All replicas, whatever their layout, start as the one-rank model does."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)

    def initial(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
        return {s.spec.name: init_shard(s, 5, 0.1) for s in shards_of(model, plan, rank)}

    expected = initial(whole_plan(model), 0)
    by_rank = [initial(plan, g) for g in plan.ranks]
    for replica in assemble(plan, model, by_rank):
        assert is_equal(expected, replica)
    assert not torch.equal(expected["embed"], torch.zeros_like(expected["embed"]))
