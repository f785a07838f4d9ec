"""A rank without a place in a plan: what a newcomer holds of the state before it is let in."""

from __future__ import annotations

from ntp_core.plan import Plan
from ntp_core.runtime.shards import Placement, Shard
from ntp_core.units import ModelUnits


class Absent(Placement):
    """Holds nothing, speaks for nothing, and knows what the others hold."""

    def __init__(self, model: ModelUnits, plan: Plan, rank: int) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self.shards = [
            Shard(i, t, 1 if t.kind is None else model.counts[t.kind], ())
            for i, t in enumerate(model.tensors)
        ]

    @property
    def copy(self) -> int:
        """Any: it adds nothing to it."""
        return 0

    def counted(self) -> list[tuple[int, ...]]:
        """Nothing."""
        return [() for _ in self.shards]
