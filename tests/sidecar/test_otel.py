"""Traces over a real OTLP/HTTP receiver, and the standard variables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry import trace

from ntp_core.errors import InvalidInput
from ntp_core.observe import ChangeStatus
from sidecar.export.otel import ATTRIBUTES, SETTLE_NS, ChangeTracer
from sidecar.ingest.spans import phase_spans, root_span_id, trace_id_of
from sidecar.ingest.state import JobState
from tests.support import filled
from tests.support.filled import MS, NOW_NS, UNIX_OFFSET_NS
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.servers import free_port

ROOT = Path(__file__).parents[2]
NUM_SPANS = 1 + 7 + 3  # the change, its phases, three transfers


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the machine that runs the tests counts."""
    for name in [n for n in os.environ if n.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def job_with(*changes) -> JobState:
    return JobState(job_id="demo-1", changes=list(changes))


def exported(monkeypatch, *changes, **variables: str):
    """Spans that arrive at a receiver for these changes."""
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        tracer = ChangeTracer.from_environment()
        assert tracer.finish(job_with(*changes), UNIX_OFFSET_NS) == len(changes)
        assert tracer.shutdown()
        return receiver.wait_for(lambda s: len(s) == NUM_SPANS * len(changes)), receiver.requests


def test_change_arrives_as_one_tree_with_its_times_and_attributes(monkeypatch) -> None:
    """The wire has the root, its phases and the transfers of each rank, in unix time."""
    change = filled.change()
    spans, _ = exported(monkeypatch, change)
    trace_id = trace_id_of("demo-1", change)
    by_id = {s.span_id: s for s in spans}
    assert {s.trace_id for s in spans} == {trace_id}
    root = by_id[root_span_id(trace_id)]
    assert (root.name, root.parent_id, root.status) == ("nutp.allocation_change", "", "ok")
    assert root.start_ns == change.begin_ns - 50 * MS + UNIX_OFFSET_NS
    assert root.end_ns == max(change.end_ns, *(s.end_ns for s in change.spans)) + UNIX_OFFSET_NS
    assert root.attributes == {
        "nutp.job": "demo-1",
        "nutp.step": 9,
        "nutp.change.reason": "rank_slow",
        "nutp.change.status": "committed",
        "nutp.change.incident": "inc-1",
        "nutp.plan.from": "a" * 16,
        "nutp.plan.to": "b" * 16,
        "nutp.plan.epoch": 2,
        "nutp.bytes.moved": 1000,
        "nutp.bytes.lower_bound": 1000,
        "nutp.units.verified": 700,
        "nutp.verified": True,
    }
    phases = [s for s in spans if s.parent_id == root.span_id]
    assert {s.name: (s.start_ns, s.end_ns) for s in phases} == {
        n.name: (n.begin_ns + UNIX_OFFSET_NS, n.end_ns + UNIX_OFFSET_NS)
        for n in phase_spans(change)
    }
    ranks = [s for s in spans if by_id.get(s.parent_id, root).name == "nutp.transfer"]
    assert {s.attributes["nutp.rank"]: s.attributes["nutp.bytes.received"] for s in ranks} == {
        0: 600,
        1: 300,
        2: 100,
    }
    assert {a for s in spans for a in s.attributes} <= {name for name, _, _ in ATTRIBUTES}
    assert root.resource["service.name"] == "ntp-sidecar"


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (ChangeStatus.ROLLED_BACK, "rolled_back"),
        (ChangeStatus.FAILED, "failed"),
        (None, "unfinished"),
    ],
)
def test_change_that_was_not_committed_is_an_error(monkeypatch, status, word) -> None:
    """The root says error and why; it is not verified."""
    spans, _ = exported(monkeypatch, filled.change(status=status))
    root = next(s for s in spans if not s.parent_id)
    assert root.status == "error"
    assert root.attributes["error.type"] == root.attributes["nutp.change.status"] == word
    assert root.attributes["nutp.verified"] is False


def test_standard_variables_reach_the_wire(monkeypatch) -> None:
    """Service name, resource attributes, headers and gzip are the environment's."""
    spans, requests = exported(
        monkeypatch,
        filled.change(),
        OTEL_SERVICE_NAME="my-job",
        OTEL_RESOURCE_ATTRIBUTES="service.version=9.9,cluster=c1",
        OTEL_EXPORTER_OTLP_HEADERS="x-team=infra",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
    )
    resource = spans[0].resource
    assert resource["service.name"] == "my-job"
    assert (resource["service.version"], resource["cluster"]) == ("9.9", "c1")
    assert (requests[0]["x-team"], requests[0]["content-encoding"]) == ("infra", "gzip")


def test_traces_endpoint_is_used_as_it_is(monkeypatch) -> None:
    """The signal's own variable is the full address."""
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/v1/traces")
        tracer = ChangeTracer.from_environment()
        tracer.export("demo-1", filled.change(), UNIX_OFFSET_NS)
        assert tracer.shutdown()
        receiver.wait_for(lambda s: len(s) == NUM_SPANS)


@pytest.mark.parametrize(
    ("variables", "enabled"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_SDK_DISABLED": "no", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_environment_decides_whether_spans_are_sent(variables, enabled) -> None:
    """Nothing is sent unless asked for, and never when it is switched off."""
    tracer = ChangeTracer.from_environment(variables)
    assert tracer.enabled is enabled
    assert tracer.shutdown()


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
    ],
)
def test_exporter_that_is_not_built_in_is_refused(variables) -> None:
    """The message names the variable, its value and the fix."""
    name, value = list(variables.items())[-1]
    with pytest.raises(InvalidInput, match=f"{name}='{value}'.*set "):
        ChangeTracer.from_environment(variables)


def test_trace_id_is_known_before_the_export_and_without_one() -> None:
    """Following a job gives its changes their ids, exporter or not, once and for all."""
    job = job_with(filled.change(status=None))
    tracer = ChangeTracer.from_environment({})
    assert tracer.follow(job, NOW_NS, UNIX_OFFSET_NS) == 0
    assert job.changes[0].trace_id == trace_id_of("demo-1", job.changes[0])
    job.changes[0].trace_id = "c" * 32
    tracer.follow(job, NOW_NS, UNIX_OFFSET_NS)
    assert job.changes[0].trace_id == "c" * 32


def test_change_is_exported_once_after_it_settled() -> None:
    """Not while it runs, not before other ranks' records had time to come, and not twice."""
    change = filled.change()
    job = job_with(change)
    tracer = ChangeTracer.from_environment({})
    last_ns = max(change.end_ns, *(s.end_ns for s in change.spans))
    assert tracer.follow(job, last_ns + SETTLE_NS - 1, UNIX_OFFSET_NS) == 0
    assert tracer.follow(job, last_ns + SETTLE_NS, UNIX_OFFSET_NS) == 1
    assert tracer.follow(job, NOW_NS, UNIX_OFFSET_NS) == 0
    assert tracer.finish(job, UNIX_OFFSET_NS) == 0


def test_change_overtaken_by_a_newer_one_is_exported_as_unfinished() -> None:
    """Its driver died: when the next change has ended, this one will not end any more."""
    lost, newer = filled.change(status=None), filled.change(epoch=3)
    newer.begin_ns += 1000 * MS
    newer.end_ns += 1000 * MS
    tracer = ChangeTracer.from_environment({})
    assert tracer.follow(job_with(lost), NOW_NS, UNIX_OFFSET_NS) == 0
    assert tracer.follow(job_with(lost, newer), NOW_NS, UNIX_OFFSET_NS) == 2


def test_global_provider_is_left_alone(monkeypatch) -> None:
    """The process's own tracing is neither used nor replaced."""
    before = trace.get_tracer_provider()
    exported(monkeypatch, filled.change())
    assert trace.get_tracer_provider() is before


def test_silent_endpoint_delays_neither_tick_nor_exit(monkeypatch) -> None:
    """Handing over a change returns at once, and shutdown within its limit."""
    with OtlpReceiver(hang=True) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        tracer = ChangeTracer.from_environment()
        begin = time.monotonic()
        for epoch in range(2, 40):
            tracer.export("demo-1", filled.change(epoch=epoch), UNIX_OFFSET_NS)
        assert time.monotonic() - begin < 1
        begin = time.monotonic()
        assert tracer.shutdown(0.3) is False
        assert time.monotonic() - begin < 2


@pytest.mark.parametrize("hang", [False, True])
def test_process_exits_in_time_with_an_endpoint_that_does_not_answer(hang) -> None:
    """A whole process with a refused or silent endpoint ends by itself, with status 0."""
    program = (
        "from tests.support import filled\n"
        "from sidecar.export.otel import ChangeTracer\n"
        "import time\n"
        "t = ChangeTracer.from_environment()\n"
        "t.export('j', filled.change(), 0)\n"
        "begin = time.monotonic()\n"
        "t.shutdown()\n"
        "assert time.monotonic() - begin < 2.5\n"
    )
    with OtlpReceiver(hang=True) as receiver:
        url = receiver.url if hang else f"http://127.0.0.1:{free_port()}"
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"OTEL_EXPORTER_OTLP_ENDPOINT": url, "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 0, result.stderr
