"""Compares the fingerprints that replicas report for the same step."""

from __future__ import annotations

from sidecar.ingest.state import JobState

STEPS_KEPT = 1024
_EPOCHS_KEPT = 256


class FingerprintBook:
    """Counts checked and identical steps of one job.

    A step is checked once: when every replica of the plan has reported for it. A replica that
    never reports leaves its step unchecked, which is neither equal nor different.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._num_replicas: dict[int, int] = {}  # epoch -> replicas
        self._expected: dict[int, int] = {}  # step -> replicas
        self._counted: set[int] = set()

    def expect(self, epoch: int, num_replicas: int) -> None:
        """In this epoch the plan has so many replicas."""
        self._num_replicas[epoch] = num_replicas
        if len(self._num_replicas) > _EPOCHS_KEPT:
            del self._num_replicas[next(iter(self._num_replicas))]

    def add(self, epoch: int, step: int, replica: int, value: int) -> None:
        """One replica's fingerprint in a step; every rank of it may report the same.

        Raises ValueError for a replica that the plan of that epoch does not have.
        """
        num_replicas = self._num_replicas.get(epoch)
        if replica < 0 or (num_replicas is not None and replica >= num_replicas):
            raise ValueError(f"replica {replica} of {num_replicas}")
        steps = self._job.fingerprints
        if step not in steps and len(steps) >= STEPS_KEPT and step < min(steps):
            return  # older than all that is kept
        if step in self._counted:
            return  # the step was compared; after a repair it is compared again, and then is equal
        steps.setdefault(step, {})[replica] = value
        if num_replicas is not None:
            self._expected.setdefault(step, num_replicas)
        self._count(step)
        while len(steps) > STEPS_KEPT:
            self._forget(min(steps))

    def _count(self, step: int) -> None:
        values = self._job.fingerprints[step]
        if step in self._counted or len(values) != self._expected.get(step):
            return
        self._counted.add(step)
        self._job.checked_steps += 1
        self._job.identical_steps += len(set(values.values())) == 1

    def _forget(self, step: int) -> None:
        del self._job.fingerprints[step]
        self._expected.pop(step, None)
        self._counted.discard(step)
