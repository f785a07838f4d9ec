"""The verdict on fingerprints: who is named, by which evidence, and who is not."""

from __future__ import annotations

import numpy as np
import pytest

from ntp_core.observe import Blame
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.compare import Difference, holders, judge, replica_values
from ntp_core.runtime.shards import Placement
from ntp_core.units import ModelUnits, TensorSpec, UnitKind

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


def test_holders_are_all_who_hold_a_copy() -> None:
    """Of a block that units share all its holders, of a cut one its owners, of a whole one all."""
    tensors = (
        TensorSpec(name="gain", shape=(3,)),
        TensorSpec(name="q", shape=(4, 2), kind=UnitKind.ATTENTION),
        TensorSpec(name="k", shape=(2, 2), kind=UnitKind.ATTENTION, sharing=2),
    )
    model = ModelUnits(counts={UnitKind.ATTENTION: 4}, tensors=tensors)
    replicas = [
        ReplicaPlan(ranks=ranks, layouts={UnitKind.ATTENTION: Layout.contiguous(s)}, batch=1)
        for ranks, s in (((2, 0), (3, 1)), ((1,), (4,)))
    ]
    placement = Placement(model, Plan.build(model.counts, replicas), 0)
    q = [(2, 1), (2, 1), (2, 1), (0, 1)]
    assert [(0, 1, 2), *q, (2, 1), (2, 0, 1)] == holders(placement)
