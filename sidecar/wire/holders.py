"""Who uses a run directory, and its removal when nobody does.

A directory is in use while a process behind one of its rings or one of its `owner-<pid>-<ticks>`
marks still runs. Claiming and removing happen under a lock of the directory, so that no process
removes what another one has just taken.

Nothing else in the project removes directories of a job. What is removed must be
`<base>/nutp-<uid>/<job id>`, ours, and no link; in it only files of known names are unlinked, never
followed, never recursively. Anything else stays and is named in one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sidecar.wire.process import is_running, process_start_ticks
from sidecar.wire.ring import RingRefused, read_header
from sidecar.wire.rundir import (
    RunDirRefused,
    check_base,
    create_run_dir,
    is_run_dir,
    list_run_dirs,
    parse_ring_name,
)

EMPTY_DIR_KEPT_S = 3600.0  # a run directory without rings may belong to a job that still starts
LOCK_WAIT_S = 5.0
OPEN_TRIES = 3
POLL_S = 0.02
MAX_NAMED = 8  # names of files that stay, in the one line about them

DEMO_DIR = "demo"
_OWNER = re.compile(r"owner-(\d{1,10})-(\d{1,20})", re.ASCII)
_KNOWN = re.compile(
    r"\.?rank-\d{1,9}-\d{1,10}\.ring(\.draft)?"
    r"|plan-[0-9a-f]{16}\.json|\.plan-[0-9a-f]{16}-\d{1,10}\.draft"
    r"|owner-\d{1,10}-\d{1,20}|daemon\.json|\.daemon\.json\.\d{1,10}|stop"
    # messages, their drafts, and what was set aside: proposal.refused.txt, fault-3.draft, ...
    r"|\.?(proposal|facts|stop|fault-\d{1,9})(\.[a-z0-9]{1,20}){1,3}",
    re.ASCII,
)
_KNOWN_IN_DEMO = re.compile(
    r"(job|reference|losses|reference-losses)\.json|(job|sidecar|reference)\.log"
    r"|webhook-secret|\.webhook-secret\.\d{1,10}"
    r"|outbox-[0-9a-f]{12}\.sqlite(-wal|-shm|-journal)?",
    re.ASCII,
)


class RunDirInUse(ValueError):
    """A job id that a living job already uses. The message is one line with the fix."""


def claim(run_dir: Path, pid: int | None = None) -> Path:
    """Mark the directory as used by a process (default: this one), so that nobody clears it away.

    Raises OSError when there is no such directory, or no room in it.
    """
    pid = os.getpid() if pid is None else pid
    with _locked(run_dir):
        mark = run_dir / f"owner-{pid}-{process_start_ticks(pid)}"
        mark.touch(mode=0o600)
    return mark


def holders(run_dir: Path) -> set[int]:
    """Pids of the living processes, other than this one, that use a directory."""
    try:
        names = list(run_dir.iterdir())
    except OSError:
        return set()
    pids = {pid for pid in map(_holder, names) if pid is not None}
    return pids - {os.getpid()}


def is_in_use(run_dir: Path) -> bool:
    """Whether any process, this one included, uses a directory."""
    return any(_holder(path) is not None for path in run_dir.iterdir())


def open_run_dir(job_id: str, bases: Sequence[Path]) -> Path:
    """Make and claim a job's run directory below the first base that will do, and empty it.

    What an earlier, dead job of this name left there (rings, proposals, faults, the wish to stop)
    is not for this one. One line on stderr says which bases were passed over, and why.

    Raises:
        BadJobId: the job id cannot be a file name.
        RunDirInUse: a living job has this id.
        RunDirRefused: no base will do; the message says what is wrong with each.
    """
    wrong = []
    for base in bases:
        try:
            path = _open_below(base, job_id)
        except OSError as error:
            wrong.append(_reason(base, error))
            _remove_empty(base, job_id)
            continue
        if wrong:
            sys.stderr.write(f"ntp-sidecar: {'; '.join(wrong)}; rings go to {base}\n")
        return path
    raise RunDirRefused("; ".join(wrong) or "there is no place for rings")


def _open_below(base: Path, job_id: str) -> Path:
    check_base(base)
    for tries_left in reversed(range(OPEN_TRIES)):
        path = create_run_dir(job_id, base)
        try:
            _take(path)
            break
        except FileNotFoundError:  # another sidecar has just cleared the dead job's directory
            if not tries_left:
                raise
    return path


def remove_run_dir(run_dir: Path) -> bool:
    """Remove a run directory and the files we know in it; what is gone already is fine.

    Returns:
        whether it is gone. If not, one line on stderr has said why.

    Raises:
        RunDirRefused: the path is not a run directory of this user; nothing was touched.
    """
    return _remove_if(run_dir, lambda: True)


def release_run_dir(run_dir: Path, wait_s: float) -> bool:
    """End this process' use of a run directory, and remove it if nobody else uses it.

    Args:
        wait_s: how long to wait for others to end.

    Returns:
        whether it is gone; what others still use is cleared by a later start.

    Raises:
        RunDirRefused: as `remove_run_dir`.
    """
    deadline_s = time.monotonic() + wait_s
    while holders(run_dir) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)

    def is_last() -> bool:
        _own_mark(run_dir).unlink(missing_ok=True)
        return not holders(run_dir)

    return _remove_if(run_dir, is_last)


def _remove_if(run_dir: Path, may_go: Callable[[], bool]) -> bool:
    """Remove a run directory if `may_go` says so under its lock."""
    if not os.path.lexists(run_dir):
        return True
    if not is_run_dir(run_dir):
        raise RunDirRefused(f"{run_dir} is no run directory of user {os.getuid()}; it stays")
    try:
        with _locked(run_dir):
            return may_go() and _remove(run_dir)
    except FileNotFoundError:
        return True
    except OSError as error:
        sys.stderr.write(f"ntp-sidecar: {run_dir} stays: {error.strerror or error}\n")
        return False


def remove_stale(base: Path, now_unix_s: float | None = None) -> list[Path]:
    """Remove run directories of jobs whose processes are all gone. Returns what was removed.

    A directory that nobody has marked and in which no rank has appeared yet is kept for
    `EMPTY_DIR_KEPT_S`.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    removed = []
    for run_dir in list_run_dirs(base):
        if not is_run_dir(run_dir):
            continue
        try:
            with _locked(run_dir):
                if _is_stale(run_dir, now) and _remove(run_dir):
                    removed.append(run_dir)
        except OSError:
            continue  # another sidecar is clearing the same directory
    return removed


def _is_stale(run_dir: Path, now_unix_s: float) -> bool:
    names = [p.name for p in run_dir.iterdir()]
    was_used = any(parse_ring_name(n) or _OWNER.fullmatch(n) for n in names)
    is_young = now_unix_s - run_dir.stat().st_mtime < EMPTY_DIR_KEPT_S
    return not is_in_use(run_dir) and (was_used or not is_young)


def _holder(path: Path) -> int | None:
    """Pid of the living process behind a mark or a ring; None for anything else."""
    owner = _OWNER.fullmatch(path.name)
    if owner:
        pid, ticks = int(owner[1]), int(owner[2])
        return pid if is_running(pid, ticks) else None
    if parse_ring_name(path.name) is None:
        return None
    try:
        header = read_header(path)
    except (RingRefused, OSError):
        return None
    return header.pid if is_running(header.pid, header.pid_start_ticks) else None


def _own_mark(run_dir: Path) -> Path:
    pid = os.getpid()
    return run_dir / f"owner-{pid}-{process_start_ticks(pid)}"


def _take(run_dir: Path) -> None:
    """Claim a directory that nobody uses, and clear what a dead job left in it."""
    with _locked(run_dir):
        others = holders(run_dir)
        if others:
            raise RunDirInUse(
                f"job id '{run_dir.name}' is in use by process {min(others)} ({run_dir}); "
                "wait for its end, or give another --job-id"
            )
        _clear(run_dir)
        _own_mark(run_dir).touch(mode=0o600)


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the directory's lock. FileNotFoundError when it is gone, or goes while we wait."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(POLL_S)
        if not os.path.samestat(os.fstat(fd), run_dir.lstat()):
            raise FileNotFoundError(2, "replaced by another directory", str(run_dir))
        yield
    finally:
        os.close(fd)


def _remove(run_dir: Path) -> bool:
    """Under the lock: unlink what is known, then the directory itself if nothing is left."""
    cleared, stay = _clear(run_dir)
    if stay:
        if cleared:  # said once: the next start finds only strangers
            named = ", ".join(sorted(stay)[:MAX_NAMED]) + (", ..." if stay[MAX_NAMED:] else "")
            sys.stderr.write(f"ntp-sidecar: {run_dir} stays: not ours to remove: {named}\n")
        return False
    run_dir.rmdir()
    return True


def _clear(run_dir: Path) -> tuple[int, list[str]]:
    """Unlink all files of known names. Returns how many, and the names of what stays."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        cleared, stay = _unlink_known(fd, _KNOWN)
        if DEMO_DIR in stay:
            in_demo, left = _clear_demo(fd)
            cleared += in_demo
            stay.remove(DEMO_DIR)
            stay += [f"{DEMO_DIR}/{name}" for name in left]
    finally:
        os.close(fd)
    return cleared, stay


def _clear_demo(parent_fd: int) -> tuple[int, list[str]]:
    """The same for the files of a demo, and the folder itself; [""] when it is no folder."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(DEMO_DIR, flags, dir_fd=parent_fd)
    except OSError:
        return 0, [""]
    try:
        cleared, stay = _unlink_known(fd, _KNOWN_IN_DEMO)
    finally:
        os.close(fd)
    if not stay:
        os.rmdir(DEMO_DIR, dir_fd=parent_fd)
    return cleared, stay


def _unlink_known(fd: int, known: re.Pattern[str]) -> tuple[int, list[str]]:
    cleared, stay = 0, []
    for name in os.listdir(fd):
        try:
            if not known.fullmatch(name):
                raise IsADirectoryError
            os.unlink(name, dir_fd=fd)
            cleared += 1
        except FileNotFoundError:
            continue
        except OSError:
            stay.append(name)
    return cleared, stay


def _remove_empty(base: Path, job_id: str) -> None:
    """Take back directories that were made for nothing."""
    for path in (base / f"nutp-{os.getuid()}" / job_id, base / f"nutp-{os.getuid()}"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.rmdir()


def _reason(base: Path, error: OSError) -> str:
    text = error.strerror or str(error)
    return text if str(base) in text else f"{error.filename or base}: {text}"
