"""Dropout by logical unit: the same mask wherever an element lies, and a fair one."""

from __future__ import annotations

import random

import pytest
import torch

from ntp_core.errors import InvalidInput
from ntp_core.runtime.activation.dropout import Draws, UnitDropout, keep_mask
from ntp_core.runtime.shards import shards_of
from tests.support.random_plans import random_model, random_plan

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15
SEQ = 5


def mix(value: int) -> int:
    """splitmix64's finaliser on a Python integer."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & MASK
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def key(parts: tuple[int, ...], index: int) -> int:
    """Key of a token or a feature, on Python integers."""
    base = parts[0]
    for part in parts[1:]:
        base = mix((base * ODD + part + ODD) & MASK)
    return mix((index * ODD + base) & MASK)


def draws_of(step: int, first: int, count: int) -> Draws:
    """Draws of seed 3."""
    draws = Draws(3)
    draws.at(step, first, count)
    return draws


def test_mask_is_that_of_plain_integers() -> None:
    """Element by element, an oracle without tensors draws the same."""
    features = torch.tensor([0, 7, 2, 2**31])
    keep = keep_mask(0.4, draws_of(9, 5, 2), 6, SEQ, features)
    for b in range(2):
        for t in range(SEQ):
            row = key((3, 9, 6, 0), (5 + b << 32) + t)
            for f, feature in enumerate(features.tolist()):
                drawn = mix(row + key((3, 9, 6, 1), feature) & MASK) >> 11
                assert bool(keep[b, t, f]) == (drawn >= int(0.4 * 2**53))


@pytest.mark.parametrize("seed", range(10))
def test_mask_of_each_shard_is_its_part_of_the_whole(seed: int) -> None:
    """Any layout and any split of the batch cut one and the same mask."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    for spec in model.tensors:
        whole = keep_mask(0.3, draws_of(2, 0, 6), 1, SEQ, torch.arange(spec.shape[spec.dim]))
        for rank in plan.ranks:
            shard = next(s for s in shards_of(model, plan, rank) if s.spec is spec)
            index = shard.logical_index()
            for first, count in ((0, 4), (4, 2)):
                part = keep_mask(0.3, draws_of(2, first, count), 1, SEQ, index)
                assert torch.equal(whole[first : first + count][..., index], part)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_mask_rate_is_right_within_five_deviations(rate: float) -> None:
    """Over 2^20 draws, and in every row and column of them."""
    keep = keep_mask(rate, draws_of(1, 0, 8), 0, 128, torch.arange(1024)).double()
    for mean, count in (
        (keep.mean(), keep.numel()),
        (keep.mean(2), 1024),
        (keep.mean((0, 1)), 1024),
    ):
        spread = (rate * (1 - rate) / count) ** 0.5
        assert float((mean - (1 - rate)).abs().max()) <= 5 * spread


def test_masks_of_neighbours_are_unrelated() -> None:
    """Another step, place, sequence, position or feature agrees in half of the elements."""
    features = torch.arange(512)
    base = keep_mask(0.5, draws_of(1, 0, 2), 0, 256, features)
    others = [
        keep_mask(0.5, draws_of(2, 0, 2), 0, 256, features),
        keep_mask(0.5, draws_of(1, 0, 2), 1, 256, features),
        keep_mask(0.5, draws_of(1, 1, 2), 0, 256, features),
        keep_mask(0.5, draws_of(1, 0, 2), 0, 256, features + 1),
        base.roll(1, 1),
    ]
    for other in others:
        assert abs(float((base == other).double().mean()) - 0.5) < 0.01


def test_dropout_scales_what_stays_and_its_gradient() -> None:
    """Kept elements and their gradients are divided by 1 - rate, the others are 0."""
    draws = draws_of(1, 0, 2)
    drop = UnitDropout(0.25, draws, 0, lambda: torch.arange(64))
    x = torch.ones(2, 8, 64, requires_grad=True)
    out = drop(x)
    out.sum().backward()
    keep = keep_mask(0.25, draws, 0, 8, torch.arange(64))
    assert torch.equal(keep / 0.75, out)
    assert x.grad is not None
    assert torch.equal(keep / 0.75, x.grad)
    drop.eval()
    assert drop(x) is x


def test_dropout_takes_an_empty_share() -> None:
    """A rank without columns drops nothing and stays in the graph."""
    drop = UnitDropout(0.5, draws_of(1, 0, 2), 0, lambda: torch.zeros(0, dtype=torch.int64))
    assert drop(torch.ones(2, 3, 0)).shape == (2, 3, 0)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_dropout_impossible_rate_is_named(rate: float) -> None:
    """A rate outside [0, 1) is refused."""
    with pytest.raises(InvalidInput, match="dropout rate"):
        UnitDropout(rate, Draws(0), 0, lambda: torch.arange(1))
