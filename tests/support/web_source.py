"""A web server over a snapshot that a test sets, and what it needs around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sidecar.web.app import create_app
from sidecar.web.server import WebServer
from sidecar.web.stream import StreamLimits
from tests.support.sample_state import sample_snapshot

REPORT = {"job_id": "demo-1", "steps": 41}
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"

QUICK = StreamLimits(interval_s=0.02)


class FixedSource:
    """Shows what `publish` was given last. Satisfies `SnapshotSource`."""

    def __init__(self, snapshot: dict[str, Any] | None = None) -> None:
        self.state = (1, sample_snapshot() if snapshot is None else snapshot)
        self.health_answer = (True, "")
        self.ready_answer = (True, "")

    def publish(self, snapshot: dict[str, Any]) -> None:
        """The next tick."""
        self.state = (self.state[0] + 1, snapshot)

    def snapshot(self) -> dict[str, Any]:
        return self.state[1]

    def version(self) -> int:
        return self.state[0]

    def health(self) -> tuple[bool, str]:
        return self.health_answer

    def ready(self) -> tuple[bool, str]:
        return self.ready_answer


def fixed_metrics(accept: str | None) -> tuple[bytes, str]:
    """Stands for the exporter: shows the Accept header that it was given."""
    return f"# {accept}\n".encode(), METRICS_TYPE


@contextlib.contextmanager
def serving(
    source: FixedSource,
    *,
    token: str | None = None,
    port: int = 0,
    limits: StreamLimits = QUICK,
) -> Iterator[WebServer]:
    """A real server on a free port of 127.0.0.1."""
    app = create_app(
        source, token=token, metrics=fixed_metrics, report=lambda: REPORT, limits=limits
    )
    server = WebServer(app, token=token, port=port)
    server.start()
    try:
        yield server
    finally:
        server.stop()
