"""Disks that fail, and disks after which nothing happens any more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from ntp_core.runtime.checkpoint.folder import Disk


class Stopped(BaseException):
    """The machine stands still here; nobody cleans up after it."""


class CountingDisk(Disk):
    """Counts operations; does something at one of them.

    Args:
        at: number of the operation, from 0; None for never.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def make_folder(self, path: Path) -> None:
        """As it should be, or not."""
        self._next(path)
        super().make_folder(path)

    def save_tensors(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """As it should be, or not."""
        self._next(path)
        super().save_tensors(path, tensors)

    def write_text(self, path: Path, text: str) -> None:
        """As it should be, or not."""
        self._next(path)
        super().write_text(path, text)

    def rename(self, old: Path, new: Path) -> None:
        """As it should be, or not."""
        self._next(new)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        """As it should be, or not."""
        self._next(path)
        super().remove(path)

    def happen(self, path: Path) -> None:
        """What happens at the chosen operation."""

    def _next(self, path: Path) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            self.happen(path)


class FullDisk(CountingDisk):
    """One operation fails for want of space."""

    def happen(self, path: Path) -> None:
        """Raise what the system raises."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class StoppingDisk(CountingDisk):
    """Stops before one operation, or in the middle of it: a torn file, a folder half removed."""

    def __init__(self, at: int, *, is_torn: bool) -> None:
        super().__init__(at)
        self._is_torn = is_torn

    def happen(self, path: Path) -> None:
        """Leave half of it, and stop."""
        if self._is_torn and path.is_dir() and any(path.iterdir()):
            next(iter(sorted(path.iterdir()))).unlink()
        elif self._is_torn and (path.suffix or path.name == ".latest"):
            path.write_bytes(b"\x10\x00\x00")
        raise Stopped
