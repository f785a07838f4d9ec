"""What ranks hold under the plan in force, whatever replica they will serve next.

All replicas hold the same parameters, so a rank that changes its replica keeps its units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ntp_core.plan import Layout, Plan
from ntp_core.units import UnitKind

Layouts = dict[UnitKind, Layout]


class Held:
    """A plan, indexed by rank; empty where there is none."""

    def __init__(self, present: Plan | None) -> None:
        self._replicas = () if present is None else present.replicas
        self._kinds = () if present is None else tuple(present.counts)
        self._by_ranks = {r.ranks: r for r in self._replicas}
        self._places = {
            g: (index, i) for index, r in enumerate(self._replicas) for i, g in enumerate(r.ranks)
        }

    def layouts(self, ranks: Sequence[int]) -> Layouts:
        """Kind -> units of these ranks, each unit once; a rank without place holds nothing."""
        same = self._by_ranks.get(tuple(ranks))
        if same is not None:
            return dict(same.layouts)
        return {kind: self._layout(kind, ranks) for kind in self._kinds}

    def _layout(self, kind: UnitKind, ranks: Sequence[int]) -> Layout:
        taken: set[int] = set()
        held: list[list[int]] = []
        for g in ranks:
            index, tp_rank = self._places.get(g, (-1, -1))
            units = self._replicas[index].layouts[kind].units(tp_rank) if index >= 0 else ()
            held.append([u for u in units if u not in taken])
            taken.update(units)
        return Layout.of_units(held)

    def batch(self, ranks: Sequence[int]) -> int:
        """Batch of the replica that most of these ranks come from, 0 when all are new."""
        homes = Counter(self._places[g][0] for g in ranks if g in self._places)
        return self._replicas[homes.most_common(1)[0][0]].batch if homes else 0
