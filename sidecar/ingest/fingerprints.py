"""Compares the fingerprints that replicas report for the same step."""

from __future__ import annotations

from sidecar.ingest.state import JobState

STEPS_KEPT = 1024
_EPOCHS_KEPT = 256

_Values = dict[int, int]  # replica -> fingerprint


class FingerprintBook:
    """Counts checked and identical steps of one job.

    A step is checked once: when every replica of the plan has reported for it. A replica that
    never reports leaves its step unchecked, which is neither equal nor different. Only words under
    the same plan are compared: a step that a death interrupted is made again under the next one.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._num_replicas: dict[int, int] = {}  # epoch -> replicas
        self._by_epoch: dict[int, dict[int, _Values]] = {}  # step -> epoch -> values
        self._counted: dict[int, int] = {}  # step -> epoch under which it was compared

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
        epochs = self._by_epoch.setdefault(step, {})
        epochs.setdefault(epoch, {})[replica] = value
        steps[step] = epochs[max(epochs)]
        if len(epochs[epoch]) == num_replicas:
            steps[step] = epochs[epoch]
            self._count(epoch, step)
        while len(steps) > STEPS_KEPT:
            self._forget(min(steps))

    def go_back(self, step: int, epoch: int) -> None:
        """The job makes its steps from this one on again, under the plan of `epoch`."""
        for s in [s for s in self._job.fingerprints if s >= step]:
            if max((self._counted.get(s, -1), *self._by_epoch.get(s, {}))) < epoch:
                self._forget(s)

    def _count(self, epoch: int, step: int) -> None:
        values = self._job.fingerprints[step]
        self._counted[step] = epoch
        self._by_epoch.pop(step)
        self._job.checked_steps += 1
        self._job.identical_steps += len(set(values.values())) == 1

    def _forget(self, step: int) -> None:
        del self._job.fingerprints[step]
        self._by_epoch.pop(step, None)
        self._counted.pop(step, None)
