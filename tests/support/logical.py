"""Whole tensors put together from what ranks hold, with arithmetic of its own.

Used instead of the engine's fingerprints and slices wherever a test asks what a job really holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, TensorSpec

Local = Mapping[str, torch.Tensor]
Whole = dict[str, torch.Tensor]


def places_of(plan: Plan, tensor: TensorSpec, rank: int) -> list[int]:
    """Logical index along the cut dim of each local row (or column) of a rank, in local order.

    A rank keeps its units in ascending order, part after part; the last unit may be shorter. Of
    units that share a block it keeps the block once.
    """
    size = tensor.shape[tensor.dim] // tensor.parts
    if tensor.kind is None:
        return list(range(size))
    replica = next(r for r in plan.replicas if rank in r.ranks)
    layout = replica.overrides.get((tensor.kind, tensor.layer), replica.layouts[tensor.kind])
    block_size = -(-size // (plan.counts[tensor.kind] // tensor.sharing))
    runs = layout.runs[replica.ranks.index(rank)]
    blocks = sorted({u // tensor.sharing for a, b in runs for u in range(a, b)})
    return [
        part * size + i
        for part in range(tensor.parts)
        for b in blocks
        for i in range(b * block_size, min((b + 1) * block_size, size))
    ]


def cut(plan: Plan, model: ModelUnits, rank: int, whole: Local) -> Whole:
    """What a rank holds of whole tensors."""
    return {
        t.name: whole[t.name].index_select(t.dim, torch.tensor(places_of(plan, t, rank)).long())
        for t in model.tensors
    }


def assemble(plan: Plan, model: ModelUnits, by_rank: Sequence[Local]) -> list[Whole]:
    """For each replica its whole tensors by name; every element must come from just one rank.

    Of a tensor without units, and of blocks that several ranks hold, all copies in the replica must
    be the same bits.
    """
    replicas = []
    for r in plan.replicas:
        whole: Whole = {}
        for t in model.tensors:
            held = [by_rank[g][t.name] for g in r.ranks]
            if t.kind is None:
                assert all(torch.equal(held[0], x) for x in held), f"{t.name} differs"
                whole[t.name] = held[0]
                continue
            places = [i for g in r.ranks for i in places_of(plan, t, g)]
            found = sorted(set(places))
            assert found == list(range(t.shape[t.dim])), f"{t.name} is not covered"
            assert t.sharing > 1 or len(found) == len(places), f"{t.name} is covered twice"
            first = torch.tensor([places.index(i) for i in found])
            every = torch.cat(held, dim=t.dim)
            whole[t.name] = every.index_select(t.dim, first)
            again = whole[t.name].index_select(t.dim, torch.tensor(places))
            assert torch.equal(again.view(torch.int32), every.view(torch.int32)), (
                f"{t.name} differs"
            )
        replicas.append(whole)
    return replicas


def is_equal(a: Whole, b: Whole) -> bool:
    """The same names and, bit by bit, the same values."""
    return a.keys() == b.keys() and all(
        torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a
    )


def largest_difference(a: Local, b: Local) -> float:
    """Over all tensors, the largest difference of two elements."""
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def rms_difference(a: Local, b: Local) -> float:
    """Root mean square of the differences of all elements."""
    squares = torch.cat([(a[n].double() - b[n].double()).square().flatten() for n in a])
    return float(squares.mean().sqrt())
