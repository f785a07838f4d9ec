"""An observer that keeps every call as (name, arguments), to be looked at afterwards."""

from __future__ import annotations

from typing import Any

Call = tuple[str, tuple[Any, ...]]


class RecordingObserver:
    """Satisfies `ntp_core.observe.Observer`; `calls` holds all that it was told, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of one method."""
        return calls_of(self.calls, name)

    def step_begin(self, step: int) -> None:
        self._keep("step_begin", step)

    def step_end(
        self,
        step: int,
        duration_ns: int,
        busy_ns: int,
        tokens: int,
        loss: float,
        queued_ns: int = 0,
    ) -> None:
        self._keep("step_end", step, duration_ns, busy_ns, tokens, loss)

    def phase(self, step: int, phase: int, duration_ns: int) -> None:
        self._keep("phase", step, phase, duration_ns)

    def value(self, name: int, step: int, value: float) -> None:
        self._keep("value", name, step, value)

    def collective_begin(self, op: int, group: int, seq: int, num_bytes: int) -> None:
        self._keep("collective_begin", op, group, seq, num_bytes)

    def collective_end(self, op: int, group: int, seq: int, duration_ns: int) -> None:
        self._keep("collective_end", op, group, seq, duration_ns)

    def plan(self, epoch: int, digest: str, text: str, work: float) -> None:
        self._keep("plan", epoch, digest, text, work)

    def fingerprint(self, step: int, replica: int, value: int, num_units: int) -> None:
        self._keep("fingerprint", step, replica, value, num_units)

    def divergence(
        self, step: int, blame: int, replica: int, rank: int, tensor: int, unit: int
    ) -> None:
        self._keep("divergence", step, blame, replica, rank, tensor, unit)

    def change_begin(self, epoch: int, reason: int, old: str, new: str, step: int) -> None:
        self._keep("change_begin", epoch, reason, old, new, step)

    def change_phase(
        self, epoch: int, phase: int, begin_ns: int, end_ns: int, num_bytes: int
    ) -> None:
        self._keep("change_phase", epoch, phase, begin_ns, end_ns, num_bytes)

    def change_end(
        self, epoch: int, status: int, bytes_moved: int, bytes_lower_bound: int, units: int
    ) -> None:
        self._keep("change_end", epoch, status, bytes_moved, bytes_lower_bound, units)

    def fault_injected(self, step: int, fault: int, rank: int, detail: int) -> None:
        self._keep("fault_injected", step, fault, rank, detail)

    def _keep(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))


def calls_of(calls: list[Call], name: str) -> list[tuple[Any, ...]]:
    """Arguments of all calls of one method among recorded calls."""
    return [arguments for called, arguments in calls if called == name]
