"""How much a rank sends per step to sum gradients, by count: no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass

from ntp_core.elements import Elements
from ntp_core.plan import Plan
from ntp_core.reshard import blocks_held
from ntp_core.segments import DEFAULT_BUCKET_BYTES, launch_bytes, launches, whole_tensors
from ntp_core.units import ModelUnits, block_numel


@dataclass(frozen=True, slots=True)
class Traffic:
    """One rank's part of a step's gradient sync.

    Attributes:
        num_bytes: that it puts into sums and messages. How often an all-reduce sends each of them
            on is the algorithm's business and left out, for all ways alike.
        messages: peers it sends something to, summed over collectives; a sum counts as one.
        collectives: that it takes part in.
    """

    num_bytes: int = 0
    messages: int = 0
    collectives: int = 0

    def plus(self, num_bytes: int = 0, messages: int = 0, collectives: int = 0) -> Traffic:
        """This and some more."""
        return Traffic(
            self.num_bytes + num_bytes, self.messages + messages, self.collectives + collectives
        )


def segment_traffic(
    plan: Plan,
    model: ModelUnits,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    elements: Elements | None = None,
) -> dict[int, Traffic]:
    """What each rank puts into sums per step in segment mode.

    Args:
        elements: of the gradients; None: all of the model's size.
    """
    out = {g: Traffic() for g in plan.ranks}
    for launch in launches(plan, model, bucket_bytes, elements):
        size = launch_bytes(launch, model, elements)
        for g in launch.ranks:
            out[g] = out[g].plus(num_bytes=size, messages=1, collectives=1)
    return out


def least_bytes(plan: Plan, model: ModelUnits, elements: Elements | None = None) -> dict[int, int]:
    """The bound: what a rank must put in, each element that it holds and others hold too, once."""
    elements = elements or Elements.of_model(model)
    over_world = whole_tensors(plan, model)
    whole = sum(elements.num_bytes(i, model.tensors[i].numel) for i in over_world)
    bound = dict.fromkeys(plan.ranks, whole if len(plan.ranks) > 1 else 0)
    holders: dict[tuple[int, int], int] = {}
    for index, t in enumerate(model.tensors):
        for g in plan.ranks if t.kind is not None else ():
            for b in blocks_held(plan, t, g):
                holders[index, b] = holders.get((index, b), 0) + 1
    for index, t in enumerate(model.tensors):
        if t.kind is None:
            continue
        for g in plan.ranks:
            held = [b for b in blocks_held(plan, t, g) if holders[index, b] > 1]
            numel = sum(block_numel(t, model.counts[t.kind], b) for b in held)
            bound[g] += elements.num_bytes(index, numel)
    return bound
