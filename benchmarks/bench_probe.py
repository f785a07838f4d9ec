"""What a record costs the job, and how fast the sidecar reads: beside the usual instruments.

    python -m benchmarks.bench_probe [--json] [--quick]

Every subject is timed in batches of `BATCH` calls, the subjects taking turns, so that all see the
same noise. `median` and `p99` are over batches, in ns per call with the loop's own cost taken off.
The clock is the calling thread's processor time: what the job pays, whoever else uses the machine.
(A peer that works on in a thread of its own, as the span processor does, pays for that unseen.)
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter, Histogram

from sidecar.ingest.job import JobIngest
from sidecar.probe.writer import ProbeObserver
from sidecar.wire.reader import RingReader
from sidecar.wire.ring import RingWriter, header_of_this_process
from sidecar.wire.rundir import default_base, ring_name
from sidecar.wire.schema import Kind

BATCH = 200
ROUNDS = 400
QUICK_ROUNDS = 40
RINGS = 8
READ_LAPS = 40
TARGET_NS = 500.0
TARGET_READ_PER_S = 1_000_000.0

Call = Callable[[int], object]


class _Nowhere(SpanExporter):
    """Takes spans and forgets them: the exporter's own cost is not the question here."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _probe_calls(o: ProbeObserver) -> dict[str, Call]:
    old, new = "00112233aabbccdd", "ffeeddccbbaa9988"
    return {
        "step_begin": lambda i: o.step_begin(i),
        "step_end": lambda i: o.step_end(i, 50_000_000, 40_000_000, 4096, 2.5),
        "phase": lambda i: o.phase(i, 3, 1_000_000),
        "value": lambda i: o.value(2, i, 0.5),
        "collective_begin": lambda i: o.collective_begin(1, 3, i, 1 << 20),
        "collective_end": lambda i: o.collective_end(1, 3, i, 250_000),
        "fingerprint": lambda i: o.fingerprint(i, 1, -77, 700),
        "divergence": lambda i: o.divergence(i, 2, 1, 3, 40, 5),
        "change_begin": lambda i: o.change_begin(2, 3, old, new, i),
        "change_phase": lambda i: o.change_phase(2, 5, i, i + 9, 1 << 20),
        "change_end": lambda i: o.change_end(2, 1, 1 << 20, 1 << 20, 700),
        "fault_injected": lambda i: o.fault_injected(i, 1, 2, 3),
    }


def _peer_calls(sink: Path) -> dict[str, Call]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    tracer = provider.get_tracer("bench")
    registry = CollectorRegistry()
    counter = Counter("bench_events", "Events.", registry=registry)
    histogram = Histogram("bench_seconds", "Seconds.", registry=registry)
    logger = logging.getLogger("bench_probe")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(sink))

    def span(i: int) -> None:
        with tracer.start_as_current_span("step"):
            pass

    return {
        "opentelemetry span, batch processor": span,
        "prometheus_client counter inc": lambda i: counter.inc(),
        "prometheus_client histogram observe": lambda i: histogram.observe(0.25),
        "logging call to a file": lambda i: logger.info("step %d", i),
    }


def _time_all(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """ns per call of each, in turns."""
    empty: Call = lambda i: None  # noqa: E731 - the same kind of call as the others
    subjects = {"loop": empty, **calls}
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for call in subjects.values():
        _batch_ns(call)
    for _ in range(rounds):
        for name, call in subjects.items():
            samples[name].append(_batch_ns(call))
    loop_ns = statistics.median(samples.pop("loop"))
    return {
        name: {
            "median_ns": round(max(0.0, statistics.median(s) - loop_ns), 1),
            "p99_ns": round(max(0.0, statistics.quantiles(s, n=100)[98] - loop_ns), 1),
        }
        for name, s in samples.items()
    }


def _batch_ns(call: Call) -> float:
    begin_ns = time.thread_time_ns()
    for i in range(BATCH):
        call(i)
    return (time.thread_time_ns() - begin_ns) / BATCH


def _make_ring(run_dir: Path, rank: int) -> RingWriter:
    header = header_of_this_process(run_dir.name, rank, RINGS)
    return RingWriter.create(run_dir / ring_name(rank, header.pid), header)


def _fill(ring: RingWriter, kinds: tuple[Kind, Kind]) -> int:
    pairs = ring.header.capacity // 2 - 1
    begin, end = (int(k) for k in kinds)
    for i in range(pairs):
        ring.emit(begin, 1, 3, i, 1 << 20)
        ring.emit(end, 1, 3, i, 250_000, 200_000, 2.5 if end == Kind.STEP_END else 0.0)
    return 2 * pairs


def _read_rates(run_dir: Path, laps: int) -> dict[str, float]:
    """Records per second of one core, full rings: copied and checked; and applied to the state."""
    rings = [_make_ring(run_dir, rank) for rank in range(RINGS)]
    readers = [RingReader(r.path) for r in rings]
    collectives = (Kind.COLLECTIVE_BEGIN, Kind.COLLECTIVE_END)
    steps = (Kind.STEP_BEGIN, Kind.STEP_END)
    ingest = JobIngest(run_dir)
    drained = _rate(lambda: sum(len(r.drain().records) for r in readers), rings, collectives, laps)
    ingest.tick()
    applied = _rate(ingest.tick, rings, collectives, laps)
    stepped = _rate(ingest.tick, rings, steps, max(1, laps // 10))
    for reader in readers:
        reader.close()
    ingest.close()
    return {
        "drain_records_per_s": drained,
        "drain_and_apply_collectives_per_s": applied,
        "drain_and_apply_steps_per_s": stepped,
    }


def _rate(
    read: Callable[[], int], rings: list[RingWriter], kinds: tuple[Kind, Kind], laps: int
) -> float:
    records = spent_ns = 0
    for _ in range(laps):
        want = sum(_fill(ring, kinds) for ring in rings)
        begin_ns = time.perf_counter_ns()
        got = read()
        spent_ns += time.perf_counter_ns() - begin_ns
        assert got == want, f"{got} of {want} records"
        records += got
    return round(records / spent_ns * 1e9)


def run(is_quick: bool) -> dict[str, Any]:
    """All figures and targets of this benchmark."""
    rounds, laps = (QUICK_ROUNDS, 4) if is_quick else (ROUNDS, READ_LAPS)
    with tempfile.TemporaryDirectory(prefix="bench-probe-", dir=default_base()) as place:
        job_dir, read_dir = Path(place, "write"), Path(place, "read")
        job_dir.mkdir()
        read_dir.mkdir()
        observer = ProbeObserver(_make_ring(job_dir, 0))
        probe, peers = _probe_calls(observer), _peer_calls(Path(place, "log"))
        timed = _time_all({**probe, **peers}, rounds)
        rates = _read_rates(read_dir, laps)
        assert observer.errors == 0, observer.first_error
    return _report({k: timed[k] for k in probe}, {k: timed[k] for k in peers}, rates)


def _report(
    probe: dict[str, dict[str, float]],
    peers: dict[str, dict[str, float]],
    rates: dict[str, float],
) -> dict[str, Any]:
    worst = max(probe[k]["median_ns"] for k in ("collective_begin", "collective_end", "phase"))
    read = rates["drain_and_apply_collectives_per_s"]
    return {
        "bench": "probe",
        "hardware": _hardware(),
        "figures": {"ns_per_event": probe, "beside_ns_per_call": peers, **rates},
        "targets": [
            {
                "name": "probe cost per event, pure Python, worst of the frequent kinds",
                "value": worst,
                "unit": "ns",
                "better": "lower",
                "target": TARGET_NS,
                "met": worst <= TARGET_NS,
                "beside": {k: v["median_ns"] for k, v in peers.items()},
            },
            {
                "name": "records drained and applied by one core, collectives",
                "value": read,
                "unit": "records/s",
                "better": "higher",
                "target": TARGET_READ_PER_S,
                "met": read >= TARGET_READ_PER_S,
                "beside": {},
            },
        ],
    }


def main() -> None:
    """Print one JSON object, or a short table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    args = parser.parse_args()
    result = run(args.quick)
    if args.json:
        print(json.dumps(result))
        return
    figures = result["figures"]
    for name, t in {**figures["ns_per_event"], **figures["beside_ns_per_call"]}.items():
        print(f"{name:40} {t['median_ns']:10.0f} ns   p99 {t['p99_ns']:10.0f} ns")
    for name in figures:
        if name.endswith("_per_s"):
            print(f"{name:40} {figures[name]:12,.0f}")


if __name__ == "__main__":
    main()
