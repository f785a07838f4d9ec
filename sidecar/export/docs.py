"""The reference page of metrics, spans and checks, made from the catalog.

python -m sidecar.export.docs > docs/metrics.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from sidecar.catalog import (
    CHECKS,
    METRICS,
    SPAN_CHANGE,
    SPAN_PHASES,
    SPAN_RANK_TRANSFER,
    Metric,
    MetricType,
)
from sidecar.export.otel import ATTRIBUTES
from sidecar.export.prometheus import MAX_RANKS

_INTRO = f"""\
# Metrics, spans and checks

<!-- Generated: python -m sidecar.export.docs > docs/metrics.md -->

`GET /metrics` answers in the Prometheus text format 0.0.4, or in OpenMetrics 1.0 with exemplars
where the scraper's `Accept` header asks for it.

- A value that is not known has no series. It is never 0 instead.
- A dead rank stays: `nutp_rank_up` is 0 and `nutp_rank_progress_age_seconds` grows.
- Counters go on when a rank starts again under a new process id.
- Series of at most {MAX_RANKS} ranks are exposed (`max_ranks`); the rest is counted in
  `nutp_sidecar_series_dropped_total`.
- `nutp_step_seconds` counts each step of a replica once. Its exemplars, and those of
  `nutp_allocation_change_seconds`, hold `trace_id` and `span_id` of an allocation change: the
  newest one that affected the step.
- Steps, digests and messages are never labels.

## Metrics
"""

_SPANS = """\
## Spans

One trace for each allocation change, sent over OTLP/HTTP when `OTEL_EXPORTER_OTLP_ENDPOINT` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set. The other standard `OTEL_*` variables are honoured.
A change that was rolled back, failed or never ended has the span status error.
"""

_CHECKS = """\
## Checks

Each check judges with every tick. What it finds becomes an incident, and the alert below fires.
"""


def page() -> str:
    """The whole page, with a newline at its end."""
    parts = [
        _INTRO,
        _table(("Name", "Type", "Unit", "Labels", "Meaning"), map(_metric_row, METRICS)),
        _buckets(),
        _SPANS,
        _table(("Span", "Under"), _span_rows()),
        _table(
            ("Attribute", "On", "Meaning"), ((f"`{a}`", on, text) for a, on, text in ATTRIBUTES)
        ),
        _CHECKS,
        _table(
            ("Check", "Family", "Alert", "Meaning"),
            ((f"`{c.name}`", c.family, _runbook(c.alert), c.help) for c in CHECKS),
        ),
    ]
    return "\n".join(parts)


def exposed_name(m: Metric) -> str:
    """The name that a query uses."""
    suffix = {MetricType.COUNTER: "_total", MetricType.INFO: "_info"}.get(m.type, "")
    return m.name + suffix


def _metric_row(m: Metric) -> tuple[str, ...]:
    labels = " ".join(f"`{label}`" for label in m.labels)
    return f"`{exposed_name(m)}`", str(m.type), m.unit, labels, m.help


def _buckets() -> str:
    lines = [
        f"Buckets of `{m.name}`, in seconds: {', '.join(f'{b:g}' for b in m.buckets)}.\n"
        for m in METRICS
        if m.buckets
    ]
    return "\n".join(lines)


def _span_rows() -> list[tuple[str, str]]:
    rows = [(f"`{SPAN_CHANGE}`", "root")]
    rows += [(f"`{name}`", f"`{SPAN_CHANGE}`") for name in SPAN_PHASES]
    return [*rows, (f"`{SPAN_RANK_TRANSFER}`", "`nutp.transfer`, one for each rank")]


def _runbook(alert: str) -> str:
    return f"[{alert}](../alerts/runbooks/{alert}.md)"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
