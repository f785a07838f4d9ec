"""Records: 64 bytes each, one layout for all kinds. The written form is docs/wire_format.md.

    offset  type  field
    0       u64   seq       sequence number, from 1
    8       i64   t_ns      monotonic clock of the writer
    16      u16   kind      `Kind`
    18      u16   code      small enumeration, by kind
    20      i32   aux       by kind
    24      i64   a         by kind
    32      i64   b         by kind
    40      i64   c         by kind
    48      f64   x         by kind
    56      u64   seq_end   equal to seq in a whole record

Little endian. The meaning of code, aux, a, b, c, x for each kind stands beside it below;
enumerations are those of `ntp_core.observe`. A digest travels as the signed 64-bit value of its 16
hex digits.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
RECORD = struct.Struct("<QqHHiqqqdQ")
RECORD_SIZE = 64
QUEUED_UNIT_NS = 100_000
"""STEP_END's code counts time in the run queue in this unit; 65535 says that much or more."""
assert RECORD.size == RECORD_SIZE


class Kind(IntEnum):
    """Kinds of record: `code; aux; a; b; c; x`."""

    STEP_BEGIN = 1  # -; -; step; -; -; -
    STEP_END = 2  # queued (0.1 ms); tokens; step; duration_ns; busy_ns; loss
    PHASE = 3  # Phase; -; step; duration_ns; -; -
    COLLECTIVE_BEGIN = 4  # Op; group; seq; bytes; step; -
    COLLECTIVE_END = 5  # Op; group; seq; duration_ns; step; -
    PLAN = 6  # tp_rank (65535: no place); epoch; digest; replica; -; work (0..1)
    FINGERPRINT = 7  # -; replica; step; fingerprint; units; -
    DIVERGENCE = 8  # Blame; rank blamed or -1; step; tensor index; unit; replica blamed or -1
    CHANGE_BEGIN = 9  # Reason; epoch; step; old digest; new digest; -
    CHANGE_PHASE = 10  # ChangePhase; epoch; begin_ns; end_ns; bytes received; -
    CHANGE_END = 11  # ChangeStatus; epoch; bytes moved; lower bound; units verified; -
    VALUE = 12  # Value; -; step; -; -; value
    GC_PAUSE = 13  # generation; -; duration_ns; -; -; -
    EXCEPTION = 14  # -; -; step; -; -; -   (the rank dies of an exception)
    EXIT = 15  # -; exit status; step; -; -; -   (the rank leaves in good order)
    FAULT_INJECTED = 16  # fault; rank; step; detail; -; -
    PROBE_COST = 17  # -; -; events timed; nanoseconds for all of them; -; -
    SAVE_BEGIN = 18  # -; -; step; -; -; -   (the rank writes a checkpoint)
    SAVE_END = 19  # -; -; step; duration_ns; -; -


class Record(NamedTuple):
    """One decoded record."""

    seq: int
    t_ns: int
    kind: int
    code: int
    aux: int
    a: int
    b: int
    c: int
    x: float


def digest_to_int(digest: str) -> int:
    """16 hex digits -> signed 64-bit."""
    value = int(digest, 16)
    return value - (1 << 64) if value >= 1 << 63 else value


def digest_from_int(value: int) -> str:
    """Signed 64-bit -> 16 hex digits."""
    return f"{value & 0xFFFFFFFFFFFFFFFF:016x}"
