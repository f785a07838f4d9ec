"""Local launcher: one process per rank, the rendezvous store outside the ranks.

torchrun kills every survivor when one rank dies; this launcher leaves them alone and only reports.
The ranks find the store through the same variables that torchrun's agent sets, so that a program
runs unchanged under either. Ranks survive each other; none survives the launcher, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ntp_core.lifeline import start_tied

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
        self._store = TCPStore(
            "127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False
        )
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
        return {
            **os.environ,
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


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ntp_core.runtime.launch --ranks N -- CMD`: 0 when every rank ended well."""
    parser = argparse.ArgumentParser(
        prog="python -m ntp_core.runtime.launch",
        description="Start one process per rank and leave survivors alone when one ends.",
    )
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("command", nargs="+", help="-- then the command of each rank")
    args = parser.parse_args(argv)
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: give at least 1")
    signals = ExitSignals()
    try:
        with LocalRanks(args.command, args.ranks) as ranks:
            codes = ranks.wait(None, signals.leave)
    except OSError as error:
        sys.stderr.write(f"launch: cannot start {args.command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
    worst = [c for c in codes if c != 0]
    return 0 if not worst else (worst[0] if worst[0] > 0 else 128 - worst[0])


class ExitSignals:
    """SIGINT, SIGTERM and SIGHUP as a wish that a program looks at. For its main function only.

    A handler that raised could be swallowed by whatever it interrupts, a finalizer or a hook of
    fork, and could interrupt the end of the ranks. What is ignored from the start stays so (nohup).

    Attributes:
        number: the signal that came first; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def leave(self) -> None:
        """Raise SystemExit(128 + n) when signal n has come."""
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def _note(self, number: int, _frame: object) -> None:
        self.number = self.number or number


if __name__ == "__main__":
    sys.exit(main())
