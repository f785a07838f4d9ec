"""The verdict on fingerprints: who is named, by which evidence, and who is not."""

from __future__ import annotations

import numpy as np
import pytest

from ntp_core.observe import Blame
from ntp_core.runtime.compare import Difference, judge, replica_values

Rows = list[int]


def verdict(values: Rows, moved: Rows, held_by: tuple[int, ...] | None = None) -> list[Difference]:
    """Judge one block held by these ranks; `moved` lists the ranks whose bits changed at rest."""
    table = np.array([[v] for v in values], dtype=np.int64)
    changed = np.array([[r in moved] for r in range(len(values))])
    return list(judge(table, changed, [held_by or tuple(range(len(values)))]))


@pytest.mark.parametrize(
    ("values", "moved", "expected"),
    [
        ([7, 7], [], []),
        ([7, 8], [], [(Blame.UNDECIDED, None, None)]),
        ([7, 8], [1], [(Blame.AT_REST, 1, 0)]),
        ([8, 7], [0], [(Blame.AT_REST, 0, 1)]),
        ([7, 7], [1], [(Blame.AT_REST, 1, 0)]),
        ([7, 8], [0, 1], [(Blame.AT_REST, 0, None), (Blame.AT_REST, 1, None)]),
        ([7, 7, 8], [], [(Blame.MAJORITY, 2, 0)]),
        ([8, 7, 7], [], [(Blame.MAJORITY, 0, 1)]),
        ([7, 8, 9], [], [(Blame.UNDECIDED, None, None)]),
        ([7, 7, 8, 8], [], [(Blame.UNDECIDED, None, None)]),
        ([7, 8, 7, 9, 7], [], [(Blame.MAJORITY, 1, 0), (Blame.MAJORITY, 3, 0)]),
        ([8, 8, 7], [0, 1], [(Blame.AT_REST, 0, 2), (Blame.AT_REST, 1, 2)]),
        ([8, 7, 9], [0], [(Blame.AT_REST, 0, None)]),
    ],
)
def test_judge_names_by_rest_first_then_by_majority(
    values: Rows, moved: Rows, expected: list[tuple[Blame, int | None, int | None]]
) -> None:
    """Own change outranks any vote; two that merely differ, or a tie, name nobody."""
    assert expected == [(d.blame, d.rank, d.source) for d in verdict(values, moved)]


def test_judge_looks_at_holders_only() -> None:
    """What other ranks have in a block's place does not count."""
    assert verdict([7, 99, 7, 98], [1], held_by=(0, 2)) == []
    (found,) = verdict([7, 99, 8, 98], [2], held_by=(0, 2))
    assert (found.rank, found.source) == (2, 0)


def test_replica_values_add_each_block_once_modulo_64_bits() -> None:
    """The sum of the speakers' numbers wraps, and is signed."""
    table = np.array([[2**63 - 1, 5], [1, 9], [3, -4]], dtype=np.int64)
    assert replica_values(table, [[0, 1], [2, 2]]) == (-(2**63) + 8, -1)
