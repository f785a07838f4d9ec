"""Local launcher: one process per rank, the rendezvous store outside the ranks.

torchrun kills every survivor when one rank dies; this launcher leaves them alone and only reports.
The ranks find the store through the same variables that torchrun's agent sets, so that a program
runs unchanged under either. Ranks survive each other; none survives the launcher, however it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ntp_core.lifeline import end_with_parent

STOP_GRACE_S = 5.0


class LocalRanks:
    """Ranks of one job on this machine. Use as a context manager: leaving it ends them all.

    On Linux they are also killed when this process is (made in its main thread; ranks made in
    another thread are not). A program's own signals are its own: see `exit_on_signals`.
    """

    def __init__(
        self, command: Sequence[str], num_ranks: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._store = TCPStore(
            "127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        tie = end_with_parent(signal.SIGKILL)
        try:
            for rank in range(num_ranks):
                self.processes.append(
                    subprocess.Popen(
                        list(command),
                        env=self._environment(rank, num_ranks, env or {}),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                        preexec_fn=tie,
                    )
                )
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

    def poll(self) -> list[int | None]:
        """Exit codes by rank; None while a rank runs."""
        return [p.poll() for p in self.processes]

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes once all have ended. Raises subprocess.TimeoutExpired."""
        return [p.wait(timeout_s) for p in self.processes]

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
    exit_on_signals()
    try:
        with LocalRanks(args.command, args.ranks) as ranks:
            codes = [p.wait() for p in ranks.processes]
    except OSError as error:
        sys.stderr.write(f"launch: cannot start {args.command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
    worst = [c for c in codes if c != 0]
    return 0 if not worst else (worst[0] if worst[0] > 0 else 128 - worst[0])


def exit_on_signals() -> None:
    """For the main function of a program: SIGINT, SIGTERM and SIGHUP leave its blocks in order.

    The first one raises SystemExit(128 + n), later ones are ignored, so that nothing interrupts the
    end of the ranks. What was ignored from the start (nohup) stays ignored.
    """
    numbers = [
        s
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(s) is not signal.SIG_IGN
    ]

    def leave(signum: int, _frame: object) -> None:
        for s in numbers:
            signal.signal(s, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    for s in numbers:
        signal.signal(s, leave)


if __name__ == "__main__":
    sys.exit(main())
