"""A /metrics page with every metric of the catalog, for a job whose numbers a test sets.

It stands in for a sidecar where only the chain behind it is under test. Counters grow with time, so
that rates exist; what a healthy job does not have (dead ranks, mismatches, losses) stays at 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from threading import Thread

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from sidecar.catalog import CHECKS, METRICS, Metric, MetricType

RANKS = 4
LABELS: dict[str, tuple[str, ...]] = {
    "nutp_job": ("run-1",),
    "rank": tuple(str(r) for r in range(RANKS)),
    "replica": ("0", "1"),
    "tp_rank": ("0",),
    "version": ("0.0.0",),
    "state": ("alive", "dead", "exited"),
    "phase": ("forward", "backward"),
    "op": ("all_reduce",),
    "reason": ("rank_slow",),
    "status": ("committed",),
    "check": tuple(c.name for c in CHECKS),
    "severity": ("warning",),
}
"""Values of each label; a label that the catalog adds later gets one value."""

ZERO = {
    "nutp_replica_mismatches",
    "nutp_probe_events_lost",
    "nutp_sidecar_tick_errors",
    "nutp_sidecar_bad_rings",
    "nutp_sidecar_bad_records",
    "nutp_sidecar_series_dropped",
    "nutp_incidents_firing",
    "nutp_incidents",
}


class CatalogPage:
    """The job. `slow_rank` is the one that is slow, or None.

    Attributes:
        url: where it is scraped, under the bearer token.
    """

    def __init__(self, token: str) -> None:
        self.slow_rank: int | None = None
        self._started_s = time.monotonic()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._registry, token))
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Harmless the second time."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[object]:
        """The page's families (prometheus_client's collector protocol)."""
        for metric in METRICS:
            keys = product(*(LABELS.get(label, ("other",)) for label in metric.labels))
            yield self._family(metric, [list(k) for k in keys])

    def _family(self, metric: Metric, keys: list[list[str]]) -> object:
        elapsed_s = time.monotonic() - self._started_s
        match metric.type:
            case MetricType.COUNTER:
                family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
                for key in keys:
                    family.add_metric(key, 0.0 if metric.name in ZERO else elapsed_s)
            case MetricType.GAUGE:
                family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for key in keys:
                    family.add_metric(key, self._gauge(metric, key))
            case MetricType.INFO:
                family = InfoMetricFamily(metric.name, metric.help)
                for key in keys:
                    family.add_metric([], dict(zip(metric.labels, key, strict=True)))
            case MetricType.HISTOGRAM:
                family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for key in keys:
                    buckets = [(str(b), elapsed_s) for b in metric.buckets] + [("+Inf", elapsed_s)]
                    family.add_metric(key, buckets, sum_value=0.1 * elapsed_s)
        return family

    def _gauge(self, metric: Metric, key: list[str]) -> float:
        named = dict(zip(metric.labels, key, strict=True))
        match metric.name:
            case "nutp_rank_slowness_ratio":
                return 3.1 if named["rank"] == str(self.slow_rank) else 1.0
            case "nutp_rank_share_ratio":
                return 1 / RANKS
            case "nutp_job_ranks":
                return float(RANKS) if named["state"] == "alive" else 0.0
            case "nutp_sidecar_last_tick_timestamp_seconds":
                return time.time()
            case name:
                return 0.0 if name in ZERO else 1.0


def _handler(registry: CollectorRegistry, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {token}"
            body = generate_latest(registry) if known else b""
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
