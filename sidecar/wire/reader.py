"""Reads the ring of one rank from another process: numpy over a read-only mapping.

It never writes into the ring and never waits for the writer. A record is accepted only if it
cannot have been overwritten while it was copied and if both its sequence numbers are the expected
one. Rules and memory-order assumption: docs/wire_format.md.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sidecar.wire.ring import (
    HEAD_OFFSET,
    HEADER_SIZE,
    STATUS,
    STATUS_ARMED,
    STATUS_OFFSET,
    STATUS_UNSET,
    RingRefused,
    open_ring,
)
from sidecar.wire.schema import RECORD_SIZE, Record

RECORD_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("t_ns", "<i8"),
        ("kind", "<u2"),
        ("code", "<u2"),
        ("aux", "<i4"),
        ("a", "<i8"),
        ("b", "<i8"),
        ("c", "<i8"),
        ("x", "<f8"),
        ("seq_end", "<u8"),
    ]
)
assert RECORD_DTYPE.itemsize == RECORD_SIZE

Records = npt.NDArray[np.void]
_NO_RECORDS = np.empty(0, RECORD_DTYPE)

# No writer emits this many records between two polls (2^32 at 0.05 us are 200 s without one).
_MAX_HEAD_JUMP = 1 << 32


@dataclass(frozen=True, slots=True)
class Batch:
    """What one drain brought.

    Attributes:
        records: structured array of `RECORD_DTYPE`, oldest first; at most the ring's capacity.
        lost: records overwritten before they were read, and events the writer had to drop.
        bad: records whose sequence numbers were wrong; they are not in `records`.
    """

    records: Records
    lost: int
    bad: int


def to_records(records: Records) -> list[Record]:
    """Plain tuples, for low rates and for tests."""
    return [Record._make(row[:9]) for row in records.tolist()]


class RingReader:
    """Reader of one ring; keeps its own place. Raises RingRefused or OSError when it cannot open.

    The file may be deleted while it is open; what the writer wrote stays readable. It holds one
    descriptor: the mapping's own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd, self.header = open_ring(path)
        try:
            self.inode = os.fstat(fd).st_ino
            self._map = mmap.mmap(fd, self.header.file_size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        capacity = self.header.capacity
        self._counters = np.frombuffer(self._map, "<u8", count=2, offset=HEAD_OFFSET)
        self._slots = np.frombuffer(self._map, RECORD_DTYPE, count=capacity, offset=HEADER_SIZE)
        self._last = 0  # sequence number of the newest record taken or given up
        self._dropped = 0

    def drain(self) -> Batch:
        """All records that are new and whole.

        Raises:
            RingRefused: the file was cut short or its head makes no sense; stop reading it.
        """
        self._check_size()
        head = self._head()
        if head == self._last:
            return Batch(_NO_RECORDS, self._new_dropped(), 0)
        first = max(self._last + 1, head - self.header.capacity + 1)
        records = self._copy(first, head)
        # the writer may have gone on meanwhile, and may be in the middle of one more record
        first_safe = self._head() + 2 - self.header.capacity
        if first_safe > first:
            records = records[first_safe - first :]
            first = min(first_safe, head + 1)
        lost = first - self._last - 1
        self._last = head
        expected = np.arange(first, head + 1, dtype=np.uint64)
        is_whole = (records["seq"] == expected) & (records["seq_end"] == expected)
        bad = int(len(records) - np.count_nonzero(is_whole))
        return Batch(records[is_whole] if bad else records, lost + self._new_dropped(), bad)

    def exit_status(self) -> int | None:
        """The status, 0 to 255, that the C library was told; None without one. Final once the
        process is gone. Raises RingRefused for a file cut short."""
        self._check_size()
        status, _, armed = STATUS.unpack_from(self._map, STATUS_OFFSET)
        return status & 0xFF if armed == STATUS_ARMED and status != STATUS_UNSET else None

    def _copy(self, first: int, last: int) -> Records:
        capacity = self.header.capacity
        begin, count = (first - 1) & (capacity - 1), last - first + 1
        out = np.empty(count, RECORD_DTYPE)
        before_end = min(count, capacity - begin)
        out[:before_end] = self._slots[begin : begin + before_end]
        out[before_end:] = self._slots[: count - before_end]
        return out

    def _head(self) -> int:
        head = int(self._counters[0])
        if not self._last <= head < self._last + _MAX_HEAD_JUMP:
            raise RingRefused(self.path, "head", head, f"after {self._last} it makes no sense")
        return head

    def _new_dropped(self) -> int:
        dropped = int(self._counters[1])
        new, self._dropped = max(0, dropped - self._dropped), dropped
        return min(new, _MAX_HEAD_JUMP)

    def _check_size(self) -> None:
        """A file cut short under the mapping would kill this process with SIGBUS."""
        size = self._map.size()  # of the file, not of the mapping
        if size < self.header.file_size:
            raise RingRefused(self.path, "file_size", size, "cut short while it was read")

    def close(self) -> None:
        """Let go of the file; batches stay valid, they are copies."""
        self._counters = self._slots = _NO_RECORDS  # they hold the mapping
        self._map.close()
