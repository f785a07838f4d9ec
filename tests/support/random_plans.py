"""Random models and plans, pure numbers, all from one seeded source."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import keep_placement
from ntp_core.units import ModelUnits, TensorSpec, UnitKind

A, M, V, E = UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCAB, UnitKind.EXPERT


def random_model(draw: random.Random) -> ModelUnits:
    """Two layers of attention and MLP, a vocabulary: fused parts, both dims, short last blocks."""
    counts = {A: draw.randint(1, 9), M: draw.randint(1, 17), V: draw.randint(1, 11)}

    def cut(kind: UnitKind, parts: int = 1) -> int:
        size = draw.randint(1, 4)
        short = draw.randint(0, size - 1)
        return parts * (counts[kind] * size - short)

    tensors = [
        TensorSpec(name="embed", shape=(cut(V), 3), kind=V),
        TensorSpec(name="norm", shape=(3,)),
    ]
    for layer in range(2):
        tensors += [
            TensorSpec(name=f"{layer}.qkv", shape=(cut(A, 3), 3), kind=A, layer=layer, parts=3),
            TensorSpec(name=f"{layer}.o", shape=(3, cut(A)), kind=A, layer=layer, dim=1),
            TensorSpec(name=f"{layer}.up", shape=(cut(M, 2), 3), kind=M, layer=layer, parts=2),
            TensorSpec(name=f"{layer}.down", shape=(3, cut(M)), kind=M, layer=layer, dim=1),
        ]
    return ModelUnits(counts=counts, tensors=tuple(tensors))


def random_shares(draw: random.Random, count: int, degree: int) -> tuple[int, ...]:
    """Any shares, zeros included, that add up to `count`."""
    cuts = sorted(draw.randint(0, count) for _ in range(degree - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True))


def random_layout(draw: random.Random, count: int, degree: int) -> Layout:
    """Random shares, contiguous or scattered."""
    shares = random_shares(draw, count, degree)
    if draw.random() < 0.5:
        return Layout.contiguous(shares)
    units = draw.sample(range(count), count)
    ends = [sum(shares[: i + 1]) for i in range(degree)]
    return Layout.of_units(units[b - s : b] for b, s in zip(ends, shares, strict=True))


def random_plan(
    draw: random.Random, model: ModelUnits, degrees: Sequence[int] | None = None
) -> Plan:
    """Any plan: ranks in any order, and sometimes a layer with a layout of its own."""
    if degrees is None:
        degrees = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    ranks = draw.sample(range(sum(degrees)), sum(degrees))
    replicas = []
    for degree in degrees:
        mine, ranks = tuple(ranks[:degree]), ranks[degree:]
        layouts = {k: random_layout(draw, n, degree) for k, n in model.counts.items()}
        overrides = {
            (kind, layer): random_layout(draw, model.counts[kind], degree)
            for kind in (A, M)
            if kind in model.counts
            for layer in range(2)
            if draw.random() < 0.2
        }
        batch = draw.randint(1, 5)
        replicas.append(ReplicaPlan(ranks=mine, layouts=layouts, batch=batch, overrides=overrides))
    return Plan.build(model.counts, replicas)


def random_share_change(draw: random.Random, plan: Plan) -> Plan:
    """Other random shares in every replica, moving the fewest units; overrides are dropped."""
    replicas = [
        ReplicaPlan(
            ranks=r.ranks,
            batch=r.batch,
            layouts={
                k: keep_placement(random_shares(draw, plan.counts[k], len(r.ranks)), layout)
                for k, layout in r.layouts.items()
            },
        )
        for r in plan.replicas
    ]
    return Plan.build(plan.counts, replicas, epoch=plan.epoch + 1)


def without_overrides(plan: Plan) -> Plan:
    """The plan with one layout per kind in all layers."""
    replicas = [ReplicaPlan(ranks=r.ranks, layouts=r.layouts, batch=r.batch) for r in plan.replicas]
    return Plan.build(plan.counts, replicas, epoch=plan.epoch)
