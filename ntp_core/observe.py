"""What the engine tells an observer, in plain ints and floats.

The engine never knows who listens. `NULL_OBSERVER` is the default and does nothing; the sidecar's
probe implements the same protocol and writes each call as one fixed-size record. No call may block,
raise or keep its arguments. Times are `time.monotonic_ns()` of the calling process.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Op(IntEnum):
    """Collective operations."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    ALL_TO_ALL = 5
    BARRIER = 6
    SEND_RECV = 7
    OTHER = 15


class Phase(IntEnum):
    """Parts of a training step."""

    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    GRAD_SYNC = 4
    CHECK = 5
    OPTIMIZER = 6


class ChangePhase(IntEnum):
    """Parts of an allocation change, in the order in which they run."""

    DETECT = 1
    DECIDE = 2
    QUIESCE = 3
    REGROUP = 4
    TRANSFER = 5
    VERIFY = 6
    RESUME = 7
    ROLLBACK = 8
    RESTORE = 9  # from a checkpoint: no rank held the state any more


class Reason(IntEnum):
    """Why an allocation changes."""

    START = 1
    RANK_DIED = 2
    RANK_SLOW = 3
    RANK_RETURNED = 4
    OPERATOR = 5
    REPAIR = 6
    NO_GAIN = 7
    CONNECTION_LOST = 8


class ChangeStatus(IntEnum):
    """How an allocation change ended."""

    COMMITTED = 1
    ROLLED_BACK = 2
    FAILED = 3


class Blame(IntEnum):
    """Which evidence names the replica that diverged."""

    UNDECIDED = 0
    AT_REST = 1
    MAJORITY = 2


class Value(IntEnum):
    """Named scalar series."""

    LOSS = 1
    GRAD_NORM = 2
    TOKENS = 3


class Observer(Protocol):
    """Receiver of what happens on one rank."""

    def step_begin(self, step: int) -> None:
        """A training step starts; `step` counts from 1."""

    def step_end(
        self,
        step: int,
        duration_ns: int,
        busy_ns: int,
        tokens: int,
        loss: float,
        queued_ns: int = 0,
    ) -> None:
        """A step is committed. `busy_ns` is the time outside collectives, checks and changes, of
        which `queued_ns` went by waiting for a processor of this host; `tokens` are this
        replica's; `loss` is the job's mean loss per token."""

    def phase(self, step: int, phase: int, duration_ns: int) -> None:
        """One `Phase` of a step took `duration_ns`."""

    def value(self, name: int, step: int, value: float) -> None:
        """One scalar of a `Value` series."""

    def collective_begin(self, op: int, group: int, seq: int, num_bytes: int) -> None:
        """This rank arrives at collective number `seq` of process group number `group`."""

    def collective_end(self, op: int, group: int, seq: int, duration_ns: int) -> None:
        """The same collective returned."""

    def plan(self, epoch: int, digest: str, text: str, work: float) -> None:
        """A plan is in force. `text` is its JSON (`ntp_core.plan.Plan`, with the model's units);
        `work` is this rank's expected share of the job's own time per step (its work over the speed
        the plan was made for; sum 1 over all ranks): with it a rank's time can be judged."""

    def fingerprint(self, step: int, replica: int, value: int, num_units: int) -> None:
        """This replica's parameters had fingerprint `value` (signed 64-bit) in `step`."""

    def divergence(
        self, step: int, blame: int, replica: int, rank: int, tensor: int, unit: int
    ) -> None:
        """Replicas differ. `blame` says by which evidence `replica` and `rank` are named (-1: not
        known). `tensor` indexes the model's tensors as listed in the plan's JSON."""

    def change_begin(self, epoch: int, reason: int, old: str, new: str, step: int) -> None:
        """A change to plan `new` (epoch `epoch`) from plan `old` (digests) starts after `step`."""

    def change_phase(
        self, epoch: int, phase: int, begin_ns: int, end_ns: int, num_bytes: int
    ) -> None:
        """One `ChangePhase` on this rank; `num_bytes` received by this rank in it."""

    def change_end(
        self, epoch: int, status: int, bytes_moved: int, bytes_lower_bound: int, units: int
    ) -> None:
        """The change ended. Bytes are the job's totals; `units` were verified equal."""

    def fault_injected(self, step: int, fault: int, rank: int, detail: int) -> None:
        """A deliberate fault (tests, demo) took effect on this rank."""


class NullObserver:
    """Listens to nothing. Every method of `Observer`, empty."""

    def step_begin(self, step: int) -> None: ...
    def step_end(
        self,
        step: int,
        duration_ns: int,
        busy_ns: int,
        tokens: int,
        loss: float,
        queued_ns: int = 0,
    ) -> None: ...
    def phase(self, step: int, phase: int, duration_ns: int) -> None: ...
    def value(self, name: int, step: int, value: float) -> None: ...
    def collective_begin(self, op: int, group: int, seq: int, num_bytes: int) -> None: ...
    def collective_end(self, op: int, group: int, seq: int, duration_ns: int) -> None: ...
    def plan(self, epoch: int, digest: str, text: str, work: float) -> None: ...
    def fingerprint(self, step: int, replica: int, value: int, num_units: int) -> None: ...
    def divergence(
        self, step: int, blame: int, replica: int, rank: int, tensor: int, unit: int
    ) -> None: ...
    def change_begin(self, epoch: int, reason: int, old: str, new: str, step: int) -> None: ...
    def change_phase(
        self, epoch: int, phase: int, begin_ns: int, end_ns: int, num_bytes: int
    ) -> None: ...
    def change_end(
        self, epoch: int, status: int, bytes_moved: int, bytes_lower_bound: int, units: int
    ) -> None: ...
    def fault_injected(self, step: int, fault: int, rank: int, detail: int) -> None: ...


NULL_OBSERVER: Observer = NullObserver()
