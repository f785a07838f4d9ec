"""Keepers: for each block the one rank of the whole job that answers for it.

Replicas hold the same blocks, so work that is to be done once in the job - writing a block into a
checkpoint, keeping its optimizer state - is dealt out over the block's owners, one per replica, in
turn. A block's turn depends on its number alone, not on shares: when shares change within a
replica, only blocks that change their owner there get another keeper.
"""

from __future__ import annotations

from ntp_core.plan import Plan
from ntp_core.reshard import Held
from ntp_core.segments import unit_owners
from ntp_core.units import ModelUnits


def keepers(plan: Plan, model: ModelUnits) -> tuple[tuple[int, ...], ...]:
    """For each tensor the global rank that keeps each of its blocks.

    A block that units share counts as its first unit's; a tensor without units is one block, kept
    by any rank in turn.

    >>> from ntp_core.plan import Layout, ReplicaPlan
    >>> from ntp_core.units import TensorSpec, UnitKind
    >>> K = UnitKind.MLP
    >>> def rep(ranks, shares):
    ...     return ReplicaPlan(ranks=ranks, layouts={K: Layout.contiguous(shares)}, batch=1)
    >>> plan = Plan.build({K: 6}, [rep((0, 1), (4, 2)), rep((2,), (6,))])
    >>> tensors = (TensorSpec(name="w", shape=(6, 1), kind=K), TensorSpec(name="n", shape=(1,)))
    >>> keepers(plan, ModelUnits(counts={K: 6}, tensors=tensors))
    ((0, 2, 0, 2, 1, 2), (1,))
    """
    ranks, num_replicas = plan.ranks, len(plan.replicas)
    found: list[tuple[int, ...]] = []
    for index, t in enumerate(model.tensors):
        if t.kind is None:
            found.append((ranks[index % len(ranks)],))
            continue
        owners = unit_owners(plan, t)
        num_blocks = model.counts[t.kind] // t.sharing
        found.append(
            tuple(owners[(b + index) % num_replicas][b * t.sharing] for b in range(num_blocks))
        )
    return tuple(found)


def held_by_keepers(plan: Plan, model: ModelUnits) -> Held:
    """The blocks that each rank keeps, ascending; ranks that keep none have an empty tuple."""
    held: list[dict[int, tuple[int, ...]]] = []
    for by_block in keepers(plan, model):
        mine: dict[int, list[int]] = {g: [] for g in plan.ranks}
        for block, rank in enumerate(by_block):
            mine[rank].append(block)
        held.append({g: tuple(blocks) for g, blocks in mine.items()})
    return held
