"""Is the content after a change what it was before, and did no byte too many move?"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from ntp_core.reshard import elements_lower_bound, moves_between
from ntp_core.runtime.content import BlockIndex, owned_by
from ntp_core.runtime.optim.planes import Plane, plane_bytes
from ntp_core.runtime.shards import KeptPlacement, Placement

Vectors = npt.NDArray[np.int64]  # [copies, blocks]
Known = npt.NDArray[np.bool_]  # [copies, blocks]


def known_of(placement: Placement, index: BlockIndex, living: Collection[int]) -> Known:
    """Which fingerprints of a placement are known: those whose speaker lives."""
    if isinstance(placement, KeptPlacement) and placement.is_dealt:
        return np.ones((1, index.total), dtype=np.bool_)
    speakers = [
        owned_by(placement.plan, placement.model, index, r)
        for r in range(len(placement.plan.replicas))
    ]
    return np.isin(np.array(speakers), list(living))


def is_kept(before: Vectors, after: Vectors, known: Known) -> bool:
    """Whether content is what it was.

    A copy of which the fingerprint was known has it still; any other has that of a copy that was
    known. Where replicas came or went, all copies are held against all.
    """
    matches = np.equal(after[:, np.newaxis, :], before) & known
    found = matches.any(axis=1) | ~known.any(axis=0)
    if before.shape == after.shape:
        found &= np.equal(after, before) | ~known
    return bool(found.all())


def bytes_lower_bound(old: Sequence[Plane], new: Sequence[Plane], holders: Collection[int]) -> int:
    """Bytes that any change to these shares must move, over all planes and ranks.

    A plane that the job holds once has no choice of units left: what its keepers lack must move.

    Args:
        holders: ranks that hold what the old plan gave them.
    """
    total = 0
    for a, b in zip(old, new, strict=True):
        model = a.placement.model
        if isinstance(a.placement, KeptPlacement):
            todo = moves_between(a.placement.held, b.placement.held, model)
            total += sum(m.numel for m in todo) * plane_bytes(a)
        else:
            bound = elements_lower_bound(a.placement.plan, b.placement.plan, model, holders)
            total += bound * plane_bytes(a)
    return total
