"""How gradients are summed over replicas: the choice of a mode, and the groups that it needs.

`segments` sums each piece in the group of its owners, without resharding; `reshard` is the way of
arXiv 2504.06095, kept so that both can be measured. Both give all replicas the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ntp_core.errors import InvalidInput
from ntp_core.paper_sync import lane_groups
from ntp_core.runtime.comm import Comm, Ranks
from ntp_core.runtime.shards import Placement, Shards
from ntp_core.runtime.sync.reshard import ReshardSync
from ntp_core.runtime.sync.segments import SegmentSync
from ntp_core.segments import DEFAULT_BUCKET_BYTES, sync_groups


class SyncMode(StrEnum):
    """Ways to sum gradients over replicas."""

    SEGMENTS = "segments"
    RESHARD = "reshard"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """How gradients are summed; the same on every rank.

    Attributes:
        overlap: sums start while backward runs, bucket by bucket (segments only). Same bits.
        bucket_bytes: about how many bytes of gradients one rank sums at a time (segments only).
    """

    mode: SyncMode = SyncMode.SEGMENTS
    overlap: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise InvalidInput(f"bucket_bytes = {self.bucket_bytes}; give a whole number >= 1")


class Sync(Protocol):
    """Sums gradients over replicas under one plan."""

    def arm(self) -> None:
        """The next backward completes the step's gradients: sums may start while it runs."""

    def run(self) -> None:
        """Replace each gradient by its sum. Every rank takes part, after backward."""

    def close(self) -> None:
        """Leave the parameters alone from now on: another plan comes into force."""


def gradient_sync(comm: Comm, shards: Shards, options: SyncOptions | None = None) -> Sync:
    """The sync of the plan in force; its groups must exist. Build a new one for each plan."""
    options = options or SyncOptions()
    if options.mode is SyncMode.RESHARD:
        return ReshardSync(comm, shards)
    return SegmentSync(comm, shards, options.bucket_bytes, overlap=options.overlap)


def groups_of(placement: Placement, mode: SyncMode = SyncMode.SEGMENTS) -> list[Ranks]:
    """All groups that a plan needs, replicas included; every rank creates them before use."""
    plan, model = placement.plan, placement.model
    replicas = [r.ranks for r in plan.replicas]
    if mode is SyncMode.RESHARD:
        return [*replicas, *lane_groups(plan)]
    return [*replicas, *(g.ranks for g in sync_groups(plan, model))]
