"""Accounts for the steps of a job that knows nothing of us: from hooks to step records.

A step is what lies between two ends of the lead optimizer's `step`, the first optimizer seen. So
evaluation and checkpoints between two of them belong to the second one. Forward time is what
passes between the batch (or the step's begin, or the last backward) and the next backward, without
the collectives in it. This module knows no tensor library.
"""

from __future__ import annotations

import math
from typing import Protocol

from ntp_core.observe import Phase, Value

_DATA, _FORWARD, _BACKWARD, _OPTIMIZER = (
    int(Phase.DATA),
    int(Phase.FORWARD),
    int(Phase.BACKWARD),
    int(Phase.OPTIMIZER),
)
_LOSS = int(Value.LOSS)


class StepReceiver(Protocol):
    """The part of an observer that a step meter needs."""

    def step_begin(self, step: int) -> None: ...
    def step_end(
        self, step: int, duration_ns: int, busy_ns: int, tokens: int, loss: float
    ) -> None: ...
    def phase(self, step: int, phase: int, duration_ns: int) -> None: ...
    def value(self, name: int, step: int, value: float) -> None: ...


class StepMeter:
    """Times of the step in progress. All arguments are monotonic nanoseconds.

    Attributes:
        step: number of the step in progress, from 1.
        loss: newest loss known; NaN before the first.
    """

    __slots__ = (
        "_backward_ns",
        "_begin_ns",
        "_collective_ns",
        "_data_ns",
        "_forward_ns",
        "_mark_collective_ns",
        "_mark_ns",
        "_optimizer_ns",
        "loss",
        "step",
    )

    def __init__(self, receiver: StepReceiver, now_ns: int) -> None:
        self.step = 1
        self.loss = math.nan
        self._start(now_ns)
        receiver.step_begin(1)

    def _start(self, now_ns: int) -> None:
        self._begin_ns = self._mark_ns = now_ns
        self._collective_ns = self._mark_collective_ns = 0
        self._data_ns = self._forward_ns = self._backward_ns = self._optimizer_ns = 0

    def _mark(self, now_ns: int) -> None:
        self._mark_ns, self._mark_collective_ns = now_ns, self._collective_ns

    def collective(self, duration_ns: int) -> None:
        """A collective returned."""
        self._collective_ns += duration_ns

    def data(self, begin_ns: int, end_ns: int) -> None:
        """A batch was waited for."""
        self._data_ns += end_ns - begin_ns
        self._mark(end_ns)

    def backward(self, begin_ns: int, end_ns: int, collective_ns: int) -> None:
        """A backward pass ran; `collective_ns` of it were spent in collectives that we saw."""
        before = self._collective_ns - collective_ns - self._mark_collective_ns
        self._forward_ns += max(0, begin_ns - self._mark_ns - before)
        self._backward_ns += max(0, end_ns - begin_ns - collective_ns)
        self._mark(end_ns)

    def optimizer(self, begin_ns: int, end_ns: int) -> None:
        """An optimizer's step ran."""
        self._optimizer_ns += end_ns - begin_ns

    @property
    def collective_ns(self) -> int:
        """Time in collectives so far in this step."""
        return self._collective_ns

    def end(self, receiver: StepReceiver, now_ns: int) -> None:
        """The step is over: write its records and begin the next one."""
        duration_ns = now_ns - self._begin_ns
        for phase, phase_ns in (
            (_DATA, self._data_ns),
            (_FORWARD, self._forward_ns),
            (_BACKWARD, self._backward_ns),
            (_OPTIMIZER, self._optimizer_ns),
        ):
            if phase_ns:
                receiver.phase(self.step, phase, phase_ns)
        if not math.isnan(self.loss):
            receiver.value(_LOSS, self.step, self.loss)
        busy_ns = max(0, duration_ns - self._collective_ns)
        receiver.step_end(self.step, duration_ns, busy_ns, 0, self.loss)
        self.step += 1
        self._start(now_ns)
        receiver.step_begin(self.step)
