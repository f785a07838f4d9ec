"""The engine's observer, written onto a ring: each call is one record.

Nothing here may raise into the job, wait, or keep its arguments. The broad `except` is the border
that the style guide allows: it counts, keeps the first traceback as text, and after
`MAX_ERRORS` of them switches the probe off for good.
"""

from __future__ import annotations

import json
import time
import traceback

from sidecar.wire.ring import Emit, RingWriter, scratch_emit
from sidecar.wire.rundir import write_plan
from sidecar.wire.schema import QUEUED_UNIT_NS, Kind, digest_to_int

MAX_ERRORS = 32
NO_PLACE = 65535  # tp_rank of a rank that the plan does not mention
BURST = 200  # records timed at once to measure the probe's own cost
BURST_RING = 64  # records of the private ring they go to
BURST_EVERY_STEPS = 512

# plain ints: an IntEnum member costs a conversion in every struct.pack
_STEP_BEGIN = int(Kind.STEP_BEGIN)
_STEP_END = int(Kind.STEP_END)
_PHASE = int(Kind.PHASE)
_COLLECTIVE_BEGIN = int(Kind.COLLECTIVE_BEGIN)
_COLLECTIVE_END = int(Kind.COLLECTIVE_END)
_PLAN = int(Kind.PLAN)
_FINGERPRINT = int(Kind.FINGERPRINT)
_DIVERGENCE = int(Kind.DIVERGENCE)
_CHANGE_BEGIN = int(Kind.CHANGE_BEGIN)
_CHANGE_PHASE = int(Kind.CHANGE_PHASE)
_CHANGE_END = int(Kind.CHANGE_END)
_VALUE = int(Kind.VALUE)
_GC_PAUSE = int(Kind.GC_PAUSE)
_EXCEPTION = int(Kind.EXCEPTION)
_EXIT = int(Kind.EXIT)
_FAULT_INJECTED = int(Kind.FAULT_INJECTED)
_PROBE_COST = int(Kind.PROBE_COST)
_SAVE_BEGIN = int(Kind.SAVE_BEGIN)
_SAVE_END = int(Kind.SAVE_END)


class ProbeObserver:
    """Implements `ntp_core.observe.Observer` onto a ring.

    Args:
        ring: the ring of this rank.
        emit: where records go, if not onto that ring (to measure without one).

    Attributes:
        ring: the ring, or None once the probe is off.
        errors: calls that failed inside the probe; they did not reach the job.
        first_error: traceback of the first of them, as text.
    """

    __slots__ = (
        "_emit",
        "_gc_ns",
        "_has_gc",
        "_step",
        "_steps_to_burst",
        "errors",
        "first_error",
        "ring",
    )

    def __init__(self, ring: RingWriter | None, emit: Emit | None = None) -> None:
        self.ring = ring
        self._emit: Emit = emit or (ring.emit if ring else _ignore)
        self._step = 0
        self._steps_to_burst = BURST_EVERY_STEPS
        self._gc_ns = [0, 0, 0]  # not yet written, by generation
        self._has_gc = False
        self.errors = 0
        self.first_error = ""

    @property
    def is_on(self) -> bool:
        """Whether calls still reach a ring."""
        return self.ring is not None

    @property
    def step(self) -> int:
        """The newest step that has begun."""
        return self._step

    def turn_off(self) -> None:
        """Write nothing any more: after a fork, after too many errors, at the end."""
        self._emit = _ignore
        if self.ring is not None:
            self.ring.close()
            self.ring = None

    def _fail(self) -> None:
        if not self.errors:
            self.first_error = traceback.format_exc()
        self.errors += 1
        if self.errors >= MAX_ERRORS:
            self.turn_off()

    # -- ntp_core.observe.Observer

    def step_begin(self, step: int) -> None:
        """See `Observer.step_begin`."""
        try:
            self._step = step
            self._emit(_STEP_BEGIN, 0, 0, step)
        except Exception:
            self._fail()

    def step_end(
        self,
        step: int,
        duration_ns: int,
        busy_ns: int,
        tokens: int,
        loss: float,
        queued_ns: int = 0,
    ) -> None:
        """See `Observer.step_end`."""
        try:
            queued = min(queued_ns // QUEUED_UNIT_NS, 0xFFFF)
            self._emit(_STEP_END, queued, tokens, step, duration_ns, busy_ns, loss)
            if self._has_gc:
                self._write_gc()
            self._steps_to_burst -= 1
            if self._steps_to_burst <= 0:
                self.measure_cost()
        except Exception:
            self._fail()

    def phase(self, step: int, phase: int, duration_ns: int) -> None:
        """See `Observer.phase`."""
        try:
            self._emit(_PHASE, phase, 0, step, duration_ns)
        except Exception:
            self._fail()

    def value(self, name: int, step: int, value: float) -> None:
        """See `Observer.value`."""
        try:
            self._emit(_VALUE, name, 0, step, 0, 0, value)
        except Exception:
            self._fail()

    def collective_begin(self, op: int, group: int, seq: int, num_bytes: int) -> None:
        """See `Observer.collective_begin`."""
        try:
            self._emit(_COLLECTIVE_BEGIN, op, group, seq, num_bytes, self._step)
        except Exception:
            self._fail()

    def collective_end(self, op: int, group: int, seq: int, duration_ns: int) -> None:
        """See `Observer.collective_end`."""
        try:
            self._emit(_COLLECTIVE_END, op, group, seq, duration_ns, self._step)
        except Exception:
            self._fail()

    def plan(self, epoch: int, digest: str, text: str, work: float) -> None:
        """See `Observer.plan`. Writes the plan's file before the record that names it."""
        try:
            if self.ring is None:
                return
            write_plan(self.ring.path.parent, digest, text)
            replica, tp_rank = _place(text, self.ring.header.global_rank)
            self._emit(_PLAN, tp_rank, epoch, digest_to_int(digest), replica, 0, work)
        except Exception:
            self._fail()

    def fingerprint(self, step: int, replica: int, value: int, num_units: int) -> None:
        """See `Observer.fingerprint`."""
        try:
            self._emit(_FINGERPRINT, 0, replica, step, value, num_units)
        except Exception:
            self._fail()

    def divergence(
        self, step: int, blame: int, replica: int, rank: int, tensor: int, unit: int
    ) -> None:
        """See `Observer.divergence`."""
        try:
            self._emit(_DIVERGENCE, blame, rank, step, tensor, unit, replica)
        except Exception:
            self._fail()

    def change_begin(self, epoch: int, reason: int, old: str, new: str, step: int) -> None:
        """See `Observer.change_begin`."""
        try:
            old_int, new_int = digest_to_int(old), digest_to_int(new)
            self._emit(_CHANGE_BEGIN, reason, epoch, step, old_int, new_int)
        except Exception:
            self._fail()

    def change_phase(
        self, epoch: int, phase: int, begin_ns: int, end_ns: int, num_bytes: int
    ) -> None:
        """See `Observer.change_phase`."""
        try:
            self._emit(_CHANGE_PHASE, phase, epoch, begin_ns, end_ns, num_bytes)
        except Exception:
            self._fail()

    def change_end(
        self, epoch: int, status: int, bytes_moved: int, bytes_lower_bound: int, units: int
    ) -> None:
        """See `Observer.change_end`."""
        try:
            self._emit(_CHANGE_END, status, epoch, bytes_moved, bytes_lower_bound, units)
        except Exception:
            self._fail()

    def fault_injected(self, step: int, fault: int, rank: int, detail: int) -> None:
        """See `Observer.fault_injected`."""
        try:
            self._emit(_FAULT_INJECTED, fault, rank, step, detail)
        except Exception:
            self._fail()

    # -- what only the probe itself reports

    def note_gc(self, generation: int, duration_ns: int) -> None:
        """Python's collector stopped this rank; written at the end of the step.

        The collector may run while a record is being written, so nothing is written here.
        """
        if 0 <= generation < len(self._gc_ns):
            self._gc_ns[generation] += duration_ns
            self._has_gc = True

    def _write_gc(self) -> None:
        self._has_gc = False
        for generation, duration_ns in enumerate(self._gc_ns):
            if duration_ns:
                self._gc_ns[generation] = 0
                self._emit(_GC_PAUSE, generation, 0, duration_ns)

    def save_begin(self) -> None:
        """The rank begins to write a checkpoint, which takes as long as it takes."""
        try:
            self._emit(_SAVE_BEGIN, 0, 0, self._step)
        except Exception:
            self._fail()

    def save_end(self, duration_ns: int) -> None:
        """It is written, or has failed."""
        try:
            self._emit(_SAVE_END, 0, 0, self._step, duration_ns)
        except Exception:
            self._fail()

    def exception(self) -> None:
        """The rank dies of an exception that nobody caught."""
        try:
            self._emit(_EXCEPTION, 0, 0, self._step)
        except Exception:
            self._fail()

    def exit(self, status: int) -> None:
        """The rank says goodbye; `status` is -1 where it cannot know with what status it ends."""
        try:
            self._emit(_EXIT, 0, status, self._step)
        except Exception:
            self._fail()

    def measure_cost(self) -> None:
        """Time a burst of real records into private memory and report it: about 0.1 ms.

        The burst goes into memory of the same layout, not into the ring, so that it overwrites no
        record and makes the reader copy nothing.
        """
        try:
            self._steps_to_burst = BURST_EVERY_STEPS
            probe, clock_ns = ProbeObserver(None, scratch_emit(BURST_RING)), time.perf_counter_ns
            for seq in range(BURST_RING):  # the first lap touches new pages, as no later one does
                probe.collective_begin(1, 0, seq, 4096)
            begin_ns = clock_ns()
            for seq in range(BURST):
                probe.collective_begin(1, 0, seq, 4096)
            self._emit(_PROBE_COST, 0, 0, BURST, clock_ns() - begin_ns)
        except Exception:
            self._fail()


def _place(text: str, global_rank: int) -> tuple[int, int]:
    """(replica, tp_rank) of a rank in a plan's JSON; (-1, NO_PLACE) when it has no place."""
    for index, replica in enumerate(json.loads(text)["plan"]["replicas"]):
        if global_rank in replica["ranks"]:
            return index, replica["ranks"].index(global_rank)
    return -1, NO_PLACE


def _ignore(
    kind: int, code: int = 0, aux: int = 0, a: int = 0, b: int = 0, c: int = 0, x: float = 0.0
) -> None:
    """Where records go once the probe is off."""
