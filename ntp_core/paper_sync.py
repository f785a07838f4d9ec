"""The paper's way to sum gradients over uneven replicas: reshard, sum in lanes, reshard back.

Source: arXiv 2504.06095, section 4. The replica of the lowest degree sets the lanes: lane i sums
the units of its i-th rank. In every replica rank i is the core of lane i. A rank sends gradients
of units that belong to other lanes to their cores, inside its replica; each lane's cores sum; the
cores send the sums back. Generalised here to any mix of degrees and any layouts: whoever holds a
block that is not of its own lane sends it, and copies of a block are added up at its core.

Pure: which blocks go where, and how many bytes and messages that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ntp_core.elements import Elements
from ntp_core.plan import Plan, ReplicaPlan
from ntp_core.reshard import blocks_held
from ntp_core.segments import Ranks, whole_tensors
from ntp_core.traffic import Traffic
from ntp_core.units import ModelUnits, TensorSpec, block_numel


@dataclass(frozen=True, slots=True)
class Send:
    """Gradient blocks of one tensor that go from a holder to a core of its replica, and back."""

    tensor: int
    blocks: tuple[int, ...]
    src: int
    core: int


def lane_groups(plan: Plan) -> tuple[Ranks, ...]:
    """The cores of each lane, one per replica.

    >>> def replica(*ranks):
    ...     return ReplicaPlan(ranks=ranks, layouts={}, batch=1)
    >>> lane_groups(Plan.build({}, [replica(0, 1, 2), replica(3, 4)]))
    ((0, 3), (1, 4))
    """
    lanes = len(_reference(plan).ranks)
    return tuple(tuple(r.ranks[i] for r in plan.replicas) for i in range(lanes))


def lane_blocks(plan: Plan, tensor: TensorSpec) -> tuple[tuple[int, ...], ...]:
    """For each lane the blocks of a cut tensor that it sums; a shared block goes to the lane of its
    first unit."""
    assert tensor.kind is not None
    r = _reference(plan)
    layout = r.layout(tensor.kind, tensor.layer)
    lanes = []
    for place in range(len(r.ranks)):
        units = layout.units(place)
        first = [u // tensor.sharing for u in units if u % tensor.sharing == 0]
        lanes.append(tuple(first))
    return tuple(lanes)


def sends(plan: Plan, model: ModelUnits, elements: Elements | None = None) -> tuple[Send, ...]:
    """All gradients that leave their holder before the lanes sum, in one order for all ranks."""
    elements = elements or Elements.of_model(model)
    found: list[Send] = []
    cores = lane_groups(plan)
    for index, t in enumerate(model.tensors):
        if t.kind is None or not elements.is_summed(index):
            continue
        of_lane = [set(blocks) for blocks in lane_blocks(plan, t)]
        for number, r in enumerate(plan.replicas):
            for src in r.ranks:
                held = blocks_held(plan, t, src)
                for lane, blocks in enumerate(of_lane):
                    out = tuple(b for b in held if b in blocks)
                    core = cores[lane][number]
                    if out and core != src:
                        found.append(Send(index, out, src, core))
    return tuple(found)


def reshard_traffic(
    plan: Plan, model: ModelUnits, elements: Elements | None = None
) -> dict[int, Traffic]:
    """What each rank puts into collectives and messages per step, whole tensors included.

    Args:
        elements: of the gradients, of one type; None: all of the model's size.
    """
    elements = elements or Elements.of_model(model)
    out = {g: Traffic() for g in plan.ranks}
    pairs: dict[tuple[int, int, bool], int] = {}  # from, to, on the way back
    for s in sends(plan, model, elements):
        size = _bytes(model, elements, s.tensor, s.blocks)
        for pair in ((s.src, s.core, False), (s.core, s.src, True)):
            pairs[pair] = pairs.get(pair, 0) + size
    for (src, *_), size in pairs.items():
        out[src] = out[src].plus(num_bytes=size, messages=1)
    for r in plan.replicas:
        if any(src in r.ranks for src, *_ in pairs):
            for g in r.ranks:
                out[g] = out[g].plus(collectives=2)
    for lane, ranks in enumerate(lane_groups(plan)):
        cut = [(i, t) for i, t in enumerate(model.tensors) if t.kind is not None]
        size = sum(_bytes(model, elements, i, lane_blocks(plan, t)[lane]) for i, t in cut)
        for g in ranks if len(ranks) > 1 and size else ():
            out[g] = out[g].plus(num_bytes=size, messages=1, collectives=1)
    over_world = whole_tensors(plan, model)
    whole = sum(elements.num_bytes(i, model.tensors[i].numel) for i in over_world)
    for g in plan.ranks if whole and len(plan.ranks) > 1 else ():
        out[g] = out[g].plus(num_bytes=whole, messages=1, collectives=1)
    return out


def _reference(plan: Plan) -> ReplicaPlan:
    return min(plan.replicas, key=lambda r: len(r.ranks))


def _bytes(model: ModelUnits, elements: Elements, tensor: int, blocks: Iterable[int]) -> int:
    t = model.tensors[tensor]
    assert t.kind is not None
    numel = sum(block_numel(t, model.counts[t.kind], b) for b in blocks)
    return elements.num_bytes(tensor, numel)
