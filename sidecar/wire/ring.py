"""The ring of one rank: a file in shared memory with a header and fixed-size records.

This module holds the layout and the writer and imports nothing but the standard library, because
it runs inside the watched process. The reader is `sidecar.wire.reader`. The written form of the
format, with the memory-order assumption, is docs/wire_format.md.

The writer never waits: a full ring overwrites its oldest record. One process writes a ring. Its
threads may share the writer: an event that meets another one in the middle of being written (a
second thread, a signal handler, a collector callback) is dropped and counted in the header.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ntp_core.inbound.regular_file import NotRegular, open_regular
from sidecar.wire.process import process_start_ticks
from sidecar.wire.schema import RECORD, RECORD_SIZE, VERSION

MAGIC = b"NUTPRING"
HEADER_SIZE = 256
HEAD_OFFSET = 192  # starts a cache line that holds only the two counters
DROPPED_OFFSET = 200
DEFAULT_CAPACITY = 8192  # records; 512 KiB of shared memory for each rank
MIN_CAPACITY = 8
MAX_CAPACITY = 1 << 20
JOB_ID_BYTES = 64

# magic, version, header size, record size, reserved, capacity, global rank, world size, local rank,
# pid, reserved, start ticks of the pid, start on both clocks, job id
HEADER = struct.Struct("<8sHHHHIiiiiIQqq64s")
CRC_OFFSET = HEADER.size
CRC = struct.Struct("<I")
COUNTERS = struct.Struct("<QQ")
# the status the process ended with, as the C library was told; spare; whether it will be noted
STATUS = struct.Struct("<iII")
STATUS_OFFSET = 208
STATUS_UNSET = -(1 << 31)  # exit(-1) is a status that programs really give
STATUS_ARMED = 1
assert CRC_OFFSET + CRC.size <= HEAD_OFFSET
assert STATUS_OFFSET + STATUS.size <= HEADER_SIZE

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class BadJobId(ValueError):
    """A job id that cannot be a directory name and a label."""


class RingRefused(ValueError):
    """A file that is not a ring this version can read.

    Attributes:
        path: the file. field: the header field that is wrong. value: what it holds.
    """

    def __init__(self, path: Path, field: str, value: object, reason: str) -> None:
        self.path, self.field, self.value = path, field, value
        super().__init__(f"{path}: {field} is {value!r}: {reason}")


class Emit(Protocol):
    """Writes one record. Arguments are those of `sidecar.wire.schema.Kind`."""

    def __call__(
        self,
        kind: int,
        code: int = 0,
        aux: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        x: float = 0.0,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHeader:
    """Who writes a ring, since when, and how large it is.

    Attributes:
        local_rank: -1 when not known.
        pid_start_ticks: start time of `pid` in clock ticks since boot; 0 when not known.
        start_ns, start_unix_ns: creation of the ring on the monotonic and on the wall clock.
    """

    job_id: str
    global_rank: int
    world_size: int
    local_rank: int
    pid: int
    pid_start_ticks: int
    start_ns: int
    start_unix_ns: int
    capacity: int = DEFAULT_CAPACITY
    version: int = VERSION

    @property
    def file_size(self) -> int:
        """Bytes of the whole ring file."""
        return HEADER_SIZE + self.capacity * RECORD_SIZE


def check_job_id(job_id: str) -> str:
    """The job id, unchanged. Raises BadJobId for what cannot be a file name and a label.

    >>> check_job_id("llama-7b.run_3")
    'llama-7b.run_3'
    """
    if not _JOB_ID.fullmatch(job_id):
        raise BadJobId(
            f"job id {job_id[:80]!r} is not 1 to {JOB_ID_BYTES} letters, digits, '.', '_' or '-' "
            "that start with a letter or digit; choose another with --job-id"
        )
    return job_id


def header_of_this_process(
    job_id: str,
    global_rank: int,
    world_size: int,
    local_rank: int = -1,
    capacity: int = DEFAULT_CAPACITY,
) -> RingHeader:
    """Header for a ring that the calling process is about to create."""
    pid = os.getpid()
    return RingHeader(
        job_id=check_job_id(job_id),
        global_rank=global_rank,
        world_size=world_size,
        local_rank=local_rank,
        pid=pid,
        pid_start_ticks=process_start_ticks(pid),
        start_ns=time.monotonic_ns(),
        start_unix_ns=time.time_ns(),
        capacity=capacity,
    )


def pack_header(h: RingHeader) -> bytes:
    """The first bytes of a ring file, up to and with the checksum."""
    body = HEADER.pack(
        MAGIC,
        h.version,
        HEADER_SIZE,
        RECORD_SIZE,
        0,
        h.capacity,
        h.global_rank,
        h.world_size,
        h.local_rank,
        h.pid,
        0,
        h.pid_start_ticks,
        h.start_ns,
        h.start_unix_ns,
        h.job_id.encode(),
    )
    return body + CRC.pack(zlib.crc32(body))


def unpack_header(path: Path, data: bytes, file_size: int) -> RingHeader:
    """Decode and check the first `HEADER_SIZE` bytes of a file.

    Raises:
        RingRefused: naming the file, the first field that is wrong and its value.
    """
    if len(data) < HEADER_SIZE:
        raise RingRefused(path, "header_size", len(data), f"a header has {HEADER_SIZE} bytes")
    fields = HEADER.unpack_from(data)
    magic, version, header_size, record_size, _, capacity = fields[:6]
    _require(path, "magic", magic, magic == MAGIC, "not a ring file")
    _require(
        path,
        "version",
        version,
        version == VERSION,
        f"this sidecar reads version {VERSION}; use the same release in job and sidecar",
    )
    _require(path, "header_size", header_size, header_size == HEADER_SIZE, f"not {HEADER_SIZE}")
    _require(path, "record_size", record_size, record_size == RECORD_SIZE, f"not {RECORD_SIZE}")
    _require(
        path,
        "capacity",
        capacity,
        MIN_CAPACITY <= capacity <= MAX_CAPACITY and capacity & (capacity - 1) == 0,
        f"not a power of two in [{MIN_CAPACITY}, {MAX_CAPACITY}]",
    )
    (crc,) = CRC.unpack_from(data, CRC_OFFSET)
    _require(path, "crc", crc, crc == zlib.crc32(data[:CRC_OFFSET]), "the header is damaged")
    header = _identity(path, fields)
    want = header.file_size
    _require(path, "file_size", file_size, file_size >= want, f"cut short, {want} bytes expected")
    return header


def open_ring(path: Path) -> tuple[int, RingHeader]:
    """A descriptor, the caller's to close, and the checked header; waits for nothing.

    Raises:
        RingRefused: it is no ring of this version. OSError: it cannot be opened.
    """
    try:
        fd, info = open_regular(path)
    except NotRegular as error:
        raise RingRefused(path, "file_type", error.strerror, "not a regular file") from None
    try:
        return fd, unpack_header(path, os.pread(fd, HEADER_SIZE, 0), info.st_size)
    except BaseException:
        os.close(fd)
        raise


def read_header(path: Path) -> RingHeader:
    """The checked header of a ring file. Raises RingRefused or OSError."""
    fd, header = open_ring(path)
    os.close(fd)
    return header


def _identity(path: Path, fields: tuple[object, ...]) -> RingHeader:
    rank, world, local, pid = (_int(f) for f in fields[6:10])
    ticks, start_ns, start_unix_ns = (_int(f) for f in fields[11:14])
    _require(path, "world_size", world, world >= 1, "a job has at least one rank")
    _require(path, "global_rank", rank, 0 <= rank < world, f"not in [0, {world})")
    _require(path, "local_rank", local, local >= -1, "below -1")
    _require(path, "pid", pid, pid > 0, "not a process id")
    _require(path, "start_ns", start_ns, start_ns >= 0, "before the clock's origin")
    _require(path, "start_unix_ns", start_unix_ns, start_unix_ns > 0, "before 1970")
    raw = fields[14]
    assert isinstance(raw, bytes)
    job_id = raw.rstrip(b"\0").decode("utf-8", "replace")
    try:
        check_job_id(job_id)
    except BadJobId as error:
        raise RingRefused(path, "job_id", job_id, str(error)) from None
    return RingHeader(
        job_id=job_id,
        global_rank=rank,
        world_size=world,
        local_rank=local,
        pid=pid,
        pid_start_ticks=ticks,
        start_ns=start_ns,
        start_unix_ns=start_unix_ns,
        capacity=_int(fields[5]),
    )


def _int(field: object) -> int:
    assert isinstance(field, int)
    return field


def _require(path: Path, field: str, value: object, is_good: bool, reason: str) -> None:
    if not is_good:
        raise RingRefused(path, field, value, reason)


def make_emit(
    buffer: mmap.mmap, capacity: int, clock_ns: Callable[[], int] = time.monotonic_ns
) -> Emit:
    """The hot path: a closure that writes one record into a mapped ring.

    A record is packed aside and copied in one slice assignment: `pack_into` first clears its
    target and then fills it field by field, which a reader can see. The head is published last, by
    one aligned 8-byte store.

    `busy` is read and set with no call between, so no other Python thread can run in between while
    there is a GIL; `sidecar.probe.attach` declines to attach where there is none.
    """
    pack = RECORD.pack
    counters = memoryview(buffer)[HEAD_OFFSET : HEAD_OFFSET + COUNTERS.size].cast("Q")
    mask = capacity - 1
    last = 0
    busy = False

    def emit(
        kind: int,
        code: int = 0,
        aux: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        x: float = 0.0,
    ) -> None:
        nonlocal last, busy
        if busy:
            counters[1] += 1
            return
        busy = True
        try:
            seq = last + 1
            at = HEADER_SIZE + ((last & mask) << 6)
            buffer[at : at + 64] = pack(seq, clock_ns(), kind, code, aux, a, b, c, x, seq)
            counters[0] = last = seq
        finally:
            busy = False

    return emit


class RingWriter:
    """A ring that this process writes. `emit` is the hot path; `close` keeps the file."""

    __slots__ = ("_buffer", "emit", "header", "path")

    def __init__(self, path: Path, header: RingHeader, buffer: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self._buffer: mmap.mmap | None = buffer
        self.emit: Emit = make_emit(buffer, header.capacity)

    @classmethod
    def create(cls, path: Path, header: RingHeader) -> RingWriter:
        """Make the ring file, complete before it appears under its name.

        All its pages are allocated here: on a full /dev/shm a later first touch of a page would
        kill the job with SIGBUS, while here it is an OSError.

        Raises:
            OSError: no space, no right to write.
            ValueError: a header that a reader would refuse.
        """
        if sys.byteorder != "little":
            raise OSError("rings are little endian; this machine is not")
        start = pack_header(header).ljust(HEADER_SIZE, b"\0")
        unpack_header(path, start, header.file_size)
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(draft, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, header.file_size)
            buffer = mmap.mmap(fd, header.file_size)
            buffer[:HEADER_SIZE] = start
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(path, header, buffer)

    def close(self) -> None:
        """Stop writing. The file stays: the sidecar reads its last records after the rank's end.

        The mapping lives on as long as someone still holds `emit`.
        """
        self.emit = _emit_nothing
        self._buffer = None


def scratch_emit(capacity: int = 256) -> Emit:
    """An `emit` into private memory of the same layout, to measure what a record costs."""
    return make_emit(mmap.mmap(-1, HEADER_SIZE + capacity * RECORD_SIZE), capacity)


def _emit_nothing(
    kind: int, code: int = 0, aux: int = 0, a: int = 0, b: int = 0, c: int = 0, x: float = 0.0
) -> None:
    """Stands in for `emit` once a ring is closed."""
