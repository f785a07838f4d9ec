"""The probe: each call one record, nothing raised into the job, nothing heavy imported."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ntp_core.observe import NULL_OBSERVER, ChangePhase, NullObserver, Observer, Op, Phase, Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import UnitKind
from sidecar.probe.attach import WatchedProcess
from sidecar.probe.steps import StepMeter
from sidecar.probe.writer import MAX_ERRORS, NO_PLACE, ProbeObserver
from sidecar.wire.reader import RingReader, to_records
from sidecar.wire.schema import Kind, digest_to_int
from tests.support.rings import JOB, observer_in, run_dir_in

DIGEST = "00112233aabbccdd"
OTHER = "ffeeddccbbaa9988"

# call -> the record it must leave: kind, code, aux, a, b, c, x (schema.Kind)
CALLS: list[tuple[Callable[[ProbeObserver], None], tuple[Any, ...]]] = [
    (lambda o: o.step_begin(7), (Kind.STEP_BEGIN, 0, 0, 7, 0, 0, 0.0)),
    (lambda o: o.step_end(7, 50, 40, 99, 2.5), (Kind.STEP_END, 0, 99, 7, 50, 40, 2.5)),
    (
        lambda o: o.step_end(7, 50, 40, 99, 2.5, 1_250_000),
        (Kind.STEP_END, 12, 99, 7, 50, 40, 2.5),
    ),
    (
        lambda o: o.step_end(7, 50, 40, 99, 2.5, 10**12),
        (Kind.STEP_END, 65535, 99, 7, 50, 40, 2.5),
    ),
    (lambda o: o.phase(7, Phase.DATA, 5), (Kind.PHASE, 1, 0, 7, 5, 0, 0.0)),
    (lambda o: o.value(2, 7, 0.5), (Kind.VALUE, 2, 0, 7, 0, 0, 0.5)),
    (
        lambda o: o.collective_begin(Op.BROADCAST, 3, 11, 4096),
        (Kind.COLLECTIVE_BEGIN, 4, 3, 11, 4096, 0, 0.0),
    ),
    (
        lambda o: o.collective_end(Op.BROADCAST, 3, 11, 77),
        (Kind.COLLECTIVE_END, 4, 3, 11, 77, 0, 0.0),
    ),
    (lambda o: o.fingerprint(7, 1, -5, 12), (Kind.FINGERPRINT, 0, 1, 7, -5, 12, 0.0)),
    (lambda o: o.divergence(7, 2, 1, -1, 4, 6), (Kind.DIVERGENCE, 2, -1, 7, 4, 6, 1.0)),
    (
        lambda o: o.change_begin(2, Reason.RANK_SLOW, DIGEST, OTHER, 7),
        (Kind.CHANGE_BEGIN, 3, 2, 7, digest_to_int(DIGEST), digest_to_int(OTHER), 0.0),
    ),
    (
        lambda o: o.change_phase(2, ChangePhase.TRANSFER, 100, 200, 640),
        (Kind.CHANGE_PHASE, 5, 2, 100, 200, 640, 0.0),
    ),
    (lambda o: o.change_end(2, 1, 640, 600, 30), (Kind.CHANGE_END, 1, 2, 640, 600, 30, 0.0)),
    (lambda o: o.fault_injected(7, 3, 1, 250), (Kind.FAULT_INJECTED, 3, 1, 7, 250, 0, 0.0)),
    (lambda o: o.exception(), (Kind.EXCEPTION, 0, 0, 0, 0, 0, 0.0)),
    (lambda o: o.exit(3), (Kind.EXIT, 0, 3, 0, 0, 0, 0.0)),
]


def _written(observer: ProbeObserver) -> list[tuple[Any, ...]]:
    assert observer.ring is not None
    return [tuple(r[2:]) for r in to_records(RingReader(observer.ring.path).drain().records)]


def _plan() -> Plan:
    layout = {UnitKind.MLP: Layout.contiguous((3, 1))}
    replicas = [ReplicaPlan(ranks=(r, r + 1), layouts=layout, batch=1) for r in (0, 2)]
    return Plan.build({UnitKind.MLP: 4}, replicas, epoch=5)


@pytest.mark.parametrize(("call", "record"), CALLS, ids=[str(Kind(r[0]).name) for _, r in CALLS])
def test_call_leaves_exactly_its_record(
    tmp_path: Path, call: Callable[[ProbeObserver], None], record: tuple[Any, ...]
):
    """Fields are where the schema says."""
    observer = observer_in(tmp_path)
    call(observer)
    assert _written(observer) == [record]
    assert observer.errors == 0


def test_probe_is_an_observer_and_covers_all_of_it(tmp_path: Path):
    """Every method of the protocol is there; each has a record above or is `plan`."""
    observer: Observer = observer_in(tmp_path)
    methods = {m for m in vars(NullObserver) if not m.startswith("_")}
    assert methods <= set(dir(observer))
    kinds = {record[0] for _, record in CALLS}
    assert len(methods) == len(kinds - {Kind.EXCEPTION, Kind.EXIT}) + 1


def test_collectives_carry_the_step_in_progress(tmp_path: Path):
    """So that a hang can be told from one of an earlier step."""
    observer = observer_in(tmp_path)
    observer.step_begin(9)
    observer.collective_begin(1, 0, 1, 8)
    observer.collective_end(1, 0, 1, 8)
    assert [r[5] for r in _written(observer)] == [0, 9, 9]


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 0)), (3, (1, 1)), (7, (-1, NO_PLACE))])
def test_plan_leaves_a_file_and_a_record_with_this_ranks_place(
    tmp_path: Path, rank: int, place: tuple[int, int]
):
    """A rank without place says so."""
    observer = observer_in(tmp_path, rank)
    plan = _plan()
    observer.plan(5, plan.digest, json.dumps({"plan": plan.to_json(), "model": None}), 0.25)
    replica, tp_rank = place
    want = (Kind.PLAN, tp_rank, 5, digest_to_int(plan.digest), replica, 0, 0.25)
    assert _written(observer) == [want]
    text = (tmp_path / f"plan-{plan.digest}.json").read_text()
    assert Plan.from_json(json.loads(text)["plan"]) == plan


def test_bad_arguments_never_raise_and_in_the_end_switch_the_probe_off(tmp_path: Path):
    """The job goes on; the first traceback is kept."""
    observer = observer_in(tmp_path)
    bad: Any = "seven"
    for attempt in range(MAX_ERRORS + 5):
        observer.step_end(bad, 1, 1, 1, 1.0)
        assert observer.is_on == (attempt < MAX_ERRORS - 1)
    assert observer.errors == MAX_ERRORS
    assert "struct.error" in observer.first_error
    observer.step_begin(1)
    observer.plan(1, "not a digest", "{", 1.0)
    observer.measure_cost()


def test_values_out_of_range_are_counted_as_errors(tmp_path: Path):
    """A number too large for its field loses its record, not the job."""
    observer = observer_in(tmp_path)
    observer.step_end(1, 1, 1, 1 << 40, 1.0)
    observer.collective_begin(1, 0, 1, 1 << 70)
    observer.plan(1, "../../../../etc", "{}", 1.0)
    observer.change_begin(1, 1, "xyz", "xyz", 1)
    assert observer.errors == 4
    assert _written(observer) == []


def test_own_cost_is_measured_outside_the_ring(tmp_path: Path):
    """One record of it, with a time that a burst can have taken."""
    observer = observer_in(tmp_path)
    observer.measure_cost()
    ((kind, _, _, events, ns, _, _),) = _written(observer)
    assert kind == Kind.PROBE_COST
    assert events > 0
    assert 0 < ns < 1_000_000_000


def test_collector_pauses_are_written_at_the_end_of_the_step(tmp_path: Path):
    """Not in the middle of whatever record the collector interrupted."""
    observer = observer_in(tmp_path)
    observer.note_gc(0, 100)
    observer.note_gc(2, 7)
    observer.note_gc(0, 11)
    observer.note_gc(9, 5)
    assert _written(observer) == []
    observer.step_end(1, 1, 1, 1, 1.0)
    observer.step_end(2, 1, 1, 1, 1.0)
    pauses = [r for r in _written(observer) if r[0] == Kind.GC_PAUSE]
    assert [(r[1], r[3]) for r in pauses] == [(0, 111), (2, 7)]


def test_probe_works_while_the_collector_runs_all_the_time(tmp_path: Path):
    """A collection in the middle of a record damages none."""
    observer = observer_in(tmp_path, capacity=1 << 14)
    before = gc.get_threshold()
    gc.callbacks.append(callback := lambda phase, info: observer.note_gc(0, 1))
    gc.set_threshold(1)
    try:
        for step in range(2000):
            observer.step_end(step, 1, 1, 1, 1.0)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(callback)
    assert [r[3] for r in _written(observer) if r[0] == Kind.STEP_END] == list(range(2000))


def test_probe_modules_load_nothing_heavy():
    """In a clean interpreter: no exporter, no web, no torch, not even numpy."""
    script = """
import sys, pkgutil, importlib, sidecar.probe
for m in pkgutil.iter_modules(sidecar.probe.__path__):
    if not m.ispkg:
        importlib.import_module(f"sidecar.probe.{m.name}")
heavy = "prometheus_client opentelemetry starlette httpx uvicorn http torch numpy sqlite3 logging"
print([m for m in heavy.split() if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# -- the life of a watched process, seen from outside

ATTACH = """
import os, sys
from sidecar.probe.attach import attach, current
observer = attach(hooks=False, global_rank=2, world_size=4)
"""


def _run(run_dir: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ATTACH + script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NTP_SIDECAR_RUN_DIR": str(run_dir), **env},
    )


def _kinds(run_dir: Path) -> list[list[Kind]]:
    rings = sorted(run_dir.glob("rank-*.ring"))
    return [[Kind(r.kind) for r in to_records(RingReader(p).drain().records)] for p in rings]


def test_process_that_ends_says_goodbye(tmp_path: Path):
    """Attached twice is attached once; rank and job are in the header."""
    run_dir = run_dir_in(tmp_path)
    script = "observer.step_begin(3); assert attach() is observer is current()"
    done = _run(run_dir, script)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = run_dir.glob("rank-*.ring")
    reader = RingReader(path)
    assert (reader.header.global_rank, reader.header.world_size) == (2, 4)
    assert reader.header.job_id == JOB
    records = to_records(reader.drain().records)
    assert [r.kind for r in records] == [Kind.PROBE_COST, Kind.STEP_BEGIN, Kind.EXIT]
    assert (records[-1].aux, records[-1].a) == (0, 3)


def test_uncaught_exception_is_recorded_and_still_printed(tmp_path: Path):
    """The hook that was there before is called."""
    run_dir = run_dir_in(tmp_path)
    done = _run(run_dir, "raise RuntimeError('boom')")
    assert done.returncode == 1
    assert "RuntimeError: boom" in done.stderr
    assert _kinds(run_dir) == [[Kind.PROBE_COST, Kind.EXCEPTION, Kind.EXIT]]


def test_forked_child_writes_nothing(tmp_path: Path):
    """Its events would look like its parent's."""
    run_dir = run_dir_in(tmp_path)
    script = """
if os.fork() == 0:
    observer.step_begin(99)
    assert current() is None
    sys.exit(0)
_, status = os.wait()
assert status == 0
observer.step_begin(1)
"""
    done = _run(run_dir, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert _kinds(run_dir) == [[Kind.PROBE_COST, Kind.STEP_BEGIN, Kind.EXIT]]


def test_disabled_probe_is_a_null_observer(tmp_path: Path):
    """The switch leaves no trace."""
    run_dir = run_dir_in(tmp_path)
    script = "observer.step_begin(1); assert current() is None"
    done = _run(run_dir, script, NTP_SIDECAR_DISABLE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(run_dir.iterdir()) == []


def test_probe_that_cannot_make_its_ring_says_so_once_and_stays_out_of_the_way(tmp_path: Path):
    """The job runs unwatched."""
    place = tmp_path / "a-file" / "job"
    place.parent.write_text("")
    done = _run(place, "observer.step_begin(1); attach()")
    assert done.returncode == 0
    assert done.stderr.count("ntp-sidecar: this rank is not watched") == 1


def test_null_observer_comes_from_a_process_without_a_ring():
    """Nothing was attached in this process: there is no current probe."""
    process = WatchedProcess()
    assert process.observer_for_hooks() is None
    assert process.observer is None
    assert NULL_OBSERVER is not None


# -- steps of a job that knows nothing of us


class Heard(NullObserver):
    """Keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def step_begin(self, step: int) -> None:
        self.calls.append(("begin", step))

    def step_end(
        self,
        step: int,
        duration_ns: int,
        busy_ns: int,
        tokens: int,
        loss: float,
        queued_ns: int = 0,
    ) -> None:
        self.calls.append(("end", step, duration_ns, busy_ns, loss))

    def phase(self, step: int, phase: int, duration_ns: int) -> None:
        self.calls.append((Phase(phase).name, step, duration_ns))

    def value(self, name: int, step: int, value: float) -> None:
        self.calls.append(("loss", step, value))


def test_step_is_divided_into_its_phases():
    """Data 10, forward 30, a collective of 5 in it, backward 40 with 20 of collectives in it."""
    heard = Heard()
    meter = StepMeter(heard, 1000)
    meter.data(1000, 1010)
    meter.collective(5)
    meter.collective(20)
    meter.backward(1045, 1105, 20)
    meter.loss = 1.5
    meter.optimizer(1110, 1120)
    meter.end(heard, 1120)
    assert heard.calls == [
        ("begin", 1),
        ("DATA", 1, 10),
        ("FORWARD", 1, 30),
        ("BACKWARD", 1, 40),
        ("OPTIMIZER", 1, 10),
        ("loss", 1, 1.5),
        ("end", 1, 120, 95, 1.5),
        ("begin", 2),
    ]


def test_gradient_accumulation_adds_its_passes():
    """Two forward and backward passes in one step; an unknown loss is NaN and no value."""
    heard = Heard()
    meter = StepMeter(heard, 0)
    meter.backward(10, 30, 0)
    meter.backward(35, 60, 0)
    meter.end(heard, 70)
    assert heard.calls[1:3] == [("FORWARD", 1, 15), ("BACKWARD", 1, 45)]
    kind, step, duration_ns, busy_ns, loss = heard.calls[3]
    assert (kind, step, duration_ns, busy_ns) == ("end", 1, 70, 70)
    assert math.isnan(loss)


def test_observer_is_usable_from_another_thread(tmp_path: Path):
    """A backward pass may run in a thread of the framework."""
    observer = observer_in(tmp_path)
    thread = threading.Thread(target=observer.collective_begin, args=(1, 0, 1, 8))
    thread.start()
    thread.join(timeout=10)
    assert [r[0] for r in _written(observer)] == [Kind.COLLECTIVE_BEGIN]
