"""What counts as unchanged content after a change, decided by hand on small tables."""

from __future__ import annotations

import numpy as np
import pytest

from ntp_core.reshard import elements_lower_bound
from ntp_core.runtime.change_check import is_kept, known_of
from ntp_core.runtime.content import BlockIndex
from ntp_core.runtime.shards import Placement
from tests.support.tiny_job import GROUPED, even

A, B, WRONG = 11, 22, 99

CASES = [
    # before, known, after, kept
    ([[A, B], [A, B]], [[1, 1], [1, 1]], [[A, B], [A, B]], True),
    ([[A, B], [A, B]], [[1, 1], [1, 1]], [[A, B], [A, WRONG]], False),
    ([[A, B], [A, 0]], [[1, 1], [1, 0]], [[A, B], [A, B]], True),  # the lost one is brought back
    ([[A, B], [A, 0]], [[1, 1], [1, 0]], [[A, B], [A, 0]], False),  # nothing was brought
    ([[A, 0], [0, B]], [[1, 0], [0, 1]], [[A, B], [A, B]], True),
    ([[A, B], [A, B]], [[1, 1], [1, 1]], [[A, B]], True),  # a replica went
    ([[A, B], [A, B]], [[1, 1], [1, 1]], [[A, WRONG]], False),
    ([[A, B]], [[1, 1]], [[A, B], [A, B]], True),  # one came
    ([[A, B]], [[1, 1]], [[A, B], [B, A]], False),
    ([[A, B], [A, WRONG]], [[1, 1], [1, 1]], [[A, B], [A, WRONG]], True),  # they differed before
    ([[A, B], [A, WRONG]], [[1, 1], [1, 1]], [[A, WRONG], [A, B]], False),  # each keeps its own
]


@pytest.mark.parametrize(("before", "known", "after", "kept"), CASES)
def test_kept_means_what_was_known_is_there_again(
    before: list[list[int]], known: list[list[int]], after: list[list[int]], kept: bool
) -> None:
    """Two blocks, one or two copies."""
    tables = np.array(before), np.array(after), np.array(known, dtype=np.bool_)
    assert is_kept(*tables) is kept


def test_known_are_the_blocks_whose_speaker_lives() -> None:
    """Counted block by block from the plan."""
    units, plan = GROUPED.units(), even(GROUPED, (3, 2), (3, 2))
    index = BlockIndex(units)
    known = known_of(Placement(units, plan, 0), index, {0, 2, 3, 4})
    for number, t in enumerate(units.tensors):
        blocks = 1 if t.kind is None else units.counts[t.kind] // t.sharing
        for b in range(blocks):
            owner = 0 if t.kind is None else None
            if t.kind is not None:
                layout = plan.replicas[0].layout(t.kind, t.layer)
                owner = plan.replicas[0].ranks[layout.owners(units.counts[t.kind])[b * t.sharing]]
            assert known[0, index.start[number] + b] == (owner != 1)
    assert known[1].all()


def test_bound_counts_a_rank_that_is_back_under_its_number_as_empty() -> None:
    """It died: all it gets must move, whole tensors too."""
    units, plan = GROUPED.units(), even(GROUPED, (3, 2), (3, 2))
    assert elements_lower_bound(plan, plan, units) == 0
    held = [t.numel if t.kind is None else 0 for t in units.tensors]
    cut = sum(
        s.shape[0] * (s.shape[1] if len(s.shape) > 1 else 1)
        for s in Placement(units, plan, 1).shards
        if s.spec.kind is not None
    )
    bound = elements_lower_bound(plan, plan, units, {0, 2, 3, 4})
    assert bound == sum(held) + cut
