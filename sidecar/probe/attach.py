"""Makes this process a watched rank, once.

A job that uses the engine calls `attach(hooks=False)` and hands the result to its runtime as
observer. A job that knows nothing of us is attached by the bootstrap, through
`sidecar.probe.torch_hooks`. Whatever fails here, the job gets an observer that does nothing and one
line on stderr.

A process has one probe; it is the state of the one `WatchedProcess` at the end of this module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ntp_core.observe import NULL_OBSERVER, Observer
from sidecar.probe.last_word import LastWord
from sidecar.probe.leaving import Leaving
from sidecar.probe.torch_hooks import TorchHooks
from sidecar.probe.writer import ProbeObserver
from sidecar.wire.holders import remove_stale
from sidecar.wire.ring import BadJobId, RingWriter, check_job_id, header_of_this_process
from sidecar.wire.rundir import create_run_dir, default_base, make_private_dir, ring_name

ENV_RUN_DIR = "NTP_SIDECAR_RUN_DIR"
ENV_JOB_ID = "NTP_SIDECAR_JOB_ID"
ENV_DISABLE = "NTP_SIDECAR_DISABLE"


class WatchedProcess:
    """The probe of this process: at most one, made by the job itself or by the hooks."""

    def __init__(self) -> None:
        self.observer: ProbeObserver | None = None
        self.torch_hooks = TorchHooks(self)
        self._hooks_may_write = True
        self._is_explicit = False
        self._is_child = False  # forked from a watched process
        self._has_failed = False
        self._has_exit_hooks = False
        self._leaving = Leaving(self._step)
        self._last_word = LastWord()
        self._gc_begin_ns = 0

    # -- becoming a rank

    def attach(
        self, job_id: str | None, run_dir: Path | None, hooks: bool, place: tuple[int, int, int]
    ) -> Observer:
        """See `attach` of this module."""
        self._is_explicit = True
        self._hooks_may_write = hooks
        if self.observer is None or not self.observer.is_on:
            self._open(job_id, run_dir, place)
        if hooks:
            self.torch_hooks.arm()
        return self.observer or NULL_OBSERVER

    def become_rank(self, global_rank: int, world_size: int, local_rank: int) -> None:
        """A process group was set up; overrules what the first optimizer step made us believe."""
        if self._is_explicit:
            return
        if self.observer is not None and self.observer.ring is not None:
            ring = self.observer.ring
            if (ring.header.global_rank, ring.header.world_size) == (global_rank, world_size):
                return
            self.observer.turn_off()
            ring.path.unlink(missing_ok=True)
            self.observer = None
        self._open(None, None, (global_rank, world_size, local_rank))

    def become_lone_rank(self) -> None:
        """An optimizer steps without a process group: a rank, unless some other process' child."""
        if self.observer is None and not (self._is_explicit or self._is_child or _is_mp_child()):
            self._open(None, None, _place_from_env())

    def observer_for_hooks(self) -> ProbeObserver | None:
        """See `HostProcess.observer_for_hooks`."""
        return self.observer if self._hooks_may_write else None

    def _open(self, job_id: str | None, run_dir: Path | None, place: tuple[int, int, int]) -> None:
        if self._has_failed or os.environ.get(ENV_DISABLE) == "1" or not _has_gil():
            return
        try:
            self.observer = ProbeObserver(_create_ring(job_id, run_dir, place))
        except Exception as error:
            self._has_failed = True  # once is enough: not at every step again
            sys.stderr.write(f"ntp-sidecar: this rank is not watched: {error}\n")
            return
        self._add_exit_hooks()
        with contextlib.suppress(OSError, AttributeError, ctypes.ArgumentError):
            if self.observer.ring is not None:
                self._last_word.arm(self.observer.ring.path)
        self.observer.measure_cost()

    # -- leaving

    def _add_exit_hooks(self) -> None:
        if self._has_exit_hooks:
            return
        self._has_exit_hooks = True
        self._leaving.arm()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._after_fork)
        gc.callbacks.append(self._on_gc)
        sys.excepthook = self._chain_excepthook(sys.excepthook)

    def _at_exit(self) -> None:
        if self.observer is not None:
            self.observer.exit(self._leaving.status())
            self.observer.turn_off()

    def _step(self) -> int:
        return 0 if self.observer is None else self.observer.step

    def _chain_excepthook(self, previous: Callable[..., object]) -> Callable[..., object]:
        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> object:
            if self.observer is not None:
                self.observer.exception()
                self._leaving.exception(kind)
            return previous(kind, error, trace)

        return excepthook

    def _after_fork(self) -> None:
        """In a forked child: the ring belongs to the parent, this process is no rank."""
        self._is_child = True
        self._last_word.forget()
        self._is_explicit = False
        self._has_failed = False
        if self.observer is not None:
            self.observer.turn_off()
            self.observer = None

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        # runs in the middle of anything, even of a record: it notes, the step's end writes
        if phase == "start":
            self._gc_begin_ns = time.monotonic_ns()
        elif self.observer is not None and self._gc_begin_ns:
            self.observer.note_gc(info["generation"], time.monotonic_ns() - self._gc_begin_ns)


def _create_ring(
    job_id: str | None, run_dir: Path | None, place: tuple[int, int, int]
) -> RingWriter:
    global_rank, world_size, local_rank = place
    named_dir = run_dir or _path_from_env()
    if named_dir is None:
        job_id = check_job_id(job_id or _job_id_from_env())
        base = default_base()
        remove_stale(base)  # no sidecar may ever come to do it
        named_dir = create_run_dir(job_id, base)
    else:
        job_id = check_job_id(job_id or os.environ.get(ENV_JOB_ID) or named_dir.name)
        if not named_dir.is_dir():
            make_private_dir(named_dir)
    header = header_of_this_process(job_id, global_rank, world_size, local_rank)
    return RingWriter.create(named_dir / ring_name(global_rank, header.pid), header)


def _path_from_env() -> Path | None:
    text = os.environ.get(ENV_RUN_DIR)
    return Path(text) if text else None


def _job_id_from_env() -> str:
    """The job's id: ours, or torchrun's, or else one that processes started together share."""
    for name in (ENV_JOB_ID, "TORCHELASTIC_RUN_ID"):
        text = os.environ.get(name, "")
        try:
            if text != "none":
                return check_job_id(text)
        except BadJobId:
            continue
    return f"job-{os.getpgrp()}"


def _place_from_env() -> tuple[int, int, int]:
    rank, world, local = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if rank.isdigit() and world.isdigit():
        # An elastic job may let in ranks beyond those that it began with.
        return int(rank), max(int(world), int(rank) + 1), int(local) if local.isdigit() else -1
    return 0, 1, 0


def _is_mp_child() -> bool:
    """Whether this interpreter was spawned by multiprocessing: a data loader worker, most often."""
    return any(
        a == "--multiprocessing-fork" or a.startswith("from multiprocessing") for a in sys.orig_argv
    )


def _has_gil() -> bool:
    """The writer's guard against two threads relies on it."""
    is_gil_enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return is_gil_enabled is None or is_gil_enabled()


_process = WatchedProcess()


def attach(
    job_id: str | None = None,
    run_dir: Path | str | None = None,
    *,
    hooks: bool = True,
    global_rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
) -> Observer:
    """Watch this process from now on. Calling it again returns the same observer.

    Args:
        job_id: default: NTP_SIDECAR_JOB_ID, the run directory's name, torchrun's run id.
        run_dir: the job's run directory; default: NTP_SIDECAR_RUN_DIR, or one named after the job.
        hooks: False for a job that reports its own steps and collectives through the observer:
            then torch's hooks write nothing, even if they were there before.
        global_rank, world_size, local_rank: default: RANK, WORLD_SIZE, LOCAL_RANK; else 0 of 1.

    Returns:
        a `ProbeObserver`; one that does nothing when NTP_SIDECAR_DISABLE=1 or no ring can be made.
    """
    rank, world, local = _place_from_env()
    rank = rank if global_rank is None else global_rank
    world = max(world, rank + 1) if world_size is None else world_size
    local = local if local_rank is None else local_rank
    path = Path(run_dir) if run_dir is not None else None
    return _process.attach(job_id, path, hooks, (rank, world, local))


def attach_engine() -> Observer:
    """For a job that reports its own steps: what NTP_OBSERVER names (`ntp_core.runtime.train`)."""
    return attach(hooks=False)


def current() -> ProbeObserver | None:
    """The probe of this process, or None."""
    return _process.observer


def arm_torch() -> None:
    """For the bootstrap: hook torch, which is loaded by now, and wait for this to be a rank."""
    _process.torch_hooks.arm()
