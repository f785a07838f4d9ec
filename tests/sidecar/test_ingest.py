"""From rings to the state of a job, whatever order, damage or restart."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ntp_core.observe import Blame, ChangePhase, ChangeStatus, Op, Phase, Reason, Value
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import ModelUnits, TensorSpec, UnitKind
from sidecar.ingest.changes import ChangeBook
from sidecar.ingest.drain import RingSet, ring_limit
from sidecar.ingest.fingerprints import STEPS_KEPT, FingerprintBook
from sidecar.ingest.job import JobIngest
from sidecar.ingest.state import MAX_CHANGES, JobState
from sidecar.probe.writer import ProbeObserver
from sidecar.wire.ring import RingWriter
from sidecar.wire.rundir import ring_name
from sidecar.wire.schema import Kind, Record, digest_to_int
from tests.support.rings import JOB, observer_in, ring_in, run_dir_in, small_header

DESCRIPTORS = Path("/proc/self/fd")
OLD, NEW = "00112233aabbccdd", "ffeeddccbbaa9988"


def _plan(num_replicas: int = 2, epoch: int = 1) -> Plan:
    layout = {UnitKind.MLP: Layout.contiguous((3, 1))}
    ranks = [(2 * i, 2 * i + 1) for i in range(num_replicas)]
    replicas = [ReplicaPlan(ranks=r, layouts=layout, batch=1) for r in ranks]
    return Plan.build({UnitKind.MLP: 4}, replicas, epoch=epoch)


def _model() -> ModelUnits:
    tensors = (TensorSpec(name="up", shape=(8, 4), kind=UnitKind.MLP),)
    return ModelUnits(counts={UnitKind.MLP: 4}, tensors=tensors)


def _report_plan(observer: ProbeObserver, plan: Plan, work: float = 0.5) -> None:
    text = json.dumps({"plan": plan.to_json(), "model": _model().to_json()})
    observer.plan(plan.epoch, plan.digest, text, work)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    return run_dir_in(tmp_path)


def test_a_rank_becomes_visible_with_all_it_said(run_dir: Path):
    """One of each kind, and every total is right."""
    observer = observer_in(run_dir, rank=1)
    _report_plan(observer, _plan(), work=0.125)
    observer.step_begin(1)
    observer.phase(1, Phase.FORWARD, 30)
    observer.phase(1, Phase.FORWARD, 5)
    observer.collective_begin(Op.ALL_REDUCE, 3, 8, 4096)
    observer.collective_end(Op.ALL_REDUCE, 3, 8, 70)
    observer.value(Value.GRAD_NORM, 1, 0.75)
    observer.step_end(1, 100, 60, 32, 2.5)
    observer.note_gc(2, 9)
    observer.step_begin(2)
    observer.step_end(2, 110, 80, 32, 2.25)
    observer.fault_injected(2, 4, 1, 99)
    observer.step_begin(3)
    observer.collective_begin(Op.BROADCAST, 0, 5, 64)
    ingest = JobIngest(run_dir)
    assert ingest.tick() == 14
    rank = ingest.job.ranks[1]
    assert (rank.pid, rank.world_size, rank.alive, rank.exited) == (os.getpid(), 8, True, None)
    assert (rank.epoch, rank.replica, rank.tp_rank, rank.work) == (1, 0, 1, 0.125)
    assert (rank.step, rank.step_open, rank.loss, rank.grad_norm) == (2, 3, 2.25, 0.75)
    assert (rank.steps_total, rank.tokens_total) == (2, 64)
    assert (rank.step_ns_total, rank.busy_ns_total, rank.gc_ns_total) == (210, 140, 9)
    assert rank.phase_ns_total == {Phase.FORWARD: 35}
    assert [(s.step, s.work, s.epoch) for s in rank.steps] == [(1, 0.125, 1), (2, 0.125, 1)]
    assert {op: asdict(t) for op, t in rank.ops.items()} == {
        Op.ALL_REDUCE: {"count": 1, "num_bytes": 4096, "duration_ns": 70},
        Op.BROADCAST: {"count": 0, "num_bytes": 64, "duration_ns": 0},
    }
    assert rank.collective is not None
    assert (rank.collective.op, rank.collective.seq) == (Op.BROADCAST, 5)
    assert (rank.collective_seq, rank.events_total, rank.events_lost) == (5, 14, 0)
    assert ingest.job.plan == _plan()
    assert ingest.job.model == _model()
    assert [f.detail for f in ingest.job.faults] == [99]
    assert ingest.job.bad_records == 0
    assert ingest.tick() == 0


@pytest.mark.parametrize("status", [0, 3])
def test_goodbye_closes_the_open_step(run_dir: Path, status: int):
    """The announced status is kept."""
    observer = observer_in(run_dir)
    observer.step_begin(4)
    observer.exit(status)
    ingest = JobIngest(run_dir)
    ingest.tick()
    rank = ingest.job.ranks[0]
    assert (rank.exited, rank.step_open) == (status, None)


def test_plan_in_force_is_the_one_reported_last(run_dir: Path):
    """Rank 1's older word, drained after rank 0's newer one, changes nothing."""
    first, second = _plan(2), _plan(1, epoch=2)
    late = observer_in(run_dir, rank=1)
    _report_plan(late, first)
    early = observer_in(run_dir, rank=0)
    _report_plan(early, first)
    _report_plan(early, second)
    early_ring, late_ring = early.ring, late.ring
    assert early_ring is not None
    assert late_ring is not None
    ingest = JobIngest(run_dir)
    late_ring.path.rename(run_dir / "aside")
    ingest.tick()
    (run_dir / "aside").rename(late_ring.path)
    ingest.tick()
    assert ingest.job.plan == second
    assert ingest.job.ranks[1].epoch == 1
    assert set(ingest.job.plans) == {first.digest, second.digest}


def test_same_allocation_in_a_later_epoch_is_that_epochs_plan(run_dir: Path):
    """The file is named by content; the epoch comes from the record."""
    observer = observer_in(run_dir)
    _report_plan(observer, _plan())
    _report_plan(observer, _plan().with_epoch(3))
    ingest = JobIngest(run_dir)
    ingest.tick()
    assert ingest.job.plan == _plan().with_epoch(3)


def test_plan_without_a_readable_file_is_counted_and_the_place_kept(run_dir: Path):
    """A damaged plan does not stop the rank's other records."""
    observer = observer_in(run_dir)
    _report_plan(observer, _plan())
    (run_dir / f"plan-{_plan().digest}.json").write_text("{")
    observer.step_end(1, 10, 10, 1, 1.0)
    ingest = JobIngest(run_dir)
    ingest.tick()
    assert (ingest.job.plan, ingest.job.bad_records) == (None, 1)
    assert (ingest.job.ranks[0].replica, ingest.job.ranks[0].step) == (0, 1)


# -- allocation changes


def _change(rank: int, epoch: int = 2, at: int = 1000) -> list[Record]:
    """What one rank writes about one change."""
    digests = digest_to_int(OLD), digest_to_int(NEW)
    return [
        Record(1, at + rank, Kind.CHANGE_BEGIN, Reason.RANK_SLOW, epoch, 7, *digests, 0.0),
        Record(2, at + 50, Kind.CHANGE_PHASE, ChangePhase.QUIESCE, epoch, at + 5, at + 9, 0, 0.0),
        Record(
            3, at + 60, Kind.CHANGE_PHASE, ChangePhase.TRANSFER, epoch, at + 10, at + 50, 64, 0.0
        ),
        Record(
            4, at + 99 + rank, Kind.CHANGE_END, ChangeStatus.COMMITTED, epoch, 640, 600, 30, 0.0
        ),
    ]


def _feed(book: ChangeBook, rank: int, r: Record) -> None:
    {
        Kind.CHANGE_BEGIN: book.begin,
        Kind.CHANGE_PHASE: book.phase,
        Kind.CHANGE_END: book.end,
    }[Kind(r.kind)](rank, r)


def _plain(job: JobState) -> list[dict[str, Any]]:
    plain = [asdict(c) for c in job.changes]
    for change in plain:
        change["spans"] = sorted(change["spans"], key=lambda s: (s["rank"], s["begin_ns"]))
    return plain


@settings(deadline=None)
@given(order=st.permutations([r for r in (1, 2, 5) for _ in range(8)]))
def test_change_is_the_same_in_any_order_of_arrival(order: list[int]):
    """Two changes on three ranks; each rank's records keep their order, the ranks' mix."""
    streams = {r: [*_change(r), *_change(r, epoch=3, at=5000)] for r in (1, 2, 5)}

    def fed(ranks: list[int]) -> list[dict[str, Any]]:
        job, left = JobState(job_id=JOB), {r: list(s) for r, s in streams.items()}
        book = ChangeBook(job)
        for rank in ranks:
            _feed(book, rank, left[rank].pop(0))
        return sorted(_plain(job), key=lambda c: c["epoch"])

    got = fed(order)
    assert got == fed(sorted(order))
    first = got[0]
    assert (first["driver"], first["step"], first["reason"]) == (1, 7, Reason.RANK_SLOW)
    assert (first["begin_ns"], first["end_ns"]) == (1001, 1104)
    assert first["status"] is ChangeStatus.COMMITTED
    assert (first["old_digest"], first["new_digest"]) == (OLD, NEW)
    assert (first["bytes_moved"], first["bytes_lower_bound"]) == (640, 600)
    assert len(first["spans"]) == 6


def test_end_without_begin_waits_for_it():
    """The begin of that rank may have been overwritten; another rank's opens the change."""
    job = JobState(job_id=JOB)
    book = ChangeBook(job)
    for r in _change(4)[1:]:
        book._late(4, r)
    assert job.changes == []
    book.begin(2, _change(2)[0])
    (change,) = job.changes
    assert change.status is ChangeStatus.COMMITTED
    assert {s.rank for s in change.spans} == {4}


def test_epoch_tried_again_after_a_rollback_is_another_change():
    """Rank 1 is drained wholly before rank 0: its second try must not swallow rank 0's first."""
    job = JobState(job_id=JOB)
    book = ChangeBook(job)
    for rank in (1, 0):
        failed = [r._replace(code=ChangeStatus.ROLLED_BACK) for r in _change(rank)[3:]]
        for r in [*_change(rank)[:3], *failed, *_change(rank, at=9000)]:
            _feed(book, rank, r)
    assert [(c.begin_ns, c.status) for c in job.changes] == [
        (1000, ChangeStatus.ROLLED_BACK),
        (9000, ChangeStatus.COMMITTED),
    ]
    assert [len(c.spans) for c in job.changes] == [4, 4]


def test_repeated_records_change_nothing():
    """The same phase twice is one span."""
    job = JobState(job_id=JOB)
    book = ChangeBook(job)
    for r in _change(0):
        _feed(book, 0, r)
    before = _plain(job)
    for r in _change(0)[1:]:
        _feed(book, 0, r)
    assert _plain(job) == before


def test_changes_are_bounded():
    """The oldest goes."""
    job = JobState(job_id=JOB)
    book = ChangeBook(job)
    for epoch in range(MAX_CHANGES + 10):
        book.begin(0, _change(0, epoch=epoch, at=1000 * epoch)[0])
    assert [job.changes[0].epoch, len(job.changes)] == [10, MAX_CHANGES]


# -- fingerprints and divergences


def test_step_counts_once_when_all_replicas_have_reported(run_dir: Path):
    """Each rank of a replica reports the same; the second replica differs in step 2."""
    ranks = [observer_in(run_dir, rank=r) for r in range(4)]
    for observer in ranks:
        _report_plan(observer, _plan())
    for rank, observer in enumerate(ranks):
        observer.fingerprint(1, rank // 2, -77, 4)
        observer.fingerprint(2, rank // 2, rank // 2, 4)
        if rank < 2:
            observer.fingerprint(3, rank // 2, 5, 4)
        observer.fingerprint(4, 9, 5, 4)
    ingest = JobIngest(run_dir)
    ingest.tick()
    job = ingest.job
    assert (job.checked_steps, job.identical_steps) == (2, 1)
    assert job.fingerprints == {1: {0: -77, 1: -77}, 2: {0: 0, 1: 1}, 3: {0: 5}}
    assert job.bad_records == 4  # there is no replica 9


def test_fewer_replicas_after_a_change_do_not_complete_an_older_step():
    """What a step needs is fixed by the epoch of whoever reports it first."""
    job = JobState(job_id=JOB)
    book = FingerprintBook(job)
    book.expect(1, 3)
    book.add(1, 10, 0, 5)
    book.expect(2, 2)
    book.add(1, 10, 1, 5)
    assert job.checked_steps == 0
    book.add(1, 10, 2, 6)
    assert (job.checked_steps, job.identical_steps) == (1, 0)


def test_fingerprints_are_bounded():
    """The newest steps stay; an older one does not come back."""
    job = JobState(job_id=JOB)
    book = FingerprintBook(job)
    book.expect(1, 1)
    for step in range(STEPS_KEPT + 50):
        book.add(1, step, 0, 1)
    book.add(1, 3, 0, 1)
    assert (min(job.fingerprints), len(job.fingerprints)) == (50, STEPS_KEPT)
    assert job.checked_steps == STEPS_KEPT + 50


def test_divergence_is_kept_once_with_its_tensors_name(run_dir: Path):
    """All ranks report what one comparison found."""
    for rank in range(3):
        observer = observer_in(run_dir, rank)
        _report_plan(observer, _plan())
        observer.divergence(12, Blame.MAJORITY, 1, 3, 0, 2)
        observer.divergence(13, Blame.UNDECIDED, -1, -1, 40, 2)
    ingest = JobIngest(run_dir)
    ingest.tick()
    first, second = ingest.job.divergences
    assert (first.step, first.replica, first.rank, first.tensor) == (12, 1, 3, "up")
    assert (second.replica, second.rank, second.tensor) == (None, None, "tensor 40")


# -- collectives


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_collectives_equal_a_record_by_record_count(tmp_path: Path, seed: int):
    """Overlapping ones too, over several drains: totals and the oldest still open."""
    run_dir = tmp_path / f"{seed}" / JOB
    run_dir.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(seed)
    ring = ring_in(run_dir, capacity=4096)
    ingest = JobIngest(run_dir)
    open_: dict[tuple[int, int], int] = {}
    seqs, totals = [0, 0, 0], {}
    for _ in range(random_.randrange(1, 6)):
        for _ in range(random_.randrange(0, 60)):
            if open_ and random_.random() < 0.5:
                key = random_.choice(list(open_))
                op, total = open_.pop(key), random_.randrange(1 << 40)
                ring.emit(Kind.COLLECTIVE_END, op, key[0], key[1], total)
                count, num_bytes, ns = totals.get(op, (0, 0, 0))
                totals[op] = (count + 1, num_bytes, ns + total)
            else:
                group, op = random_.randrange(3), random_.choice([1, 2, 15])
                seqs[group] += 1
                num_bytes = random_.randrange(1 << 50)
                ring.emit(Kind.COLLECTIVE_BEGIN, op, group, seqs[group], num_bytes)
                open_[group, seqs[group]] = op
                count, total, ns = totals.get(op, (0, 0, 0))
                totals[op] = (count, total + num_bytes, ns)
        ingest.tick()
        if not ingest.job.ranks[0].events_total:
            continue
        state = ingest.job.ranks[0]
        got = {op: (t.count, t.num_bytes, t.duration_ns) for op, t in state.ops.items()}
        assert got == totals
        oldest = next(iter(open_), None)
        found = state.collective and (state.collective.group, state.collective.seq)
        assert found == oldest
    ingest.close()


def test_lost_records_forget_what_was_open(run_dir: Path):
    """The end may be among them: a collective must not look open for ever."""
    ring = ring_in(run_dir, capacity=64)
    ingest = JobIngest(run_dir)
    ring.emit(Kind.COLLECTIVE_BEGIN, 1, 0, 1)
    ingest.tick()
    assert ingest.job.ranks[0].collective is not None
    for step in range(200):
        ring.emit(Kind.STEP_BEGIN, a=step)
    ingest.tick()
    assert ingest.job.ranks[0].collective is None
    assert ingest.job.ranks[0].events_lost == 201 - 1 - 63


# -- damage, restarts, death


def test_nonsense_is_counted_and_the_rest_applied(run_dir: Path):
    """Unknown kinds and values, numbers beyond their range."""
    ring = ring_in(run_dir)
    ring.emit(999)
    ring.emit(Kind.PHASE, 77)
    ring.emit(Kind.COLLECTIVE_END, 60_000, 0, 1, 5)
    ring.emit(Kind.CHANGE_BEGIN, 99, 1)
    ring.emit(Kind.DIVERGENCE, 1, x=float("inf"))
    ring.emit(Kind.DIVERGENCE, 44)
    ring.emit(Kind.STEP_END, 0, 0, 5)
    ingest = JobIngest(run_dir)
    ingest.tick()
    assert (ingest.job.bad_records, ingest.job.ranks[0].step) == (6, 5)
    assert ingest.job.ranks[0].ops == {}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(0, 2**16 - 1),
            st.integers(-(2**31), 2**31 - 1),
            *[st.integers(-(2**63), 2**63 - 1)] * 3,
            st.floats(),
        ),
        max_size=60,
    )
)
def test_any_records_at_all_are_survived(tmp_path: Path, events: list[tuple[Any, ...]]):
    """A whole record with senseless content never stops the sidecar."""
    run_dir = tmp_path / JOB
    run_dir.mkdir(exist_ok=True)
    for old in run_dir.iterdir():
        old.unlink()
    ring = ring_in(run_dir)
    for event in events:
        ring.emit(*event)
    ingest = JobIngest(run_dir)
    assert ingest.tick() == len(events)
    ingest.close()


def test_foreign_files_are_refused_once_and_the_good_ring_read(run_dir: Path):
    """Damaged, another job's, another rank's name; other files are no business of ours."""
    observer_in(run_dir, rank=0).step_begin(1)
    (run_dir / ring_name(1, 1)).write_bytes(b"junk")
    RingWriter.create(run_dir / ring_name(2, os.getpid()), replace(small_header(2), job_id="other"))
    RingWriter.create(run_dir / ring_name(3, os.getpid()), small_header(4))
    (run_dir / ring_name(5, 5)).symlink_to("/etc/passwd")
    (run_dir / "notes.txt").write_text("hello")
    ingest = JobIngest(run_dir)
    ingest.tick()
    ingest.tick()
    assert (ingest.job.bad_rings, list(ingest.job.ranks)) == (4, [0])
    assert any("other" in reason for reason in ingest.refusals)


def test_ring_damaged_while_open_is_given_up_and_the_others_read(run_dir: Path):
    """What it said before stays."""
    bad, good = ring_in(run_dir, rank=0), ring_in(run_dir, rank=1)
    bad.emit(Kind.STEP_END, a=3)
    ingest = JobIngest(run_dir)
    ingest.tick()
    os.truncate(bad.path, 10)
    good.emit(Kind.STEP_END, a=4)
    ingest.tick()
    ingest.tick()
    assert [r.step for r in ingest.job.ranks.values()] == [3, 4]
    assert ingest.job.bad_rings == 1


def test_deleted_directory_is_survived(run_dir: Path):
    """Open rings stay readable; a directory that is not there yet is no error."""
    ring = ring_in(run_dir)
    ingest = JobIngest(run_dir)
    ingest.tick()
    ring.path.unlink()
    run_dir.rmdir()
    ring.emit(Kind.STEP_END, a=9)
    ingest.tick()
    assert ingest.job.ranks[0].step == 9
    assert JobIngest(run_dir / "none").tick() == 0


def test_restarted_rank_starts_anew_and_its_old_ring_is_left(run_dir: Path):
    """The old process' last records are applied before the new one takes its place."""
    first = ring_in(run_dir, pid=101)
    ingest = JobIngest(run_dir)
    ingest.tick()
    first.emit(Kind.STEP_END, a=50)
    second = ring_in(run_dir, pid=102)
    second.emit(Kind.STEP_END, a=41)
    ingest.tick()
    rank = ingest.job.ranks[0]
    assert (rank.pid, rank.step, rank.steps_total) == (102, 41, 1)
    first.emit(Kind.STEP_END, a=51)
    ingest.tick()
    assert ingest.job.ranks[0].step == 41


def test_killed_process_is_dead_and_its_last_words_are_read(run_dir: Path):
    """Also while it is a zombie; a living one is alive, a dead one stays dead."""
    script = """
import sys
from pathlib import Path
from sidecar.probe.attach import attach
observer = attach(hooks=False)
observer.step_end(6, 1, 1, 1, 1.0)
print("ready", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "NTP_SIDECAR_RUN_DIR": str(run_dir)},
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"ready\n"
    ingest = JobIngest(run_dir)
    ingest.tick()
    assert ingest.job.ranks[0].alive is True
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ingest.tick()
    rank = ingest.job.ranks[0]
    assert (rank.alive, rank.exited, rank.step) == (False, None, 6)
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_dead_stays_dead(run_dir: Path):
    """A pid that is used again does not bring the rank back."""
    ring_in(run_dir)
    answers = iter([True, False, True])
    ingest = JobIngest(run_dir, is_running=lambda pid, ticks: next(answers))
    alive = []
    for _ in range(3):
        ingest.tick()
        alive.append(ingest.job.ranks[0].alive)
    assert alive == [True, False, False]


# -- room


def test_rings_beyond_the_limit_wait_for_room(run_dir: Path):
    """Counted once, tried again at each scan, and read when another ring has gone."""
    rings = [ring_in(run_dir, rank) for rank in range(3)]
    for ring in rings:
        ring.emit(Kind.STEP_BEGIN, a=1)
    open_rings = RingSet(run_dir, JOB, most=2)
    for _ in range(3):
        open_rings.scan()
    watched = [d.header for d in open_rings.poll()]
    assert (len(watched), open_rings.refused, len(open_rings.refusals)) == (2, 1, 1)
    open_rings.retire(watched[0])
    open_rings.scan()
    assert {h.global_rank for h in open_rings.headers()} == {0, 1, 2} - {watched[0].global_rank}
    assert open_rings.refused == 1
    open_rings.close()


def test_ring_without_a_descriptor_is_read_once_there_is_one(run_dir: Path):
    """Too many open files is no fault of the ring."""
    ring_in(run_dir).emit(Kind.STEP_BEGIN, a=7)
    open_rings = RingSet(run_dir, JOB)
    with no_descriptors_but(1):  # enough to look into the directory, not to map a ring
        open_rings.scan()
        open_rings.scan()
        assert (open_rings.refused, open_rings.headers()) == (1, [])
    open_rings.scan()
    assert (open_rings.refused, len(open_rings.headers())) == (1, 1)
    open_rings.close()


@contextlib.contextmanager
def no_descriptors_but(free: int) -> Iterator[None]:
    """All descriptors of this process but `free` are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 32, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def open_descriptors() -> int:
    """Highest descriptor in use, so that a limit above it leaves all of them as they are."""
    return max(int(fd.name) for fd in DESCRIPTORS.iterdir())


def test_ring_takes_one_descriptor_and_gives_it_back(run_dir: Path):
    """The mapping's own; a thousand ranks are a thousand descriptors."""
    for rank in range(8):
        ring_in(run_dir, rank)
    before = len(list(DESCRIPTORS.iterdir()))
    ingest = JobIngest(run_dir)
    ingest.tick()
    assert len(list(DESCRIPTORS.iterdir())) - before == len(ingest.job.ranks) == 8
    ingest.close()
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_ring_limit_leaves_room_for_all_else():
    """Whatever the limit of open files is, the page keeps some of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, most in ((1024, 704), (64, 16), (hard, None)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))
            assert ring_limit() == (most or min(4096, hard - 320))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
