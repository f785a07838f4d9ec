"""Applies the records of collectives, the most frequent ones, with numpy instead of one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sidecar.ingest.bounds import collectives_fit
from sidecar.ingest.state import OpenCollective, OpTotals, RankState
from sidecar.wire.reader import Records
from sidecar.wire.schema import Kind

MAX_OPEN = 256  # collectives of one rank under way at once; older ones are given up
GENERATION_SHIFT = 16
MAX_OPS = 16  # `Op` has fewer; a larger code is damage

_Key = tuple[int, int]


class OpenCollectives:
    """Collectives that one rank has entered and not left. Bounded by `MAX_OPEN`."""

    __slots__ = ("_generation", "_open")

    def __init__(self) -> None:
        self._open: dict[_Key, OpenCollective] = {}
        self._generation = 0

    def clear(self) -> None:
        """Forget them: records were lost, the ends may be among them."""
        self._open.clear()

    def drop_before(self, t_ns: int) -> None:
        """Give up those entered earlier: the rank has left them without an end, as a peer died."""
        for key in [k for k, c in self._open.items() if c.begin_ns < t_ns]:
            del self._open[key]

    def enter_generation(self, generation: int) -> None:
        """The rank uses groups of this generation: it has left all of those before it."""
        if generation > self._generation:
            self._generation = generation
            for key in [k for k in self._open if generation_of(k[0]) < generation]:
                del self._open[key]

    def oldest(self) -> OpenCollective | None:
        """The one that the rank has been in longest."""
        return next(iter(self._open.values()), None)

    def apply(self, begins: Records, ends: Records) -> None:
        """Update from one batch, records in order."""
        if not self._open and _all_closed(begins, ends):
            return
        ended = set(zip(ends["aux"].tolist(), ends["a"].tolist(), strict=True))
        for key in [k for k in self._open if k in ended]:
            del self._open[key]
        # only the newest can matter: at most MAX_OPEN are kept
        for row in begins[-(len(ended) + MAX_OPEN) :].tolist():
            _, t_ns, _, op, group, seq, num_bytes, *_ = row
            if (group, seq) not in ended:
                self._open[group, seq] = OpenCollective(
                    op=op, group=group, seq=seq, num_bytes=num_bytes, begin_ns=t_ns
                )
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]


def generation_of(group: int) -> int:
    """Generation of a group of a job built on the engine (`ntp_core.runtime.comm`)."""
    return group >> GENERATION_SHIFT


def _all_closed(begins: Records, ends: Records) -> bool:
    """Whether begins and ends match one to one, the usual case of blocking collectives."""
    return len(begins) == len(ends) and bool(
        np.array_equal(begins["a"], ends["a"]) and np.array_equal(begins["aux"], ends["aux"])
    )


def apply_collectives(state: RankState, under_way: OpenCollectives, records: Records) -> int:
    """Apply all COLLECTIVE_* records of a batch to one rank.

    Returns:
        number of records with an operation, size or duration that cannot be; they are left out.
    """
    kinds = records["kind"]
    is_collective = (kinds == Kind.COLLECTIVE_BEGIN) | (kinds == Kind.COLLECTIVE_END)
    rows = records[is_collective]
    if not len(rows):
        return 0
    is_good = collectives_fit(rows, MAX_OPS)
    bad = int(len(rows) - np.count_nonzero(is_good))
    rows = rows[is_good] if bad else rows
    is_begin = rows["kind"] == Kind.COLLECTIVE_BEGIN
    begins, ends = rows[is_begin], rows[~is_begin]
    for op, total in _sum_by_op(begins):
        _totals(state, op).num_bytes += total
    for op, total in _sum_by_op(ends):
        _totals(state, op).duration_ns += total
    for op, count in enumerate(np.bincount(ends["code"], minlength=MAX_OPS).tolist()):
        if count:
            _totals(state, op).count += count
    if len(begins):
        state.collective_seq = int(begins["a"][-1])
    under_way.apply(begins, ends)
    if state.epoch and len(begins):  # it has a plan, so its groups are numbered by the engine
        under_way.enter_generation(generation_of(int(begins["aux"].max())))
    state.collective = under_way.oldest()
    return bad


def _sum_by_op(rows: Records) -> list[tuple[int, int]]:
    """Sum of field b for each operation that occurs, in exact integers."""
    codes, values = rows["code"], rows["b"]
    return [(int(op), _exact_sum(values[codes == op])) for op in np.unique(codes)]


def _exact_sum(values: npt.NDArray[np.int64]) -> int:
    """In two halves: the sum of large values does not fit 64 bits."""
    low = int((values & 0xFFFFFFFF).sum())
    return (int((values >> 32).sum()) << 32) + low


def _totals(state: RankState, op: int) -> OpTotals:
    return state.ops.setdefault(op, OpTotals())
