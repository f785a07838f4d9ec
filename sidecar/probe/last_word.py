"""Lets the C library note the status that this process ends with, where no Python is left to do so.

`raise SystemExit(n)` tells its status to no Python code, nor does a program that embeds Python.
glibc calls what was registered with on_exit(3) with the status. By then Python is gone, so that is
one of glibc's own functions: `putw(status, stream)`, onto a stream over memory (fmemopen(3)) that
lies in the head of the ring. There is no descriptor behind it that the job could close and get
again for a file of its own, and the memory stays mapped for as long as this process lives.
Elsewhere than on glibc nothing is noted. A process that ends by a signal or by `os._exit` leaves no
word.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

from sidecar.wire.ring import STATUS, STATUS_ARMED, STATUS_OFFSET, STATUS_UNSET

_NEEDED = ("on_exit", "putw", "fmemopen", "setvbuf", "mmap")
_MAP_FIXED = 0x10
_UNBUFFERED = 2  # _IONBF
_FAILED = ctypes.c_void_p(-1).value


class LastWord:
    """The place for the last word of this process: at most one a ring, and few rings a process."""

    def __init__(self) -> None:
        self._pages: list[int] = []

    def arm(self, ring: Path) -> bool:
        """Have the status written into a ring; False where that cannot be. Raises OSError."""
        libc = _glibc()
        if libc is None:
            return False
        fd = os.open(ring, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            page = _map(libc, None, mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)
        if page is None:
            return False
        stream = libc.fmemopen(page + STATUS_OFFSET, STATUS.size - 4, b"w")
        if not stream:
            return False
        libc.setvbuf(stream, None, _UNBUFFERED, 0)
        # after fmemopen, which clears the place
        ctypes.memmove(
            page + STATUS_OFFSET, STATUS.pack(STATUS_UNSET, 0, STATUS_ARMED), STATUS.size
        )
        self._pages.append(page)
        return bool(libc.on_exit(libc.putw, stream) == 0)

    def forget(self) -> None:
        """In a forked child: its end is not that of the rank, and goes into memory of its own."""
        libc = _glibc() if self._pages else None
        if libc is not None:
            for page in self._pages:
                _map(libc, page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        self._pages.clear()


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in _NEEDED):
        return None
    libc.mmap.restype = libc.fmemopen.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.fmemopen.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return libc


def _map(libc: ctypes.CDLL, address: int | None, flags: int, fd: int) -> int | None:
    """One page of memory: the first of a file, or a new one; None when it cannot be had."""
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    page: int | None = libc.mmap(address, mmap.PAGESIZE, rights, flags, fd, 0)
    return None if page == _FAILED else page
