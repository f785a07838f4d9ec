"""A pool of real rank processes that live through a test session and run many test bodies.

A body is a module-level function `body(comm, **kwargs)` of a module that the ranks can import; it
runs once on every rank of a fresh process group, and what it returns comes back by rank. Starting a
process and importing torch costs seconds, so it is done once and not for each test.

A body that raises fails the test with that rank's traceback and frees the other ranks; a rank that
hangs or dies fails it with the ranks' stacks and last lines of output, and is started anew.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

MAX_RANKS = 6
START_TIMEOUT_S = 60.0
# Once one rank has failed the others get this long to notice it.
FREE_TIMEOUT_S = 2.0
# A rank writes its stack at the timeout; the pool waits a little longer so that it can.
STACK_GRACE_S = 1.0
LOG_TAIL_CHARS = 6000
ROOT = Path(__file__).resolve().parents[2]


class RankFailed(Exception):
    """A body raised; the message holds the first rank's traceback."""


class RankTimeout(Exception):
    """A body did not return in time on some rank."""


class RankDied(Exception):
    """A rank's process ended, or did not end though that was the test."""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path


@dataclass(slots=True)
class _Answer:
    """What came back from one rank: kind is 'ok', 'error', 'died' or 'hung'."""

    kind: str
    time_ns: int = 0
    value: Any = None


class RankPool:
    """Up to `MAX_RANKS` rank processes. Use as a context manager: leaving it ends them all.

    Args:
        folder: where the ranks' output goes, one file per process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: TCPStore | None = None
        self._workers: dict[int, _Worker] = {}
        self._runs = 0
        self._started = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end(list(self._workers))

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run now."""
        return [w.process.pid for w in self._workers.values()]

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        timeout_s: float = 60.0,
        expect_death: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run `body` on ranks 0 .. world_size - 1; what it returned, by rank.

        Args:
            expect_death: ranks whose process the body kills; they return None.
            kwargs: handed to the body on every rank.

        Raises:
            RankFailed, RankTimeout, RankDied: naming the rank at fault.
        """
        assert 1 <= world_size <= MAX_RANKS
        self._ensure(world_size)
        self._runs += 1
        for rank in range(world_size):
            task = (self._runs, body.__module__, body.__qualname__, rank, world_size, timeout_s)
            self._workers[rank].pipe.send_bytes(pickle.dumps((*task, kwargs)))
        answers = self._collect(world_size, timeout_s + STACK_GRACE_S, expect_death)
        for rank, answer in answers.items():
            if answer.kind == "ok":  # all are through: now nobody leaves a group too early
                self._workers[rank].pipe.send_bytes(b"leave")
        error = self._judge(answers, body.__qualname__, expect_death)
        self._end([rank for rank, a in answers.items() if a.kind in ("died", "hung")])
        if error is not None:
            raise error
        return [answers[rank].value for rank in range(world_size)]

    def _collect(
        self, world_size: int, timeout_s: float, expect_death: Collection[int]
    ) -> dict[int, _Answer]:
        waiting = {self._workers[rank].pipe: rank for rank in range(world_size)}
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = _receive(pipe)
                if answers[rank].kind != "ok" and rank not in expect_death:
                    deadline = min(deadline, time.monotonic() + FREE_TIMEOUT_S)
        answers.update({rank: _Answer("hung") for rank in waiting.values()})
        return answers

    def _judge(
        self, answers: dict[int, _Answer], name: str, expect_death: Collection[int]
    ) -> Exception | None:
        """The one error of a run: a death first, then the earliest exception, then a hang."""
        kinds = {rank: a.kind for rank, a in sorted(answers.items())}
        head = f"{name} on {len(answers)} ranks {kinds}"
        for rank, kind in kinds.items():
            if kind == "died" and rank not in expect_death:
                code = self._workers[rank].process.wait(STACK_GRACE_S)
                return RankDied(f"{head}: rank {rank} ended with {code}\n{self._tail(rank)}")
        errors = sorted((a.time_ns, r, a.value) for r, a in answers.items() if a.kind == "error")
        if errors:
            return RankFailed(f"{head}: rank {errors[0][1]} failed first\n{errors[0][2]}")
        hung = [rank for rank, kind in kinds.items() if kind == "hung"]
        if hung:
            tails = "\n".join(f"rank {rank}:\n{self._tail(rank)}" for rank in hung)
            return RankTimeout(f"{head}: ranks {hung} did not return\n{tails}")
        alive = [rank for rank in expect_death if kinds[rank] != "died"]
        return RankDied(f"{head}: ranks {alive} were to die, but returned") if alive else None

    def _ensure(self, count: int) -> None:
        """Start the ranks that are missing, all at once."""
        if self._store is None:
            timeout = timedelta(seconds=START_TIMEOUT_S)
            self._store = TCPStore(
                "127.0.0.1", 0, None, True, timeout=timeout, wait_for_workers=False
            )
        self._end([r for r, w in self._workers.items() if w.process.poll() is not None])
        missing = [rank for rank in range(count) if rank not in self._workers]
        for rank in missing:
            self._workers[rank] = self._start(rank, self._store.port)
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank in missing:
            pipe = self._workers[rank].pipe
            is_ready = pipe.poll(max(0.0, deadline - time.monotonic()))
            if not is_ready or _receive(pipe).kind != "ok":
                tail = self._tail(rank)
                self._end(missing)
                raise RankDied(f"rank {rank} of the pool did not start\n{tail}")

    def _start(self, rank: int, port: int) -> _Worker:
        self._started += 1
        ours, theirs = Pipe()
        log = self._folder / f"rank-{rank}-{self._started}.log"
        command = [sys.executable, "-W", "error", "-m", "tests.support.rank_worker"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(port)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
            )
        theirs.close()
        return _Worker(process, ours, log)

    def _end(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._workers[rank].process.kill()
        for rank in ranks:
            worker = self._workers.pop(rank)
            worker.process.wait()
            worker.pipe.close()

    def _tail(self, rank: int) -> str:
        return self._workers[rank].log.read_text(errors="replace")[-LOG_TAIL_CHARS:]


def _receive(pipe: Connection) -> _Answer:
    try:
        return _Answer(*pickle.loads(pipe.recv_bytes()))
    except (EOFError, ConnectionResetError):
        return _Answer("died")
