"""Finds the rings of one run directory and drains them.

A ring may vanish, be replaced, be foreign or be damaged at any time: it is then given up, counted
and remembered, and the others go on. One for which this process has no room now (rings, descriptors
or memory) is counted once and tried again at every scan. Nothing here interprets records.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sidecar.wire.reader import Batch, RingReader
from sidecar.wire.ring import RingHeader, RingRefused
from sidecar.wire.rundir import parse_ring_name

MAX_RINGS = 4096  # open rings; further ones wait for room and are counted as refused
RESERVED_FILES = 320  # descriptors kept for the page's clients, the outbox and all else
MIN_RINGS = 16
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
MAX_REFUSALS = 64
MAX_REMEMBERED = 8192  # refused or finished files that are not tried again


@dataclass(frozen=True, slots=True)
class Drained:
    """What one ring brought in one poll."""

    header: RingHeader
    batch: Batch


def ring_limit() -> int:
    """How many rings may be open: one descriptor each, with room left for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_RINGS
    return min(MAX_RINGS, max(MIN_RINGS, soft - RESERVED_FILES))


class RingSet:
    """All rings of one run directory.

    Args:
        most: rings open at once; default: by the limit of open files.

    Attributes:
        job_id: rings of any other job are refused.
        refused: number of files refused so far, each counted once.
        refusals: newest reasons, for the log.
    """

    def __init__(self, run_dir: Path, job_id: str, most: int | None = None) -> None:
        self.run_dir = run_dir
        self.job_id = job_id
        self._most = most
        self.refused = 0
        self.refusals: deque[str] = deque(maxlen=MAX_REFUSALS)
        self._open: dict[str, RingReader] = {}
        self._done: dict[tuple[str, int], None] = {}  # in order of insertion, as a bounded set
        self._waiting: dict[tuple[str, int], None] = {}  # counted, and still without room

    def poll(self) -> Iterator[Drained]:
        """Drain every open ring, each rank's older rings first; also those with nothing new."""
        for name, reader in sorted(self._open.items(), key=lambda r: r[1].header.start_ns):
            try:
                batch = reader.drain()
            except (RingRefused, OSError) as error:
                self._give_up(name, str(error))
                continue
            yield Drained(reader.header, batch)

    def headers(self) -> list[RingHeader]:
        """Headers of all open rings, oldest first."""
        return sorted((r.header for r in self._open.values()), key=lambda h: h.start_ns)

    def exit_status(self, header: RingHeader) -> int | None:
        """What the C library noted of the end of a ring's process; None where it did not."""
        for name, reader in list(self._open.items()):
            if reader.header == header:
                try:
                    return reader.exit_status()
                except (RingRefused, OSError) as error:
                    self._give_up(name, str(error))
        return None

    def scan(self) -> None:
        """Open rings that are new, and those that took the place of another."""
        try:
            with os.scandir(self.run_dir) as entries:
                found = {e.name: e.inode() for e in entries if parse_ring_name(e.name)}
        except OSError:
            return  # no directory (yet); rings that are open stay readable
        self._waiting = {k: None for k in self._waiting if found.get(k[0]) == k[1]}
        most = ring_limit() if self._most is None else self._most
        for name, inode in found.items():
            reader = self._open.get(name)
            if reader is not None and reader.inode != inode:
                self._close(name)
                reader = None
            if reader is None and (name, inode) not in self._done:
                if len(self._open) >= most:
                    self._wait(name, inode, f"{name}: no room beside {most} open rings; it waits")
                else:
                    self._try_open(name, inode)

    def _try_open(self, name: str, inode: int) -> None:
        path = self.run_dir / name
        try:
            reader = RingReader(path)
        except FileNotFoundError:
            return
        except (RingRefused, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                self._wait(name, inode, f"{error}; it waits")
            else:
                self._refuse(name, inode, str(error))
            return
        self._waiting.pop((name, inode), None)
        want, said = parse_ring_name(name), reader.header
        if said.job_id != self.job_id or want != (said.global_rank, said.pid):
            reader.close()
            reason = f"{path}: written by rank {said.global_rank} of job '{said.job_id}'"
            self._refuse(name, inode, f"{reason}, pid {said.pid}; not of this place")
            return
        self._open[name] = reader

    def _wait(self, name: str, inode: int, reason: str) -> None:
        if (name, inode) not in self._waiting and len(self._waiting) < MAX_REMEMBERED:
            self._waiting[name, inode] = None
            self.refused += 1
            self.refusals.append(reason)

    def _refuse(self, name: str, inode: int, reason: str) -> None:
        self.refused += 1
        self.refusals.append(reason)
        self._done[name, inode] = None
        while len(self._done) > MAX_REMEMBERED:
            del self._done[next(iter(self._done))]

    def _give_up(self, name: str, reason: str) -> None:
        inode = self._open[name].inode
        self._close(name)
        self._refuse(name, inode, reason)

    def _close(self, name: str) -> None:
        self._open.pop(name).close()

    def retire(self, header: RingHeader) -> None:
        """Stop reading a ring whose rank has a newer one. It is not opened again."""
        for name, reader in list(self._open.items()):
            if reader.header == header:
                self._done[name, reader.inode] = None
                self._close(name)

    def close(self) -> None:
        """Let go of all rings."""
        for name in list(self._open):
            self._close(name)
