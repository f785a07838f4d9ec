"""Whole tensors put together from what ranks hold, with arithmetic of its own.

Used instead of the engine's fingerprints and slices wherever a test asks what a job really holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ntp_core.plan import Plan
from ntp_core.units import ModelUnits

Local = Mapping[str, torch.Tensor]
Whole = dict[str, torch.Tensor]


def assemble(plan: Plan, model: ModelUnits, by_rank: Sequence[Local]) -> list[Whole]:
    """For each replica its whole tensors by name.

    Each rank's local rows (or columns) are its units in ascending order; a tensor without units is
    taken from the replica's first rank, after all its ranks were seen to hold the same bits.
    """
    replicas = []
    for r in plan.replicas:
        whole: Whole = {}
        for t in model.tensors:
            locals_ = [by_rank[g][t.name] for g in r.ranks]
            if t.kind is None:
                assert all(torch.equal(locals_[0], x) for x in locals_), f"{t.name} differs"
                whole[t.name] = locals_[0]
                continue
            size = t.shape[t.dim]
            unit_size = -(-size // plan.counts[t.kind])
            out = torch.full(t.shape, torch.nan, dtype=locals_[0].dtype)
            for tp_rank, local in enumerate(locals_):
                layout = r.overrides.get((t.kind, t.layer), r.layouts[t.kind])
                places = [
                    i
                    for a, b in layout.runs[tp_rank]
                    for i in range(a * unit_size, min(b * unit_size, size))
                ]
                assert local.shape[t.dim] == len(places), f"{t.name} on tp_rank {tp_rank}"
                out.index_copy_(t.dim, torch.tensor(places, dtype=torch.int64), local)
            whole[t.name] = out
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
