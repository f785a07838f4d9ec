"""One name in the run directory under which something may be left for a running job.

Looking costs one `lstat` and never raises or waits, whatever lies there. What is no regular file,
or says nothing that makes sense, is set aside: renamed to one of `MAX_ASIDE` names with the reason
beside it. What cannot even be renamed is ignored for as long as it stays the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ntp_core.inbound.regular_file import read_regular

MAX_ASIDE = 8
"""Names that refused things get; a regular file under the first one is replaced."""
MAX_REASON_CHARS = 2000

_Identity = tuple[int, int, int]


class Letter:
    """What may lie under one name.

    Args:
        path: the name.
        max_bytes: size of the largest file that is read.

    Attributes:
        strange: how often something was found that is no regular file.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.strange = 0
        self._max_bytes = max_bytes
        self._ignored: _Identity | None = None

    def is_there(self) -> bool:
        """Whether a regular file lies there. Anything else is set aside at once."""
        info = self._look()
        if info is None:
            return False
        if not stat.S_ISREG(info.st_mode):
            self.strange += 1
            self.set_aside("not a regular file")
            return False
        return True

    def read(self) -> bytes:
        """Its content. Raises OSError when it is gone, not a regular file, or too large."""
        return read_regular(self.path, self._max_bytes)

    def clear(self) -> None:
        """Take it away; what cannot be taken away is ignored."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            self._ignore()

    def set_aside(self, why: str) -> None:
        """Move it out of the way and leave the reason beside it."""
        for number in range(MAX_ASIDE):
            mark = f".{number}" if number else ""
            target = self.path.with_suffix(f"{mark}.refused.json")
            try:
                self.path.replace(target)
            except FileNotFoundError:
                return
            except OSError:
                continue  # the name is taken by a folder, or this is one and a file has the name
            _leave_reason(target.with_suffix(".txt"), why)
            return
        self._ignore()

    def _look(self) -> os.stat_result | None:
        try:
            info = self.path.lstat()
        except OSError:
            return None
        return None if _identity(info) == self._ignored else info

    def _ignore(self) -> None:
        with contextlib.suppress(OSError):
            self._ignored = _identity(self.path.lstat())


def _identity(info: os.stat_result) -> _Identity:
    return info.st_dev, info.st_ino, info.st_mtime_ns


def _leave_reason(path: Path, why: str) -> None:
    # Parts of a hostile file may be in the reason: of any length, of any characters.
    data = (why[:MAX_REASON_CHARS] + "\n").encode("utf-8", "backslashreplace")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
