"""Bucket counts of a histogram, fed value by value, with the newest exemplar of each bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.samples import Exemplar

Row = tuple[str, float] | tuple[str, float, Exemplar]


class BucketCounts:
    """Counts of values by upper bound (inclusive). The memory does not grow with the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._names = (*(str(float(b)) for b in self._bounds), "+Inf")
        self._counts = [0] * len(self._names)
        self._exemplars: list[Exemplar | None] = [None] * len(self._names)
        self.total = 0.0

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Count one value."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self.total += value
        if exemplar is not None:
            self._exemplars[index] = exemplar

    def rows(self) -> list[Row]:
        """Cumulative rows as prometheus_client takes them."""
        sums = accumulate(self._counts)
        return [
            (name, float(count)) if exemplar is None else (name, float(count), exemplar)
            for name, count, exemplar in zip(self._names, sums, self._exemplars, strict=True)
        ]
