"""Counters that go on when the process that counts is replaced.

A rank that starts again counts from zero. Its series must not: what the processes before it
counted is kept as an offset. One entry a rank and one number a counter; forgotten jobs are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[str, int]  # job id, rank
Counter = tuple[str, tuple[str, ...]]  # metric, label values beyond job and rank
Process = tuple[int, int]  # pid, start time


@dataclass(slots=True, kw_only=True)
class _Track:
    process: Process
    newest: dict[Counter, float] = field(default_factory=dict)
    offset: dict[Counter, float] = field(default_factory=dict)


class RestartOffsets:
    """Adds up counters over the successive processes of each rank."""

    def __init__(self) -> None:
        self._tracks: dict[Key, _Track] = {}

    def carry(
        self, key: Key, process: Process, raw: Mapping[Counter, float]
    ) -> dict[Counter, float]:
        """Totals over all processes of this rank, given the counters of its present one.

        A counter that only an older process had stays at its last total.
        """
        track = self._tracks.setdefault(key, _Track(process=process))
        if process != track.process:
            track.process = process
            for counter, value in track.newest.items():
                track.offset[counter] = track.offset.get(counter, 0.0) + value
            track.newest = {}
        for counter, value in raw.items():
            self._advance(track, counter, value)
        names = track.offset.keys() | track.newest.keys()
        return {n: track.offset.get(n, 0.0) + track.newest.get(n, 0.0) for n in names}

    @staticmethod
    def _advance(track: _Track, counter: Counter, value: float) -> None:
        last = track.newest.get(counter, 0.0)
        if value < last:  # the same process was read again from the start
            track.offset[counter] = track.offset.get(counter, 0.0) + last
        track.newest[counter] = value

    def keep_jobs(self, job_ids: Iterable[str]) -> None:
        """Forget the ranks of all other jobs."""
        keep = set(job_ids)
        self._tracks = {k: v for k, v in self._tracks.items() if k[0] in keep}
