"""Rings: layout, overwriting, and a reader that believes nothing it has not checked."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.wire.process import is_running, process_start_ticks
from sidecar.wire.reader import RingReader, to_records
from sidecar.wire.ring import (
    BadJobId,
    RingRefused,
    RingWriter,
    check_job_id,
    make_emit,
    read_header,
)
from sidecar.wire.schema import Record, digest_from_int, digest_to_int
from tests.support.rings import small_header

I64 = st.integers(-(2**63), 2**63 - 1)
EVENT = st.tuples(
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(-(2**31), 2**31 - 1),
    I64,
    I64,
    I64,
    st.floats(allow_nan=False),
)


def _ring(tmp_path: Path, capacity: int = 64) -> RingWriter:
    return RingWriter.create(tmp_path / "rank-0-1.ring", small_header(capacity=capacity))


def _poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(events=st.lists(EVENT, max_size=62))
def test_record_of_any_values_comes_back_equal(tmp_path: Path, events: list[tuple[int, ...]]):
    """What is emitted is what is read, and the bytes are those of the written format."""
    path = tmp_path / "r.ring"
    path.unlink(missing_ok=True)
    writer = RingWriter.create(path, small_header())
    reader = RingReader(path)
    for event in events:
        writer.emit(*event)
    batch = reader.drain()
    assert [tuple(r[2:]) for r in to_records(batch.records)] == events
    assert (batch.lost, batch.bad) == (0, 0)
    raw = path.read_bytes()
    for i, event in enumerate(events):
        fields = struct.unpack_from("<QqHHiqqqdQ", raw, 256 + 64 * i)
        assert (fields[0], fields[9], fields[2:9]) == (i + 1, i + 1, event)
    assert struct.unpack_from("<Q", raw, 192) == (len(events),)
    reader.close()


def test_header_survives_the_trip(tmp_path: Path):
    """All fields of the header are read back."""
    want = replace(small_header(rank=5), local_rank=-1, job_id="a.b-c_9")
    RingWriter.create(tmp_path / "r.ring", want)
    assert read_header(tmp_path / "r.ring") == want


def test_full_ring_keeps_the_newest_and_counts_the_gap(tmp_path: Path):
    """Accepted and lost records add up, whatever the number of laps."""
    for emitted in (63, 64, 65, 127, 128, 1000):
        path = tmp_path / f"{emitted}.ring"
        writer = RingWriter.create(path, small_header())
        reader = RingReader(path)
        for i in range(emitted):
            writer.emit(1, a=i)
        batch = reader.drain()
        got = [r.a for r in to_records(batch.records)]
        assert got == list(range(emitted - len(got), emitted))
        assert len(got) == min(emitted, 63)  # the slot after the head may be half written
        assert batch.lost == emitted - len(got)
        assert batch.bad == 0


def test_reader_that_keeps_up_loses_nothing(tmp_path: Path):
    """Drains of any size, over many laps, see each record once and in order."""
    writer = _ring(tmp_path)
    reader = RingReader(writer.path)
    got: list[int] = []
    emitted = 0
    for size in [0, 1, 7, 62, 13, 40] * 20:
        for _ in range(size):
            writer.emit(2, a=emitted)
            emitted += 1
        batch = reader.drain()
        assert (batch.lost, batch.bad) == (0, 0)
        got += [r.a for r in to_records(batch.records)]
    assert got == list(range(emitted))


def test_slot_after_the_head_is_never_believed(tmp_path: Path):
    """The writer may be in the middle of it: garbage there, not yet published, is left out."""
    writer = _ring(tmp_path)
    for i in range(100):
        writer.emit(1, a=i)
    _poke(writer.path, 256 + 64 * (100 % 64), os.urandom(64))
    batch = RingReader(writer.path).drain()
    assert [r.a for r in to_records(batch.records)] == list(range(37, 100))
    assert (batch.lost, batch.bad) == (37, 0)


@pytest.mark.parametrize("offset", [0, 56])
def test_torn_record_is_counted_and_left_out(tmp_path: Path, offset: int):
    """Both sequence numbers must be right."""
    writer = _ring(tmp_path)
    for i in range(3):
        writer.emit(1, a=i)
    _poke(writer.path, 256 + 64 + offset, struct.pack("<Q", 77))
    batch = RingReader(writer.path).drain()
    assert [r.a for r in to_records(batch.records)] == [0, 2]
    assert (batch.lost, batch.bad) == (0, 1)


# offset, format, bad value, does the checksum have to be made right first
FIELDS = {
    "magic": (0, "8s", b"NOTARING", False),
    "version": (8, "H", 2, False),
    "header_size": (10, "H", 128, False),
    "record_size": (12, "H", 32, False),
    "capacity": (16, "I", 100, False),
    "global_rank": (20, "i", -1, True),
    "world_size": (24, "i", 0, True),
    "local_rank": (28, "i", -2, True),
    "pid": (32, "i", 0, True),
    "start_ns": (48, "q", -5, True),
    "start_unix_ns": (56, "q", 0, True),
    "job_id": (64, "64s", b"../../etc", True),
    "crc": (128, "I", 12345, False),
    "head": (192, "Q", 1 << 63, False),
}


@pytest.mark.parametrize("field", FIELDS)
def test_bad_header_field_is_named(tmp_path: Path, field: str):
    """The error names file, field and value."""
    writer = _ring(tmp_path)
    offset, code, value, needs_crc = FIELDS[field]
    _poke(writer.path, offset, struct.pack("<" + code, value))
    if needs_crc:
        crc = zlib.crc32(writer.path.read_bytes()[:128])
        _poke(writer.path, 128, struct.pack("<I", crc))
    with pytest.raises(RingRefused) as refused:
        RingReader(writer.path).drain()
    assert refused.value.field == field
    assert str(writer.path) in str(refused.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 131), bit=st.integers(0, 7))
def test_any_flipped_bit_in_the_header_is_refused(tmp_path: Path, at: int, bit: int):
    """The checksum covers what no range check can see, such as another rank's number."""
    path = tmp_path / "r.ring"
    path.unlink(missing_ok=True)
    RingWriter.create(path, small_header())
    byte = path.read_bytes()[at]
    _poke(path, at, bytes([byte ^ (1 << bit)]))
    with pytest.raises(RingRefused):
        RingReader(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=600))
def test_foreign_file_is_refused(tmp_path: Path, data: bytes):
    """Whatever bytes: an error of ours, no crash."""
    path = tmp_path / "r.ring"
    path.write_bytes(data)
    with pytest.raises(RingRefused):
        RingReader(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(noise=st.binary(min_size=64, max_size=64), slot=st.integers(0, 63), head=I64)
def test_noise_behind_a_good_header_never_crashes(
    tmp_path: Path, noise: bytes, slot: int, head: int
):
    """Records and head of any content: refused, or counted as bad, or proper."""
    path = tmp_path / "r.ring"
    path.unlink(missing_ok=True)
    writer = RingWriter.create(path, small_header())
    for i in range(70):
        writer.emit(1, a=i)
    _poke(path, 256 + 64 * slot, noise)
    reader = RingReader(path)
    batch = reader.drain()
    assert all(r.a == r.seq - 1 for r in to_records(batch.records))
    _poke(path, 192, struct.pack("<q", head))
    try:
        assert all(r.a == r.seq - 1 for r in to_records(reader.drain().records))
    except RingRefused as refused:
        assert refused.field == "head"


def test_not_a_plain_file_is_refused(tmp_path: Path):
    """A pipe does not make the reader wait, a link is not followed, a directory is no ring."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RingRefused, match="file_type"):
        RingReader(tmp_path / "pipe")
    with pytest.raises(RingRefused, match="file_type"):
        RingReader(tmp_path)
    writer = _ring(tmp_path)
    (tmp_path / "link").symlink_to(writer.path)
    with pytest.raises(OSError, match="symbolic"):
        RingReader(tmp_path / "link")


def test_short_file_is_refused_also_when_it_is_cut_while_open(tmp_path: Path):
    """A mapping beyond the end of its file would be a SIGBUS."""
    writer = _ring(tmp_path)
    writer.emit(1)
    reader = RingReader(writer.path)
    os.truncate(writer.path, 300)
    with pytest.raises(RingRefused, match="file_size"):
        reader.drain()
    with pytest.raises(RingRefused, match="file_size"):
        RingReader(writer.path)


def test_deleted_ring_stays_readable(tmp_path: Path):
    """A reader that has it open gets the last records of a rank whose file is gone."""
    writer = _ring(tmp_path)
    reader = RingReader(writer.path)
    writer.path.unlink()
    writer.emit(1, a=9)
    assert [r.a for r in to_records(reader.drain().records)] == [9]
    reader.close()
    reader.close()


def test_head_that_goes_back_is_refused(tmp_path: Path):
    """The file was written over; nothing in it can be trusted."""
    writer = _ring(tmp_path)
    for _ in range(5):
        writer.emit(1)
    reader = RingReader(writer.path)
    reader.drain()
    _poke(writer.path, 192, struct.pack("<Q", 3))
    with pytest.raises(RingRefused, match="head"):
        reader.drain()


def test_event_inside_an_event_is_dropped_and_counted(tmp_path: Path):
    """A signal handler or collector that emits in the middle of a record cannot damage it."""
    path = tmp_path / "r.ring"
    writer = RingWriter.create(path, small_header())
    buffer = writer._buffer
    assert buffer is not None
    times = iter(range(100))

    def clock_ns() -> int:
        emit(99)
        return next(times)

    emit = make_emit(buffer, 64, clock_ns)
    for i in range(5):
        emit(1, a=i)
    batch = RingReader(path).drain()
    assert [r.kind for r in to_records(batch.records)] == [1] * 5
    assert (batch.lost, batch.bad) == (5, 0)


def test_interrupt_inside_an_event_leaves_the_ring_usable(tmp_path: Path):
    """Ctrl-C in the middle of a record loses that record only."""
    path = tmp_path / "r.ring"
    writer = RingWriter.create(path, small_header())
    buffer = writer._buffer
    assert buffer is not None
    fail = [True]

    def clock_ns() -> int:
        if fail.pop():
            raise KeyboardInterrupt
        fail.append(False)
        return 1

    emit = make_emit(buffer, 64, clock_ns)
    with pytest.raises(KeyboardInterrupt):
        emit(1, a=0)
    fail.append(False)
    emit(1, a=1)
    assert [r.a for r in to_records(RingReader(path).drain().records)] == [1]


def test_threads_that_share_a_ring_write_no_bad_record(tmp_path: Path):
    """Each event is written or counted as dropped."""
    writer = _ring(tmp_path, capacity=1 << 14)
    start = threading.Barrier(4)

    def write(thread: int) -> None:
        start.wait(timeout=10)
        for i in range(4000):
            writer.emit(1, a=thread, b=i, c=thread * 10_000 + i)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    batch = RingReader(writer.path).drain()
    assert batch.bad == 0
    assert len(batch.records) + batch.lost == 16_000
    assert all(r.c == r.a * 10_000 + r.b for r in to_records(batch.records))


def test_closed_ring_writes_nothing_and_keeps_its_file(tmp_path: Path):
    """The file is there for the sidecar after the rank is gone."""
    writer = _ring(tmp_path)
    writer.emit(1, a=1)
    writer.close()
    writer.emit(1, a=2)
    assert [r.a for r in to_records(RingReader(writer.path).drain().records)] == [1]


def test_no_draft_is_left_and_a_bad_header_makes_no_file(tmp_path: Path):
    """A ring appears complete or not at all."""
    _ring(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["rank-0-1.ring"]
    with pytest.raises(RingRefused, match="global_rank"):
        RingWriter.create(tmp_path / "x.ring", replace(small_header(), global_rank=8))
    assert not (tmp_path / "x.ring").exists()


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "-x", "a" * 65, "a b", "é", "a\n", "a\0"])
def test_unsafe_job_id_is_refused(job_id: str):
    """It becomes a directory and a label."""
    with pytest.raises(BadJobId):
        check_job_id(job_id)


def test_digest_travels_as_a_signed_number():
    """All 64 bits survive."""
    for digest in ("0000000000000000", "ffffffffffffffff", "8000000000000001", "00c0ffee00c0ffee"):
        assert digest_from_int(digest_to_int(digest)) == digest
        assert -(2**63) <= digest_to_int(digest) < 2**63


def test_pid_with_another_start_time_is_not_the_process():
    """Pids are used again."""
    ticks = process_start_ticks(os.getpid())
    assert ticks > 0
    assert is_running(os.getpid(), ticks)
    assert is_running(os.getpid(), 0)
    assert not is_running(os.getpid(), ticks + 1)


def test_zombie_and_gone_process_do_not_run():
    """A killed rank that its parent has not reaped yet is dead."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    ticks = process_start_ticks(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not is_running(pid, ticks)
    os.waitpid(pid, 0)
    assert not is_running(pid, ticks)


def test_record_is_a_plain_tuple():
    """Field order is that of the written format."""
    assert Record(1, 2, 3, 4, 5, 6, 7, 8, 9.0)._asdict() == {
        "seq": 1,
        "t_ns": 2,
        "kind": 3,
        "code": 4,
        "aux": 5,
        "a": 6,
        "b": 7,
        "c": 8,
        "x": 9.0,
    }
