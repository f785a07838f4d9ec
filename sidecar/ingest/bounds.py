"""What the fields of a record may hold. A record outside is counted as bad and left out.

One absurd number must not blind more than its own record: a share of 1e308 would hide every slow
rank, a time in the future every hang. Digests and fingerprints are any 64 bits; a loss or a norm is
any number, as a job may really have one that is not finite. Durations end when the record is
written, so none is longer than the clock has run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sidecar.wire.reader import Records
from sidecar.wire.schema import Kind, Record

MAX_STEP = (1 << 53) - 1  # also of sequence and tensor numbers: what JSON keeps exactly
MAX_BYTES = 1 << 50  # of one collective or change
MAX_AHEAD_NS = 1_000_000_000  # clocks of one node agree; this is for rounding
MAX_SHARE = 1.0

_Check = Callable[[Record, int], bool]
Mask = npt.NDArray[np.bool_]


def times_fit(records: Records, now_ns: int) -> Mask:
    """Which records were written between the clock's origin and now."""
    t_ns = records["t_ns"]
    fit: Mask = (t_ns >= 0) & (t_ns <= now_ns + MAX_AHEAD_NS)
    return fit


def collectives_fit(rows: Records, max_ops: int) -> Mask:
    """Which COLLECTIVE_* records hold an operation, a number and a size or duration that can be."""
    most = np.where(rows["kind"] == Kind.COLLECTIVE_BEGIN, MAX_BYTES, rows["t_ns"])
    fit: Mask = (rows["code"] < max_ops) & (rows["a"] >= 0) & (rows["a"] <= MAX_STEP)
    return fit & (rows["b"] >= 0) & (rows["b"] <= most)


def fits(record: Record, world_size: int) -> bool:
    """Whether one record of any other kind holds what its kind may hold.

    Enumerations are checked where they are read; kinds that do not exist are not checked here.
    """
    check = _CHECKS.get(record.kind)
    return check is None or check(record, world_size)


def _is_step(value: int) -> bool:
    return 0 <= value <= MAX_STEP


def _is_rank(value: float, world_size: int) -> bool:
    """Also of replicas: a job has no more of them than ranks. -1 is none."""
    return -1 <= value < world_size and value == int(value)


def _is_size(*values: int) -> bool:
    return all(0 <= v <= MAX_BYTES for v in values)


def _step(r: Record, _: int) -> bool:
    return _is_step(r.a)


def _step_end(r: Record, _: int) -> bool:
    return _is_step(r.a) and 0 <= r.b <= r.t_ns and 0 <= r.c <= r.t_ns and r.aux >= 0


def _phase(r: Record, _: int) -> bool:
    return _is_step(r.a) and 0 <= r.b <= r.t_ns


def _plan(r: Record, world_size: int) -> bool:
    return r.aux >= 0 and 0.0 <= r.x <= MAX_SHARE and _is_rank(r.b, world_size)


def _fingerprint(r: Record, world_size: int) -> bool:
    return _is_step(r.a) and r.aux >= 0 and _is_rank(r.aux, world_size) and _is_step(r.c)


def _divergence(r: Record, world_size: int) -> bool:
    numbers = r.b >= -1 and r.b <= MAX_STEP and r.c >= -1 and r.c <= MAX_STEP
    is_whole = -1 <= r.x < world_size and _is_rank(r.x, world_size)
    return _is_step(r.a) and numbers and is_whole and _is_rank(r.aux, world_size)


def _change_begin(r: Record, _: int) -> bool:
    return r.aux >= 0 and _is_step(r.a)


def _change_phase(r: Record, _: int) -> bool:
    return r.aux >= 0 and 0 <= r.a <= r.b <= r.t_ns and _is_size(r.c)


def _change_end(r: Record, _: int) -> bool:
    return r.aux >= 0 and _is_size(r.a, r.b, r.c)


def _gc_pause(r: Record, _: int) -> bool:
    return 0 <= r.a <= r.t_ns


def _fault(r: Record, world_size: int) -> bool:
    return _is_step(r.a) and _is_rank(r.aux, world_size) and _is_step(r.b)


def _probe_cost(r: Record, _: int) -> bool:
    return _is_step(r.a) and 0 <= r.b <= r.t_ns


_CHECKS: dict[int, _Check] = {
    Kind.STEP_BEGIN: _step,
    Kind.STEP_END: _step_end,
    Kind.PHASE: _phase,
    Kind.PLAN: _plan,
    Kind.FINGERPRINT: _fingerprint,
    Kind.DIVERGENCE: _divergence,
    Kind.CHANGE_BEGIN: _change_begin,
    Kind.CHANGE_PHASE: _change_phase,
    Kind.CHANGE_END: _change_end,
    Kind.VALUE: _step,
    Kind.GC_PAUSE: _gc_pause,
    Kind.EXCEPTION: _step,
    Kind.EXIT: _step,
    Kind.FAULT_INJECTED: _fault,
    Kind.PROBE_COST: _probe_cost,
    Kind.SAVE_BEGIN: _step,
    Kind.SAVE_END: _phase,
}
