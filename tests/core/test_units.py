"""Units and where they lie inside whole and local tensors."""

from __future__ import annotations

import random

import pytest

from ntp_core.errors import ModelMismatch
from ntp_core.units import (
    ModelUnits,
    TensorSpec,
    UnitKind,
    block_numel,
    block_size,
    block_slices,
    blocks_of_units,
    local_shape,
    local_slices,
)
from tests.support.random_plans import random_model

A, M = UnitKind.ATTENTION, UnitKind.MLP


@pytest.mark.parametrize("seed", range(20))
def test_block_slices_cover_every_index_once(seed: int) -> None:
    """All blocks of a tensor together are the tensor, whatever its parts and last block."""
    model = random_model(random.Random(seed))
    for t in model.tensors:
        if t.kind is None:
            continue
        count = model.counts[t.kind]
        places = [i for b in range(count) for s in block_slices(t, count, b) for i in range(*s)]
        assert sorted(places) == list(range(t.shape[t.dim]))
        assert t.numel == sum(block_numel(t, count, b) for b in range(count))
        assert all(block_numel(t, count, b) > 0 for b in range(count))


@pytest.mark.parametrize("seed", range(20))
def test_local_slices_follow_the_held_blocks_part_by_part(seed: int) -> None:
    """A rank's tensor is its blocks in ascending order, part after part, without a hole."""
    draw = random.Random(seed)
    model = random_model(draw)
    for t in model.tensors:
        if t.kind is None:
            continue
        count = model.counts[t.kind]
        held = tuple(sorted(draw.sample(range(count), draw.randint(0, count))))
        places = local_slices(t, count, held)
        in_order = [places[b][p] for p in range(t.parts) for b in held]
        ends = [0, *(stop for _, stop in in_order)]
        assert ends[:-1] == [start for start, _ in in_order]
        assert ends[-1] == local_shape(t, count, held)[t.dim]
        for b in held:
            whole = block_slices(t, count, b)
            assert [z - a for a, z in whole] == [z - a for a, z in places[b]]


def test_block_last_one_is_shorter() -> None:
    """58 rows in blocks of 5: eleven whole ones and one of 3."""
    t = TensorSpec(name="embed", shape=(58, 4), kind=UnitKind.VOCAB)
    assert block_size(t, 12) == 5
    assert block_slices(t, 12, 11) == ((55, 58),)
    assert block_numel(t, 12, 11) == 12


def test_blocks_of_units_shared_by_several_are_held_once() -> None:
    """Query heads 2 .. 5 with four of them per KV head need KV heads 0 and 1, once each."""
    kv = TensorSpec(name="k", shape=(8, 4), kind=A, sharing=4)
    assert blocks_of_units(kv, (2, 3, 4, 5)) == (0, 1)
    assert block_size(kv, 8) == 4
    assert local_shape(kv, 8, (0, 1)) == (8, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([TensorSpec(name="w", shape=(4,))] * 2, "listed twice"),
        ([TensorSpec(name="w", shape=(4,), kind=M)], "none are counted"),
        ([TensorSpec(name="w", shape=(6,), kind=A, sharing=4)], "do not divide"),
        ([TensorSpec(name="w", shape=(7,), kind=A, parts=2)], "by 2 parts"),
        ([TensorSpec(name="w", shape=(7,), kind=A)], "leave the last unit empty"),
    ],
)
def test_model_units_that_do_not_fit_are_refused(tensors: list[TensorSpec], message: str) -> None:
    """Each refusal names the tensor and what does not go together."""
    with pytest.raises(ModelMismatch, match=message):
        ModelUnits(counts={A: 6}, tensors=tuple(tensors))


def test_model_units_json_round_trip() -> None:
    """What was written is read back equal."""
    for seed in range(10):
        model = random_model(random.Random(seed))
        assert model == ModelUnits.from_json(model.to_json())


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"counts": 3, "tensors": [], "dtype_bytes": 4},
        {"counts": {}, "tensors": [{}], "dtype_bytes": 4},
        {"counts": {"attention": None}, "tensors": [], "dtype_bytes": 4},
    ],
)
def test_model_units_from_other_json_is_refused(data: dict[str, object]) -> None:
    """Data of another form is named as such."""
    with pytest.raises(ModelMismatch, match="not a description"):
        ModelUnits.from_json(data)


def test_model_units_tensor_by_name() -> None:
    """A tensor is found by its name; a name that is not there is an error."""
    model = random_model(random.Random(0))
    assert model.tensors[1] == model.tensor("norm")
    with pytest.raises(ModelMismatch, match="no tensor 'missing'"):
        model.tensor("missing")
