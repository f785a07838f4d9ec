"""Reads PromQL: what an expression selects, and whether the catalog has it.

Used by the tests of dashboards and alerts. Prometheus's own series (`up`, `ALERTS`) and series that
our rules record count as known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as pp
import yaml

from sidecar.catalog import METRICS, Metric, MetricType

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "alerts"
TARGET_LABELS = {"job", "instance"}
PROMETHEUS_OWN = {
    "up": TARGET_LABELS,
    "ALERTS": {"alertname", "alertstate", "severity", "nutp_job", "rank"},
}
RATES = {"rate", "increase", "irate"}
_SUFFIXES = {
    MetricType.COUNTER: ("_total",),
    MetricType.GAUGE: ("",),
    MetricType.INFO: ("_info",),
    MetricType.HISTOGRAM: ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True, slots=True)
class Selected:
    """One selector: its metric, its label matchers, and the function directly around it."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]  # label, operator, value
    function: str | None


def substitute(expr: str) -> str:
    """The expression with Grafana's variables replaced by values that parse anywhere."""
    for name, value in (("__rate_interval", "5m"), ("__interval", "15s"), ("__range", "1h")):
        expr = expr.replace(f"[${name}]", f"[{value}]")
    return re.sub(r"\$\{?\w+\}?", ".+", expr)


def selectors(expr: str) -> list[Selected]:
    """Every selector of an expression."""
    return list(_selectors(pp.parse(substitute(expr)), None))


def grouping(expr: str) -> set[str]:
    """Every label named in by, without, on, ignoring and group_left."""
    labels: set[str] = set()
    for node in _nodes(pp.parse(substitute(expr))):
        modifier = getattr(node, "modifier", None)
        for part in (modifier, getattr(modifier, "matching", None)):
            labels |= set(getattr(part, "labels", None) or [])
        labels |= set(getattr(modifier, "group_labels", None) or [])
    return labels


def exposed() -> dict[str, tuple[Metric, set[str]]]:
    """Series name as scraped -> its metric and all labels it can carry."""
    table: dict[str, tuple[Metric, set[str]]] = {}
    for metric in METRICS:
        for suffix in _SUFFIXES[metric.type]:
            extra = {"le"} if suffix == "_bucket" else set()
            table[metric.name + suffix] = (metric, {*metric.labels, *TARGET_LABELS, *extra})
    return table


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of one kind, "record" or "alert"."""
    files = [yaml.safe_load(p.read_text()) for p in sorted(ALERTS.glob("*.rules.yml"))]
    return [r for f in files for g in f["groups"] for r in g["rules"] if kind in r]


def recorded() -> dict[str, set[str]]:
    """Recorded series -> the labels it can carry, derived from its expression."""
    known: dict[str, set[str]] = {}
    for rule in rules("record"):
        inputs = [_labels_of(s.metric, known) for s in selectors(rule["expr"])]
        level = set(re.findall(r"instance|nutp_job|replica|rank", rule["record"].split(":")[0]))
        known[rule["record"]] = {"job", *level} & set.union(*inputs)
    return known


def faults(expr: str) -> list[str]:
    """What an expression names that nobody exports: metrics, and labels of known metrics."""
    known, found = recorded(), []
    union: set[str] = set()
    for selected in selectors(expr):
        labels = _labels_of(selected.metric, known)
        if not labels:
            found.append(f"nobody exports {selected.metric}")
            continue
        union |= labels
        wrong = {label for label, _, _ in selected.matchers} - labels
        found += [f"{selected.metric} has no label {label}" for label in sorted(wrong)]
    strange = sorted(grouping(expr) - union) if union else []
    return found + [f"grouped by {label}, which no metric here has" for label in strange]


def _labels_of(metric: str, known: dict[str, set[str]]) -> set[str]:
    if metric in known:
        return known[metric]
    return exposed().get(metric, (None, PROMETHEUS_OWN.get(metric, set())))[1]


def _selectors(node: Any, function: str | None) -> Iterator[Selected]:
    if isinstance(node, pp.MatrixSelector):
        yield from _selectors(node.vector_selector, function)
    elif isinstance(node, pp.VectorSelector):
        matchers = tuple((m.name, str(m.op), m.value) for m in node.matchers.matchers)
        yield Selected(node.name or "", matchers, function)
    else:
        name = node.func.name if isinstance(node, pp.Call) else None
        for child in _children(node):
            yield from _selectors(child, name)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _children(node: Any) -> list[Any]:
    named = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
    return [c for c in [*named, *getattr(node, "args", [])] if c is not None]
