"""Records with any numbers in them, through everything that reads state: nothing fails, all that
comes out can be read, and one absurd record blinds no more than itself."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from ntp_core.observe import Op, Reason, Value
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import ModelUnits, TensorSpec, UnitKind
from sidecar.config import load
from sidecar.daemon import Daemon
from sidecar.export.prometheus import Exporter
from sidecar.export.selfstats import JobView, SidecarStats
from sidecar.ingest.job import JobIngest
from sidecar.ingest.slowness import slowness
from sidecar.ingest.state import JobState
from sidecar.notify.events import WebhookFormat, change_event
from sidecar.report import RunFacts, build_report
from sidecar.view import snapshot_view
from sidecar.watch import JobWatch, build_watch
from sidecar.web.guard import json_response
from sidecar.web.openapi import openapi_document
from sidecar.web.stream import SnapshotStream, StreamLimits
from sidecar.wire.ring import RingWriter, make_emit
from sidecar.wire.schema import Kind, digest_to_int
from tests.support.rings import ring_in, run_dir_in
from tests.support.servers import wait_until
from tests.support.web_source import FixedSource

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
INTS = (0, 1, -1, 5, 2**31 - 1, -(2**31), 2**53, 2**62, -(2**62), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 5e-324, 0.5, 1.0, 1.5, -1.0, 1e308, math.inf, -math.inf, math.nan)
CODES = (0, 1, 2, 7, 15, 16, 99, 65534, 65535)

Fields = dict[str, Any]


def plan_text() -> tuple[str, str]:
    """Digest and file of a plan of three ranks, its model's tensors named in broken text."""
    replica = ReplicaPlan(
        ranks=(0, 1, 2), layouts={UnitKind.MLP: Layout.contiguous((4, 2, 2))}, batch=2
    )
    plan = Plan.build({UnitKind.MLP: 8}, [replica])
    model = ModelUnits(
        counts={UnitKind.MLP: 8},
        tensors=(TensorSpec(name="up\ud800\0", shape=(16, 4), kind=UnitKind.MLP),),
    )
    return plan.digest, json.dumps({"plan": plan.to_json(), "model": model.to_json()})


DIGEST, PLAN_TEXT = plan_text()
BASE: dict[Kind, Fields] = {
    Kind.PLAN: {"code": 1, "aux": 1, "a": digest_to_int(DIGEST), "x": 0.3},
    Kind.STEP_END: {"aux": 10, "a": 3, "b": 1000, "c": 900, "x": 2.0},
    Kind.COLLECTIVE_BEGIN: {"code": Op.ALL_REDUCE, "a": 4, "b": 64},
    Kind.COLLECTIVE_END: {"code": Op.ALL_REDUCE, "a": 4, "b": 64},
    Kind.CHANGE_BEGIN: {"code": Reason.RANK_SLOW, "aux": 2, "a": 3},
    Kind.CHANGE_PHASE: {"code": 5, "aux": 2, "a": 10, "b": 20, "c": 30},
    Kind.CHANGE_END: {"code": 1, "aux": 2, "a": 10, "b": 10, "c": 3},
    Kind.DIVERGENCE: {"code": 1, "aux": 1, "a": 3, "x": 0.0},
    Kind.VALUE: {"code": Value.LOSS, "a": 3, "x": 2.0},
}
"""Records that make sense; other kinds do with zeros."""


class Reader:
    """All that reads the state of one job, as the daemon puts it together."""

    def __init__(self, run_dir: Path) -> None:
        self.ingest = JobIngest(run_dir)
        config = load({"autopilot": "act", "slow_rank_min_ranks": 2}, {}, None).config
        self.watch: JobWatch = build_watch(config, self.ingest.job, run_dir)
        self.exporter = Exporter()
        self.source = FixedSource({})
        self.stream = SnapshotStream(self.source, StreamLimits())
        self.now_ns = 10**15

    @property
    def job(self) -> JobState:
        """What is known."""
        return self.ingest.job

    def tick(self) -> dict[str, Any]:
        """Read, judge and show everything; the snapshot as a reader of the stream gets it."""
        self.ingest.tick()
        self.now_ns += 10**9
        self.watch.tick(now_ns=self.now_ns, now_unix_ns=self.now_ns)
        rows, incidents = self.watch.rows(), self.watch.incidents
        self.exporter.follow(self.job)
        view = JobView(job=self.job, incidents=incidents, checks=rows)
        self.exporter.publish([view], SidecarStats(), self.now_ns)
        for accept, read in ((OPENMETRICS, read_openmetrics), (None, read_text)):
            assert list(read(self.exporter.render(accept)[0].decode()))
        self.source.publish(
            snapshot_view(self.job, incidents, rows, now_ns=self.now_ns, unix_offset_ns=0)
        )
        report = build_report(self.job, incidents, RunFacts(loss_first=self.job.loss_first))
        strict(bytes(json_response(report).body))
        for change in self.job.changes:
            change_event("j", change, WebhookFormat.NUTP, unix_offset_ns=0)
        event = self.stream.event(-1)
        assert event is not None
        snapshot: dict[str, Any] = strict(event[1].partition(b"data: ")[2])
        return snapshot


def strict(body: bytes) -> Any:
    """The body, if it is JSON as other languages read it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in JSON")

    return json.loads(body, parse_constant=refuse)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a plan in it."""
    path = run_dir_in(tmp_path)
    (path / f"plan-{DIGEST}.json").write_text(PLAN_TEXT)
    return path


def emit(ring: RingWriter, kind: int, fields: Fields) -> None:
    """One record of a kind, with what is not given as in `BASE`."""
    ring.emit(kind, **{**BASE.get(kind, {}), **fields})  # type: ignore[call-overload]


def extremes() -> Iterator[tuple[str, Any]]:
    """Every field with every extreme value that it can hold."""
    yield from itertools.product(("a", "b", "c"), INTS)
    yield from (("aux", v) for v in INTS if -(2**31) <= v < 2**31)
    yield from itertools.product(("x",), FLOATS)
    yield from itertools.product(("code",), CODES)


def begin(ring: RingWriter) -> None:
    """What makes a rank judged: a place, and some steps."""
    emit(ring, Kind.PLAN, {})
    for step in range(1, 9):
        emit(ring, Kind.STEP_BEGIN, {"a": step})
        emit(ring, Kind.STEP_END, {"a": step})


@pytest.mark.parametrize("kind", Kind)
def test_extreme_value_in_any_field_is_survived_by_all_readers(run_dir: Path, kind: Kind) -> None:
    """One field at a time, then read, judged, exported and encoded."""
    rings = [ring_in(run_dir, rank, capacity=1024) for rank in range(3)]
    for ring in rings:
        begin(ring)
    reader = Reader(run_dir)
    for number, (name, value) in enumerate(extremes()):
        emit(rings[number % 3], kind, {name: value})
        if number % 8 == 0:
            reader.tick()
    assert reader.tick()["job"]["world_size"] == 8
    assert reader.ingest.first_error == ""


@pytest.mark.parametrize("seed", range(12))
def test_random_extreme_records_are_survived_by_all_readers(run_dir: Path, seed: int) -> None:
    """All fields at once, all kinds mixed, on ranks that also report well."""
    draw = random.Random(seed)
    rings = [ring_in(run_dir, rank, capacity=1024) for rank in range(3)]
    for ring in rings:
        begin(ring)
    reader = Reader(run_dir)
    for _ in range(12):
        for _ in range(40):
            fields = dict(draw.sample(list(extremes()), draw.randint(0, 4)))
            emit(draw.choice(rings), draw.choice([*Kind, 0, 99]), fields)
        reader.tick()
    assert reader.ingest.first_error == "", f"seed {seed}"


@pytest.mark.parametrize("work", [math.nan, math.inf, -math.inf, 1e308, -0.1, 1.5])
def test_absurd_share_is_counted_and_the_shares_known_stay(run_dir: Path, work: float) -> None:
    """One bad plan record hides no slow rank."""
    rings = [ring_in(run_dir, rank, capacity=1024) for rank in range(3)]
    for ring in rings:
        begin(ring)
    reader = Reader(run_dir)
    reader.tick()
    before = slowness(reader.job)
    emit(rings[0], Kind.PLAN, {"x": work})
    reader.tick()
    assert reader.job.bad_records == 1
    assert before == slowness(reader.job)
    assert reader.job.ranks[0].work == 0.3


def test_refused_record_is_counted_on_the_page_of_metrics(run_dir: Path) -> None:
    """Whoever looks at Prometheus only sees that something was left out."""
    ring = ring_in(run_dir)
    begin(ring)
    emit(ring, 99, {})
    daemon = Daemon(load({"port": 0}).config, run_dir, job_id=ring.header.job_id)
    try:
        daemon.tick()
        text = daemon._metrics(None)[0].decode()
    finally:
        daemon.stop()
    assert "nutp_sidecar_bad_records_total 1.0" in text


@pytest.mark.parametrize("field", ["b", "c"])
@pytest.mark.parametrize("value", [-1, 2**62])
def test_absurd_duration_is_counted_and_left_out(run_dir: Path, field: str, value: int) -> None:
    """A step cannot last longer than the clock has run."""
    ring = ring_in(run_dir)
    begin(ring)
    emit(ring, Kind.STEP_END, {"a": 9, field: value})
    reader = Reader(run_dir)
    reader.tick()
    assert (reader.job.bad_records, reader.job.ranks[0].step) == (1, 8)


@pytest.mark.parametrize("t_ns", [-1, 2**62])
def test_record_from_another_time_does_not_hide_a_hang(run_dir: Path, t_ns: int) -> None:
    """A time in the future, or none, is no sign of life."""
    ring = ring_in(run_dir)
    fd = os.open(ring.path, os.O_RDWR)
    with mmap.mmap(fd, ring.header.file_size) as buffer:
        times = iter([1000, t_ns, 2000])
        odd = make_emit(buffer, ring.header.capacity, lambda: next(times))
        for step in (1, 2, 3):
            odd(Kind.STEP_BEGIN, a=step)
        del odd
    os.close(fd)
    reader = Reader(run_dir)
    reader.tick()
    rank = reader.job.ranks[0]
    assert (reader.job.bad_records, rank.step_open) == (1, 3)
    assert rank.last_progress_ns == max(2000, ring.header.start_ns)


def test_collective_sums_are_exact_beyond_64_bits(run_dir: Path) -> None:
    """Large sizes add up to what they are, and never to something negative."""
    ring = ring_in(run_dir, capacity=32768)
    for _ in range(20_000):
        ring.emit(Kind.COLLECTIVE_BEGIN, Op.ALL_REDUCE, 0, 1, 2**50)
    reader = Reader(run_dir)
    reader.tick()
    assert reader.job.ranks[0].ops[Op.ALL_REDUCE].num_bytes == 20_000 * 2**50


BAD_PLANS = {
    "nested": "[" * 100_000,
    "nested inside": '{"plan":' + "[" * 50_000 + "]" * 50_000 + "}",
    "empty": "",
    "a list": "[]",
    "NaN": '{"plan": NaN}',
    "digits": '{"plan": {"epoch": 1, "counts": {"mlp": ' + "9" * 5000 + "}}}",
    "too many units": PLAN_TEXT.replace('"mlp": 8', '"mlp": 1000000000000').replace(
        "[[6, 8]]", "[[6, 1000000000000]]"
    ),
    "no division": PLAN_TEXT.replace('"sharing": 1', '"sharing": 0'),
    "no dim": PLAN_TEXT.replace('"dim": 0', '"dim": 7'),
}


@pytest.mark.parametrize("text", BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_plan_file_costs_its_record_only_and_is_read_once(run_dir: Path, text: str) -> None:
    """The records around it are applied; a good file under the same name is read again."""
    path = run_dir / f"plan-{DIGEST}.json"
    path.write_text(text)
    ring = ring_in(run_dir)
    begin(ring)
    begin(ring)
    reader = Reader(run_dir)
    reader.tick()
    assert (reader.job.bad_records, reader.job.ranks[0].steps_total) == (2, 16)
    assert reader.job.plan is None
    path.with_suffix(".new").write_text(PLAN_TEXT)
    path.with_suffix(".new").replace(path)
    emit(ring, Kind.PLAN, {})
    reader.tick()
    assert reader.job.plan is not None


@pytest.mark.parametrize(
    "plant",
    [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to(p)],
    ids=["pipe", "folder", "device", "loop"],
)
def test_plan_that_is_no_file_does_not_hold_the_tick_up(run_dir: Path, plant: Any) -> None:
    """Nothing under a plan's name waits for a writer."""
    (run_dir / f"plan-{DIGEST}.json").unlink()
    plant(run_dir / f"plan-{DIGEST}.json")
    ring = ring_in(run_dir)
    begin(ring)
    reader = Reader(run_dir)
    reader.tick()
    assert (reader.job.bad_records, reader.job.ranks[0].steps_total) == (1, 8)


def test_daemon_answers_for_a_plain_job_before_and_after_its_first_loss(run_dir: Path) -> None:
    """One process that reports NaN while no loss is known: every answer is there, and null."""
    ring = ring_in(run_dir)
    for step in (1, 2):
        emit(ring, Kind.STEP_END, {"a": step, "x": math.nan})
    daemon = Daemon(load({"port": 0, "poll_ms": 10}, {}, None).config, run_dir)
    daemon.start()
    try:
        with httpx.Client(base_url=daemon.url) as client:
            report = wait_until(lambda: _report_at(client, 2), "two steps")
            assert report["loss"] == {"first": None, "last": None}
            for path in openapi_document()["paths"]:
                if path != "/api/v1/stream":
                    assert client.get(path).status_code == 200, path
            emit(ring, Kind.STEP_END, {"a": 3, "x": 2.5})
            emit(ring, Kind.STEP_END, {"a": 4, "x": math.nan})
            report = wait_until(lambda: _report_at(client, 4), "four steps")
            assert report["loss"] == {"first": 2.5, "last": None}
            job = wait_until(lambda: _job_at(client, 4), "the view of step 4")
            assert (job["loss_is_finite"], job["status"]) == (False, "degraded")
    finally:
        daemon.stop()


def _report_at(client: httpx.Client, step: int) -> dict[str, Any] | None:
    body: dict[str, Any] = client.get("/api/v1/report").raise_for_status().json()
    return body if body["steps"] == step else None


def _job_at(client: httpx.Client, step: int) -> dict[str, Any] | None:
    body: dict[str, Any] = client.get("/api/v1/job").raise_for_status().json()
    return body if body["step"] == step else None
