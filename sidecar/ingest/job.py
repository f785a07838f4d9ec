"""One run directory, watched: drain its rings, apply their records, see who still lives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sidecar.ingest.apply import Applier
from sidecar.ingest.drain import RingSet
from sidecar.ingest.liveness import IsRunning, update_liveness
from sidecar.ingest.state import JobState
from sidecar.wire.process import is_running
from sidecar.wire.ring import RingHeader

EXIT_UNKNOWN = -1
"""Of an EXIT record: the process did not know with what status it leaves."""


class JobIngest:
    """Keeps `job` up to date from the rings in `run_dir`.

    Args:
        run_dir: `<base>/nutp-<uid>/<job_id>/`; it need not exist yet.
        job_id: only rings of this job count; default: the directory's name.
        is_running: tells whether process (pid, start ticks) runs.
    """

    def __init__(
        self, run_dir: Path, job_id: str | None = None, is_running: IsRunning = is_running
    ) -> None:
        self.run_dir = run_dir
        self.job = JobState(job_id=job_id or run_dir.name)
        self._rings = RingSet(run_dir, self.job.job_id)
        self._applier = Applier(self.job, run_dir)
        self._is_running = is_running

    def tick(self) -> int:
        """Drain and apply everything there is. Never waits.

        Liveness is looked at before the rings are drained, so that the last records of a process
        found dead, its goodbye among them, are applied in the same tick.

        Returns:
            number of records applied.
        """
        self._rings.scan()
        headers = self._rings.headers()
        running = [self._is_running(h.pid, h.pid_start_ticks) for h in headers]
        applied = 0
        for drained in self._rings.poll():
            if self._applier.apply(drained.header, drained.batch):
                applied += len(drained.batch.records)
            else:
                self._rings.retire(drained.header)
        update_liveness(self.job, zip(headers, running, strict=True))
        self._applier.close_changes()
        self._complete_exits(
            header for header, runs in zip(headers, running, strict=True) if not runs
        )
        self.job.bad_rings = self._rings.refused
        return applied

    def _complete_exits(self, gone: Iterable[RingHeader]) -> None:
        """A rank that left without knowing its status: the C library may have noted it."""
        for header in gone:
            state = self.job.ranks.get(header.global_rank)
            if state is not None and state.pid == header.pid and state.exited == EXIT_UNKNOWN:
                status = self._rings.exit_status(header)
                state.exited = EXIT_UNKNOWN if status is None else status

    @property
    def refusals(self) -> list[str]:
        """Why rings were refused, newest last, at most 64."""
        return list(self._rings.refusals)

    @property
    def first_error(self) -> str:
        """Traceback of the first record that failed in a way nobody foresaw; "" without one."""
        return self._applier.first_error

    def close(self) -> None:
        """Let go of all rings; the state stays."""
        self._rings.close()
