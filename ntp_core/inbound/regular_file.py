"""Reads files that somebody else may have put there: never waits, follows no link, is bounded.

A pipe, a device, a link or a folder under a name that we know must not hold a tick or a step up.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotRegular(OSError):
    """What lies under the name is a folder, a pipe or a device."""


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open for reading without waiting; the descriptor is the caller's to close.

    Raises:
        NotRegular: it is no regular file.
        OSError: it is missing, a link, or cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise NotRegular(errno.EINVAL, f"not a regular file ({info.st_mode:o})", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd, info


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All of a file of at most `max_bytes`.

    Raises:
        OSError: as `open_regular`, or EFBIG when the file is larger.
    """
    fd, info = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        data = b"" if info.st_size > max_bytes else file.read(max_bytes + 1)
    if info.st_size > max_bytes or len(data) > max_bytes:
        size = max(info.st_size, len(data))
        raise OSError(errno.EFBIG, f"{size} bytes; at most {max_bytes} are read", str(path))
    return data
