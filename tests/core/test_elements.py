"""Element types of gradients: sums of one type each, bytes as they are, nothing for the frozen."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from ntp_core.elements import Elements
from ntp_core.errors import ModelMismatch
from ntp_core.paper_sync import reshard_traffic, sends
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.segments import launch_bytes, launches
from ntp_core.traffic import least_bytes, segment_traffic
from ntp_core.units import ModelUnits, TensorSpec, UnitKind, block_numel
from tests.support.random_plans import random_model, random_plan

SIZES = {"float32": 4, "bfloat16": 2, None: 0}


def drawn(seed: int) -> tuple[ModelUnits, Plan, list[str | None]]:
    """A random model, a plan for it, and for each tensor float32, bfloat16 or frozen."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model, [draw.randint(1, 4) for _ in range(draw.randint(2, 3))])
    return model, plan, [draw.choice(list(SIZES)) for _ in model.tensors]


def held_bytes(model: ModelUnits, plan: Plan, dtypes: list[str | None], rank: int) -> int:
    """Bytes of all gradients that a rank holds, counted unit by unit."""
    total = 0
    for t, dtype in zip(model.tensors, dtypes, strict=True):
        if t.kind is None:
            total += SIZES[dtype] * t.numel
            continue
        r = plan.replicas[plan.place(rank)[0]]
        layout = r.overrides.get((t.kind, t.layer), r.layouts[t.kind])
        runs = layout.runs[r.ranks.index(rank)]
        numel = sum(block_numel(t, model.counts[t.kind], u) for a, b in runs for u in range(a, b))
        total += SIZES[dtype] * numel
    return total


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 30])
@pytest.mark.parametrize("seed", range(30))
def test_bytes_of_mixed_types_are_those_of_each_tensor(seed: int, bucket_bytes: int) -> None:
    """With several replicas a rank sends all it holds of what is trained, in its own type."""
    model, plan, dtypes = drawn(seed)
    elements = Elements.named(dtypes)
    expected = {g: held_bytes(model, plan, dtypes, g) for g in plan.ranks}
    assert expected == least_bytes(plan, model, elements)
    traffic = segment_traffic(plan, model, bucket_bytes, elements)
    assert expected == {g: t.num_bytes for g, t in traffic.items()}


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 30])
@pytest.mark.parametrize("seed", range(30))
def test_launches_have_one_type_each_and_leave_frozen_tensors_out(
    seed: int, bucket_bytes: int
) -> None:
    """Every rank sorts its sums alike: by bucket, ranks, type."""
    model, plan, dtypes = drawn(seed)
    elements = Elements.named(dtypes)
    found = launches(plan, model, bucket_bytes, elements)
    for launch in found:
        assert {launch.dtype} == {dtypes[p.tensor] for p in launch.pieces}
        assert launch_bytes(launch, model, elements) > 0
    keys = [(x.bucket, x.ranks, x.dtype) for x in found]
    assert sorted(set(keys)) == keys


def test_buckets_close_by_real_bytes() -> None:
    """Of bfloat16 gradients twice as many go into a bucket."""
    model, plan, _ = drawn(1)

    def buckets(dtype: str) -> list[set[int]]:
        found = launches(plan, model, 100, Elements.named([dtype] * len(model.tensors)))
        by_bucket = groupby(found, key=lambda x: x.bucket)
        return [{p.tensor for x in of_one for p in x.pieces} for _, of_one in by_bucket]

    half = launches(plan, model, 50, Elements.named(["bfloat16"] * len(model.tensors)))
    assert [(x.bucket, x.pieces) for x in half] == [
        (x.bucket, x.pieces)
        for x in launches(plan, model, 100, Elements.named(["float32"] * len(model.tensors)))
    ]
    assert len(buckets("bfloat16")) < len(buckets("float32"))


def test_buckets_close_by_an_even_share_of_the_smallest_replica() -> None:
    """Over twice the ranks a bucket holds twice the tensors: a rank sums as much at a time."""
    kind = UnitKind.MLP
    tensors = tuple(TensorSpec(name=f"w{i}", shape=(4, 8), kind=kind) for i in range(8))
    model = ModelUnits(counts={kind: 4}, tensors=tensors)

    def buckets(*degrees: int) -> int:
        replicas, first = [], 0
        for d in degrees:
            layouts = {kind: Layout.contiguous([4 // d] * d)}
            ranks = tuple(range(first, first + d))
            replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=1))
            first += d
        return len({x.bucket for x in launches(Plan.build(model.counts, replicas), model, 128)})

    assert [buckets(1, 1), buckets(2, 1), buckets(2, 2), buckets(4, 4)] == [8, 8, 4, 2]


@pytest.mark.parametrize("seed", range(20))
def test_reshard_bytes_halve_with_the_type_and_skip_the_frozen(seed: int) -> None:
    """One type for all that is trained; a frozen tensor is neither sent nor summed."""
    model, plan, dtypes = drawn(seed)
    full, half = (
        reshard_traffic(plan, model, Elements.named([d and name for d in dtypes]))
        for name in ("float32", "bfloat16")
    )
    assert {g: t.num_bytes for g, t in full.items()} == {
        g: 2 * t.num_bytes for g, t in half.items()
    }
    elements = Elements.named(dtypes)
    assert all(dtypes[s.tensor] is not None for s in sends(plan, model, elements))
    frozen = Elements.named([None] * len(dtypes))
    assert all(t.num_bytes == 0 for t in reshard_traffic(plan, model, frozen).values())


def test_elements_of_a_model_are_of_its_size() -> None:
    """Where nothing is said all gradients have the size of the model's parameters."""
    model, plan, _ = drawn(2)
    low = ModelUnits(counts=model.counts, tensors=model.tensors, dtype_bytes=2)
    assert {g: n // 2 for g, n in least_bytes(plan, model).items()} == least_bytes(plan, low)


def test_elements_unknown_type_is_named() -> None:
    """The error lists the types that can be."""
    with pytest.raises(ModelMismatch, match=r"int8.*float32"):
        Elements.named(["int8", "float32"])
