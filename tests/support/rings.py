"""Small rings for tests, made the way a rank makes them."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

from sidecar.probe.writer import ProbeObserver
from sidecar.wire.ring import RingHeader, RingWriter, header_of_this_process
from sidecar.wire.rundir import ring_name

JOB = "test-job"
_order = itertools.count(1)


def small_header(rank: int = 0, world: int = 8, capacity: int = 64) -> RingHeader:
    """A header of this process; each one starts later than the one before."""
    header = header_of_this_process(JOB, rank, world, capacity=capacity)
    return replace(header, start_ns=header.start_ns + next(_order))


def ring_in(run_dir: Path, rank: int = 0, capacity: int = 64, pid: int | None = None) -> RingWriter:
    """A ring in a run directory, of this process or under another process' number."""
    header = small_header(rank, capacity=capacity)
    header = replace(header, pid=pid or os.getpid())
    return RingWriter.create(run_dir / ring_name(rank, header.pid), header)


def observer_in(
    run_dir: Path, rank: int = 0, capacity: int = 1024, pid: int | None = None
) -> ProbeObserver:
    """A probe that writes into a run directory."""
    return ProbeObserver(ring_in(run_dir, rank, capacity, pid))


def run_dir_in(tmp_path: Path) -> Path:
    """A run directory named after the job."""
    path = tmp_path / JOB
    path.mkdir(mode=0o700)
    return path
