"""Jobs small enough that a test trains them in a second, and plans for them.

Three shapes, so that each degree used in tests has an even layout in one of them: 12 attention, 12
mlp and 12 vocab units with one query head per KV head (`WIDE`), and 6 attention units with two
query heads per KV head (`GROUPED`). The last vocab unit has 3 rows where the others have 5.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ntp_core.job import TrainConfig
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import keep_placement
from ntp_core.runtime.data import ByteText, standard_library_text
from ntp_core.units import UnitKind

A, M, V = UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCAB
KINDS = (A, M, V)
SEQ = 16

_SIZES = {"vocab": 58, "layers": 2, "width": 48, "ffn": 48, "mlp_block": 4, "vocab_block": 5}
WIDE = LlamaConfig(heads=12, kv_heads=12, init_std=0.1, **_SIZES)
GROUPED = LlamaConfig(heads=12, kv_heads=6, init_std=0.1, **_SIZES)

Shares = Mapping[UnitKind, Sequence[int]]


def train_config(model: LlamaConfig = GROUPED, **changes: object) -> TrainConfig:
    """A config that checks every step, warms up in 3 and clips at a norm that steps exceed."""
    settings: dict[str, object] = {
        "seq": SEQ,
        "seed": 7,
        "clip_norm": 0.5,
        "check_every": 1,
        "warmup": 3,
    }
    return TrainConfig(model=model, **(settings | changes))  # type: ignore[arg-type]


def text_for(config: TrainConfig) -> ByteText:
    """Real text folded onto the model's small vocabulary."""
    text = standard_library_text(1 << 16) % config.model.vocab
    return ByteText(text.to(torch.uint8), config.seq, config.seed)


def even_shares(count: int, degree: int) -> tuple[int, ...]:
    """Shares that differ by one at most, the larger first."""
    return tuple(count // degree + (r < count % degree) for r in range(degree))


def plan_of(
    model: LlamaConfig,
    shares: Sequence[Shares],
    batches: Sequence[int] | None = None,
    epoch: int = 1,
) -> Plan:
    """A plan of contiguous layouts; replica i takes the next ranks and batches[i] (or 2 each)."""
    replicas, first = [], 0
    for index, of_kind in enumerate(shares):
        degree = len(of_kind[A])
        layouts = {kind: Layout.contiguous(of_kind[kind]) for kind in KINDS}
        batch = 2 if batches is None else batches[index]
        ranks = tuple(range(first, first + degree))
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=batch))
        first += degree
    return Plan.build(model.units().counts, replicas, epoch=epoch)


def even(model: LlamaConfig, degrees: Sequence[int], batches: Sequence[int] | None = None) -> Plan:
    """All shares as even as whole units allow."""
    counts = model.units().counts
    return plan_of(model, [{k: even_shares(counts[k], d) for k in KINDS} for d in degrees], batches)


def random_shares(draw: random.Random, count: int, degree: int) -> tuple[int, ...]:
    """Any shares, zeros included, that add up to `count`."""
    cuts = sorted(draw.randint(0, count) for _ in range(degree - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True))


def scattered(
    draw: random.Random,
    model: LlamaConfig,
    degrees: Sequence[int],
    batches: Sequence[int] | None = None,
) -> Plan:
    """Random shares, and units in random order: a rank's units are not neighbours."""
    counts = model.units().counts
    replicas, first = [], 0
    for index, degree in enumerate(degrees):
        layouts = {}
        for kind in KINDS:
            units = draw.sample(range(counts[kind]), counts[kind])
            shares, start, held = random_shares(draw, counts[kind], degree), 0, []
            for share in shares:
                held.append(units[start : start + share])
                start += share
            layouts[kind] = Layout.of_units(held)
        ranks = tuple(range(first, first + degree))
        batch = 2 if batches is None else batches[index]
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=batch))
        first += degree
    return Plan.build(counts, replicas)


def reshared(plan: Plan, shares: Sequence[Shares], batches: Sequence[int] | None = None) -> Plan:
    """The plan with other shares in each replica, moving the fewest units."""
    replicas = [
        replace(
            r,
            layouts={k: keep_placement(of_kind[k], v) for k, v in r.layouts.items()},
            batch=r.batch if batches is None else batches[i],
        )
        for i, (r, of_kind) in enumerate(zip(plan.replicas, shares, strict=True))
    ]
    return Plan.build(plan.counts, replicas, epoch=plan.epoch)
