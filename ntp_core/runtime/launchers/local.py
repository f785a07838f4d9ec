"""The ranks of one job as processes of this machine, the rendezvous store outside of them.

The ranks find the store through the same variables that torchrun's agent sets, so that a program
runs unchanged under either. Ranks survive each other; none survives the launcher, however it ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from ntp_core.lifeline import start_tied
from ntp_core.runtime.elastic.store import serve
from ntp_core.runtime.launchers.place import OWN_NAMES

STOP_GRACE_S = 5.0
LOOK_S = 0.1


class LocalRanks:
    """Ranks of one job on this machine. Use as a context manager: leaving it ends them all.

    On Linux they are also killed when this process is (made in its main thread; ranks made in
    another thread are not). Signals are the program's own business: see `ExitSignals`.
    """

    def __init__(
        self, command: Sequence[str], num_ranks: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._store = serve("127.0.0.1", 0)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._command, self._num_ranks, self._extra = list(command), num_ranks, dict(env or {})
        try:
            for rank in range(num_ranks):
                self.processes.append(self._spawn(rank))
        except BaseException:  # no program, or a signal: those that were started must not be left
            self.stop()
            raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [p.pid for p in self.processes]

    def respawn(self, rank: int) -> None:
        """Start a rank that has ended again, with the same command."""
        assert self.processes[rank].poll() is not None, f"rank {rank} runs"
        self.processes[rank] = self._spawn(rank)

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        environment = self._environment(rank, self._num_ranks, self._extra)
        return start_tied(self._command, environment, signal.SIGKILL)

    def poll(self) -> list[int | None]:
        """Exit codes by rank; None while a rank runs."""
        return [p.poll() for p in self.processes]

    def wait(self, timeout_s: float | None, look: Callable[[], None] = lambda: None) -> list[int]:
        """Exit codes once all have ended.

        Args:
            timeout_s: longest wait; None has no end.
            look: called all the time while waiting; what it raises ends the wait.

        Raises:
            subprocess.TimeoutExpired: some have not ended in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for p in self.processes:
            while p.poll() is None:
                look()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise subprocess.TimeoutExpired(p.args, timeout_s or 0.0)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    p.wait(min(LOOK_S, left_s))
        return [p.wait() for p in self.processes]

    def stop(self) -> None:
        """Continue what is stopped, ask all to end, then kill what is left."""
        for signals, grace in (((signal.SIGCONT, signal.SIGTERM), STOP_GRACE_S), ((9,), None)):
            for p in self.processes:
                for s in signals:
                    if p.poll() is None:
                        os.killpg(p.pid, s)
            for p in self.processes:
                try:
                    p.wait(grace)
                except subprocess.TimeoutExpired:
                    continue

    def _environment(self, rank: int, num_ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: v for name, v in os.environ.items() if name not in OWN_NAMES}
        return {
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # a peer that is gone is no reason for stack traces
            **inherited,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            **extra,
        }
