"""From the catalog to metric families: the only place that makes one.

A family can therefore not have a name, type, unit, label or help that the catalog does not give it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from sidecar.catalog import METRICS, Metric, MetricType
from sidecar.export.histograms import BucketCounts

Series = tuple[str, tuple[str, ...], float]
"""Name in the catalog, label values in the catalog's order, value."""

MAX_LABEL_CHARS = 128
"""Longer label values are cut and end in a digest of the whole, so that they stay distinct."""


def label_value(text: str) -> str:
    """A label value that can be encoded and has a bounded length.

    >>> label_value("demo-1")
    'demo-1'
    """
    clean = text.encode("utf-8", "replace").decode("utf-8")
    if len(clean) <= MAX_LABEL_CHARS:
        return clean
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean[: MAX_LABEL_CHARS - 9]}~{digest}"


class Families:
    """Every family of the catalog, empty at first. Fill it once, then hand it out."""

    def __init__(self) -> None:
        self._families = {m.name: _empty(m) for m in METRICS}

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        """One series of a counter, gauge or info. KeyError for a name the catalog lacks."""
        family = self._families[name]
        if isinstance(family, InfoMetricFamily):
            family.add_metric(labels, {})
        elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            family.add_metric(labels, value)
        else:
            raise TypeError(f"'{name}' is a {family.type}; add it with add_histogram")

    def add_all(self, series: Sequence[Series]) -> None:
        """Many series."""
        for name, labels, value in series:
            self.add(name, labels, value)

    def add_histogram(self, name: str, labels: Sequence[str], counts: BucketCounts) -> None:
        """One series of a histogram."""
        family = self._families[name]
        if not isinstance(family, HistogramMetricFamily):
            raise TypeError(f"'{name}' is a {family.type}; add it with add")
        family.add_metric(labels, counts.rows(), counts.total)

    def finish(self) -> tuple[Family, ...]:
        """All families in the catalog's order."""
        return tuple(self._families.values())


def _empty(m: Metric) -> Family:
    match m.type:
        case MetricType.COUNTER:
            return CounterMetricFamily(m.name, m.help, labels=m.labels, unit=m.unit)
        case MetricType.GAUGE:
            return GaugeMetricFamily(m.name, m.help, labels=m.labels, unit=m.unit)
        case MetricType.HISTOGRAM:
            return HistogramMetricFamily(m.name, m.help, labels=m.labels, unit=m.unit)
        case MetricType.INFO:
            return InfoMetricFamily(m.name, m.help, labels=m.labels)
