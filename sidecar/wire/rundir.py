"""The run directory of a job on one node: `<base>/nutp-<uid>/<job_id>/`.

It holds one ring for each rank (`rank-<global rank>-<pid>.ring`), the plans beside them
(`plan-<digest>.json`, named by their content) and one `owner-<pid>-<start ticks>` file for each
process that uses it (`sidecar.wire.holders`). The base is /dev/shm, or the directory for temporary
files where that cannot be used: rings work there too, but a page may then wait for a disk.

Only this user may read it. A directory of the right name that belongs to someone else is refused.
This module never removes anything that it did not just make.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ntp_core.inbound.regular_file import read_regular
from sidecar.wire.ring import check_job_id

SHARED_MEMORY = Path("/dev/shm")
MAX_PLAN_BYTES = 64 << 20
MIN_FREE_BYTES = 4 << 20  # rings of 8 ranks; a base with less is passed over
MIN_FREE_FILES = 16
MKDIR_TRIES = 3

_RING = re.compile(r"rank-(\d{1,9})-(\d{1,10})\.ring", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)


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


def known_bases() -> list[Path]:
    """Every base that this project may have chosen here, the usual one first."""
    found = [SHARED_MEMORY]
    with contextlib.suppress(OSError):  # no directory for temporary files at all
        found.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys(found))


def check_base(base: Path, room_in: Callable[[Path], os.statvfs_result] = os.statvfs) -> None:
    """Raise OSError, saying what is wrong, where rings have no place below a base."""
    if not base.is_dir():
        raise OSError(errno.ENOTDIR, "it is not a directory", str(base))
    if not os.access(base, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "it cannot be written", str(base))
    room = room_in(base)
    if room.f_bavail * room.f_frsize < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, "it is full", str(base))
    if room.f_files and room.f_favail < MIN_FREE_FILES:
        raise OSError(errno.ENOSPC, "it has no room for more files", str(base))


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
    for tries_left in reversed(range(MKDIR_TRIES)):
        make_private_dir(path.parent)
        try:
            make_private_dir(path)
            break
        except FileNotFoundError:  # another process took the empty parent away in between
            if not tries_left:
                raise
    return path


def is_run_dir(path: Path) -> bool:
    """Whether a path names `<base>/nutp-<uid>/<job id>` of this user, and what is there is ours.

    Only such a directory may ever be removed. A link at either level makes it none.
    """
    try:
        check_job_id(path.name)
        levels = [path.lstat(), path.parent.lstat()]
    except (OSError, ValueError):
        return False
    return path.parent.name == f"nutp-{os.getuid()}" and all(
        stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() for info in levels
    )


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
    """The JSON of a plan; waits for nothing.

    Raises:
        OSError: it is missing, not a regular file, or larger than `MAX_PLAN_BYTES`.
        ValueError: not a digest, or not UTF-8.
    """
    return read_regular(run_dir / plan_name(digest), MAX_PLAN_BYTES).decode()


def list_run_dirs(base: Path) -> list[Path]:
    """Run directories of this user, by name."""
    parent = user_dir(base)
    try:
        return sorted(p for p in parent.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return []
