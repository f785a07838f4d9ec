"""The run directory of a job on one node: `<base>/nutp-<uid>/<job_id>/`.

It holds one ring for each rank (`rank-<global rank>-<pid>.ring`), the plans beside them
(`plan-<digest>.json`, named by their content) and one `owner-<pid>-<start ticks>` file for each
sidecar that uses it. The base is /dev/shm, or the directory for temporary files where that cannot
be written: rings work there too, but a page may then wait for a disk.

Only this user may read it. A directory of the right name that belongs to someone else is refused.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from sidecar.wire.process import is_running, process_start_ticks
from sidecar.wire.ring import HEADER_SIZE, RingRefused, check_job_id, unpack_header

SHARED_MEMORY = Path("/dev/shm")
EMPTY_DIR_KEPT_S = 3600.0  # a run directory without rings may belong to a job that still starts
MAX_PLAN_BYTES = 64 << 20

_RING = re.compile(r"rank-(\d{1,9})-(\d{1,10})\.ring", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)
_OWNER = re.compile(r"owner-(\d{1,10})-(\d{1,20})", re.ASCII)


class RunDirRefused(OSError):
    """A directory that we must not use: a link, not a directory, or not this user's alone."""


class RingName(NamedTuple):
    """What the name of a ring file says."""

    global_rank: int
    pid: int


def ring_name(global_rank: int, pid: int) -> str:
    """File name of a rank's ring.

    >>> ring_name(3, 4242)
    'rank-3-4242.ring'
    """
    return f"rank-{global_rank}-{pid}.ring"


def parse_ring_name(name: str) -> RingName | None:
    """Inverse of `ring_name`; None for any other file."""
    match = _RING.fullmatch(name)
    return RingName(int(match[1]), int(match[2])) if match else None


def plan_name(digest: str) -> str:
    """File name of a plan. Raises ValueError for what is not a plan's digest."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"plan digest {digest!r} is not 16 lower-case hex digits")
    return f"plan-{digest}.json"


def default_base(shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where run directories live on this node; says so on stderr when it is not shared memory."""
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK | os.X_OK):
        return shared_memory
    base = Path(tempfile.gettempdir())
    sys.stderr.write(f"ntp-sidecar: {shared_memory} cannot be written; rings go to {base}\n")
    return base


def user_dir(base: Path) -> Path:
    """All run directories of this user below a base."""
    return base / f"nutp-{os.getuid()}"


def run_dir_path(job_id: str, base: Path) -> Path:
    """Path of a job's run directory; raises BadJobId, makes nothing."""
    return user_dir(base) / check_job_id(job_id)


def create_run_dir(job_id: str, base: Path | None = None) -> Path:
    """Make the run directory of a job, private to this user; an existing one is used again.

    Raises:
        BadJobId: the job id cannot be a file name.
        RunDirRefused: the place is taken by something that is not ours.
        OSError: it cannot be made.
    """
    path = run_dir_path(job_id, default_base() if base is None else base)
    make_private_dir(path.parent)
    make_private_dir(path)
    return path


def make_private_dir(path: Path) -> None:
    """Make one directory with mode 0700, or check that the one in place is ours alone."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise RunDirRefused(f"{path} is not a directory; remove it") from None
        if info.st_uid != os.getuid():
            raise RunDirRefused(
                f"{path} belongs to user {info.st_uid}, not to {os.getuid()}"
            ) from None
        if info.st_mode & 0o077:
            path.chmod(0o700)


def claim(run_dir: Path) -> Path:
    """Mark the directory as used by this process, so that no other sidecar clears it away."""
    pid = os.getpid()
    mark = run_dir / f"owner-{pid}-{process_start_ticks(pid)}"
    mark.touch(mode=0o600)
    return mark


def write_plan(run_dir: Path, digest: str, text: str) -> Path:
    """Put a plan's JSON beside the rings, once: equal digest means equal content.

    Raises:
        ValueError: not a digest, or more than `MAX_PLAN_BYTES`.
        OSError: it cannot be written.
    """
    path = run_dir / plan_name(digest)
    if path.exists():
        return path
    data = text.encode()
    if len(data) > MAX_PLAN_BYTES:
        raise ValueError(f"plan {digest} has {len(data)} bytes, more than {MAX_PLAN_BYTES}")
    draft = run_dir / f".plan-{digest}-{os.getpid()}.draft"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    draft.replace(path)
    return path


def read_plan(run_dir: Path, digest: str) -> str:
    """The JSON of a plan. Raises OSError when it is missing, ValueError when it is too large."""
    path = run_dir / plan_name(digest)
    size = path.stat().st_size
    if size > MAX_PLAN_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than {MAX_PLAN_BYTES}")
    return path.read_text(encoding="utf-8")


def list_run_dirs(base: Path) -> list[Path]:
    """Run directories of this user, by name."""
    parent = user_dir(base)
    try:
        return sorted(p for p in parent.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def is_in_use(run_dir: Path) -> bool:
    """Whether any process that writes a ring here, or watches this directory, still runs."""
    return any(_holder_runs(p) for p in run_dir.iterdir())


def _holder_runs(path: Path) -> bool:
    owner = _OWNER.fullmatch(path.name)
    if owner:
        return is_running(int(owner[1]), int(owner[2]))
    if parse_ring_name(path.name) is None:
        return False
    try:
        with path.open("rb") as file:
            header = unpack_header(path, file.read(HEADER_SIZE), path.stat().st_size)
    except (RingRefused, OSError):
        return False
    return is_running(header.pid, header.pid_start_ticks)


def remove_stale(base: Path, now_unix_s: float | None = None) -> list[Path]:
    """Remove run directories of jobs whose processes are all gone. Returns what was removed.

    A directory in which no rank has appeared yet is kept for `EMPTY_DIR_KEPT_S`.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    removed = []
    for run_dir in list_run_dirs(base):
        try:
            has_rings = any(parse_ring_name(p.name) for p in run_dir.iterdir())
            is_young = now - run_dir.stat().st_mtime < EMPTY_DIR_KEPT_S
            if is_in_use(run_dir) or (is_young and not has_rings):
                continue
        except OSError:
            continue  # another sidecar is clearing the same directory
        remove_run_dir(run_dir)
        removed.append(run_dir)
    return removed


def remove_run_dir(run_dir: Path) -> None:
    """Remove a run directory and all in it; what is gone already is fine."""
    shutil.rmtree(run_dir, ignore_errors=True)
