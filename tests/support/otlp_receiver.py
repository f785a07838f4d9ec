"""An OTLP/HTTP trace receiver: parses ExportTraceServiceRequest, plain or gzip."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: str
    resource: dict[str, Any]
    events: tuple[str, ...]


class OtlpReceiver:
    """Listens on loopback. With `hang` it takes requests and never answers before it is closed."""

    def __init__(self, *, hang: bool = False) -> None:
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self._closing = threading.Event()
        self.requests: list[dict[str, str]] = []  # headers of each
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, hang))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """Base address, for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(
        self, condition: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 20
    ) -> list[ReceivedSpan]:
        """Wait until the spans received meet a condition."""
        with self._changed:
            met = self._changed.wait_for(lambda: condition(self._spans), timeout_s)
            spans = list(self._spans)
        assert met, f"not met in {timeout_s} s; received {[s.name for s in spans]}"
        return spans

    def wait_closing(self) -> None:
        """Block until the receiver is closed."""
        self._closing.wait(60)

    def take(self, headers: dict[str, str], body: bytes) -> None:
        """One request."""
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        spans = [
            _span(span, resource.resource)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.requests.append(headers)
            self._spans.extend(spans)
            self._changed.notify_all()


def _handler(receiver: OtlpReceiver, hang: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {k.lower(): v for k, v in self.headers.items()}
            body = self.rfile.read(int(headers["content-length"]))
            if hang:
                receiver.wait_closing()
                return
            assert self.path == "/v1/traces", self.path
            receiver.take(headers, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    return Handler


def _span(span: Any, resource: Any) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        status={0: "unset", 1: "ok", 2: "error"}[span.status.code],
        resource=_attributes(resource.attributes),
        events=tuple(e.name for e in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {p.key: getattr(p.value, p.value.WhichOneof("value")) for p in pairs}
