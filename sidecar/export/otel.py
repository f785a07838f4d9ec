"""Allocation changes as traces, through opentelemetry-sdk, over OTLP/HTTP.

A change is exported after the fact, as one tree of spans with explicit times. Its ids are known
beforehand (`sidecar.ingest.spans`). The provider is private: a global one, if the process has any,
is neither used nor replaced. Spans are handed to a background thread; an endpoint that does not
answer delays neither the daemon's tick nor, by more than a limit, its exit.

Honoured: OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (none, console, otlp), and by the SDK itself
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER, OTEL_BSP_*
and OTEL_SPAN_*_LIMIT.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from ntp_core.errors import InvalidInput
from ntp_core.observe import ChangeStatus
from sidecar import __version__
from sidecar.catalog import SPAN_CHANGE
from sidecar.ingest.spans import (
    SpanNode,
    is_verified,
    phase_spans,
    root_span_id,
    span_id_of,
    start_ns,
    stop_ns,
    trace_id_of,
)
from sidecar.ingest.state import Change, JobState

SETTLE_NS = 2_000_000_000
"""Wait between a change's end and its export: other ranks' last phases may be on the way."""

EVENT_KILL = "nutp.rank.killed"
"""On the span of a change: the sidecar killed a rank that stood still, and the job answered."""
EXIT_TIMEOUT_S = 2.0

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

ATTRIBUTES: tuple[tuple[str, str, str], ...] = (
    ("nutp.job", "change", "Id of the job."),
    ("nutp.step", "change", "Step after which the change started."),
    ("nutp.change.reason", "change", "Why: start, rank_died, rank_slow, ..."),
    ("nutp.change.status", "change", "How it ended: committed, rolled_back, failed, unfinished."),
    ("nutp.change.incident", "change", "Id of the incident that caused it, if one did."),
    ("nutp.change.error", "change", "Why the sidecar ended it, where no rank was left to."),
    ("nutp.plan.from", "change", "Digest of the plan before."),
    ("nutp.plan.to", "change", "Digest of the plan after."),
    ("nutp.plan.epoch", "change", "Epoch of the plan after."),
    ("nutp.bytes.moved", "change", "Bytes that moved, over all ranks."),
    ("nutp.bytes.lower_bound", "change", "Bytes that had to move."),
    ("nutp.units.verified", "change", "Units compared before and after."),
    ("nutp.verified", "change", "True when it is in force and its units were compared."),
    ("error.type", "change", "The status, where it is not committed."),
    ("nutp.bytes.received", "phase, rank", "Bytes received in it."),
    ("nutp.rank", "rank", "Global rank."),
)
"""Attributes of the spans: name, on which span, meaning."""


class ChangeTracer:
    """Exports allocation changes. Not thread-safe: one thread, the daemon's, calls it.

    Args:
        exporter: where spans go; None exports nothing.
    """

    def __init__(self, exporter: SpanExporter | None) -> None:
        self._exporter = exporter
        self._ids = _GivenIds()
        self._provider: TracerProvider | None = None
        if exporter is not None:
            self._provider = TracerProvider(
                resource=_resource(), id_generator=self._ids, shutdown_on_exit=False
            )
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exported: dict[str, set[tuple[int, int]]] = {}  # job -> epoch, begin

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ChangeTracer:
        """The tracer that the standard variables ask for.

        Raises:
            InvalidInput: for an exporter or a protocol that is not built in.
        """
        return cls(_exporter(environ))

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    def follow(self, job: JobState, now_ns: int, unix_offset_ns: int) -> int:
        """Give every new change its trace id, and export those that have ended and settled.

        A change without end is exported when a newer one has ended, as unfinished. Memory: one
        entry a change that the state still holds.

        Args:
            now_ns: monotonic clock.
            unix_offset_ns: what to add to it for unix time.

        Returns:
            Number of changes exported by this call.
        """
        done = self._exported.setdefault(job.job_id, set())
        ended = [c.begin_ns for c in job.changes if c.end_ns is not None]
        count = 0
        for change in job.changes:
            if change.trace_id is None:
                change.trace_id = trace_id_of(job.job_id, change)
            over = change.end_ns is not None or any(t > change.begin_ns for t in ended)
            if over and stop_ns(change) + SETTLE_NS <= now_ns:
                count += self._once(job.job_id, change, unix_offset_ns)
        done &= {(c.epoch, c.begin_ns) for c in job.changes}
        return count

    def finish(self, job: JobState, unix_offset_ns: int) -> int:
        """Export all changes that are left, ended or not: the job or the sidecar stops."""
        self._exported.setdefault(job.job_id, set())
        return sum(self._once(job.job_id, c, unix_offset_ns) for c in job.changes)

    def _once(self, job_id: str, change: Change, unix_offset_ns: int) -> int:
        key = (change.epoch, change.begin_ns)
        if key in self._exported[job_id]:
            return 0
        self._exported[job_id].add(key)
        self.export(job_id, change, unix_offset_ns)
        return 1

    def export(self, job_id: str, change: Change, unix_offset_ns: int) -> None:
        """Hand one change to the exporter as a trace. Returns at once."""
        if self._provider is None:
            return
        trace_id = change.trace_id or trace_id_of(job_id, change)
        tracer = self._provider.get_tracer("sidecar.export.otel", __version__)
        self._ids.give(trace_id, root_span_id(trace_id))
        root = tracer.start_span(
            SPAN_CHANGE,
            start_time=start_ns(change) + unix_offset_ns,
            attributes=change_attributes(job_id, change),
        )
        root.set_status(change_status(change))
        for kill in change.kills:
            said = {"nutp.rank": kill.rank, "nutp.stopped.seconds": kill.stopped_s}
            root.add_event(EVENT_KILL, said, kill.t_ns + unix_offset_ns)
        self._export_children(trace_id, root, phase_spans(change), unix_offset_ns)
        root.end(stop_ns(change) + unix_offset_ns)

    def _export_children(
        self, trace_id: str, parent: Span, nodes: Iterable[SpanNode], unix_offset_ns: int
    ) -> None:
        assert self._provider is not None
        tracer = self._provider.get_tracer("sidecar.export.otel", __version__)
        for node in nodes:
            self._ids.give(trace_id, span_id_of(trace_id, node.name, node.rank))
            attributes: dict[str, AttributeValue] = {"nutp.bytes.received": node.num_bytes}
            if node.rank is not None:
                attributes["nutp.rank"] = node.rank
            span = tracer.start_span(
                node.name,
                context=set_span_in_context(parent),
                start_time=node.begin_ns + unix_offset_ns,
                attributes=attributes,
            )
            self._export_children(trace_id, span, node.children, unix_offset_ns)
            span.end(node.end_ns + unix_offset_ns)

    def shutdown(self, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
        """Send what waits, for at most `timeout_s`. False when the endpoint did not take it."""
        if self._provider is None or self._exporter is None:
            return True
        # The SDK's own shutdown waits up to 30 s; a daemon thread can be left behind instead.
        thread = threading.Thread(target=self._provider.shutdown, name="otel-exit", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not thread.is_alive():
            return True
        self._exporter.shutdown()  # ends its waits between attempts
        return False


def change_attributes(job_id: str, change: Change) -> dict[str, AttributeValue]:
    """Attributes of the root span."""
    status = "unfinished" if change.status is None else change.status.name.lower()
    attributes: dict[str, AttributeValue] = {
        "nutp.job": job_id,
        "nutp.step": change.step,
        "nutp.change.reason": change.reason.name.lower(),
        "nutp.change.status": status,
        "nutp.plan.from": change.old_digest,
        "nutp.plan.to": change.new_digest,
        "nutp.plan.epoch": change.epoch,
        "nutp.bytes.moved": change.bytes_moved,
        "nutp.bytes.lower_bound": change.bytes_lower_bound,
        "nutp.units.verified": change.units_verified,
        "nutp.verified": is_verified(change),
    }
    if change.incident is not None:
        attributes["nutp.change.incident"] = change.incident
    if change.error:
        attributes["nutp.change.error"] = change.error
    if change.status is not ChangeStatus.COMMITTED:
        attributes["error.type"] = status
    return attributes


def change_status(change: Change) -> Status:
    """Span status: an error unless the change was committed."""
    match change.status:
        case ChangeStatus.COMMITTED:
            return Status(StatusCode.OK)
        case ChangeStatus.ROLLED_BACK:
            return Status(StatusCode.ERROR, "rolled back to the plan before")
        case ChangeStatus.FAILED:
            return Status(StatusCode.ERROR, change.error or "failed")
        case None:
            return Status(StatusCode.ERROR, "never ended")


class _GivenIds(IdGenerator):
    """Hands out the ids that were given for the next span."""

    def __init__(self) -> None:
        self._trace_id = self._span_id = 1

    def give(self, trace_id: str, span_id: str) -> None:
        self._trace_id, self._span_id = int(trace_id, 16), int(span_id, 16)

    def generate_trace_id(self) -> int:
        return self._trace_id

    def generate_span_id(self) -> int:
        return self._span_id


def _exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    chosen = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if not chosen:
        chosen = "otlp" if any(environ.get(name) for name in _ENDPOINTS) else "none"
    if chosen == "none":
        return None
    if chosen == "console":
        return ConsoleSpanExporter()
    if chosen != "otlp":
        raise InvalidInput(f"OTEL_TRACES_EXPORTER='{chosen}': set otlp, console or none")
    _check_protocol(environ)
    return OTLPSpanExporter(endpoint=_traces_url(environ))


def _traces_url(environ: Mapping[str, str]) -> str | None:
    """Where traces go by these variables; None leaves it to the SDK, which reads the process' own.

    Source: https://opentelemetry.io/docs/specs/otel/protocol/exporter/#endpoint-urls-for-otlphttp
    """
    traces, base = (environ.get(name, "") for name in _ENDPOINTS)
    if traces or not base:
        return traces or None
    return f"{base.rstrip('/')}/v1/traces"


def _check_protocol(environ: Mapping[str, str]) -> None:
    for name in _PROTOCOLS:
        value = environ.get(name, "").strip()
        if value and value != "http/protobuf":
            raise InvalidInput(
                f"{name}='{value}' is not built in: set http/protobuf and the endpoint's HTTP port "
                "(mostly 4318)"
            )
        if value:
            return


def _resource() -> Resource:
    """The environment's resource; our name and version where it gives none."""
    resource = Resource.create()
    own: dict[str, AttributeValue] = {}
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        own[SERVICE_NAME] = "ntp-sidecar"
    if SERVICE_VERSION not in resource.attributes:
        own[SERVICE_VERSION] = __version__
    return resource.merge(Resource(own))
