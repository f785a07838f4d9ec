"""Bodies that test the rank pool itself."""

from __future__ import annotations

import os
import signal

import torch

from ntp_core.errors import PeerLost
from ntp_core.runtime.comm import Comm


def add_ranks(comm: Comm, start: int) -> tuple[int, int]:
    """(process id, `start` plus the sum of all ranks)."""
    total = comm.all_reduce(torch.tensor([comm.rank]), comm.world)
    return os.getpid(), start + int(total)


def fail_on(comm: Comm, rank: int) -> None:
    """One rank raises while the others wait for it."""
    if comm.rank == rank:
        raise ValueError(f"rank {rank} fails as told")
    comm.all_reduce(torch.zeros(1), comm.world)


def fail_while_others_make_a_group(comm: Comm, rank: int) -> None:
    """One rank raises while the others wait for it in the store."""
    if comm.rank == rank:
        raise ValueError(f"rank {rank} fails as told")
    comm.ensure_groups([comm.world[:2], comm.world[1:]])


def wait_for_nobody(comm: Comm, rank: int) -> None:
    """One rank waits for a signal that never comes; the others return."""
    if comm.rank == rank:
        signal.sigwait({signal.SIGUSR2})


def die_on(comm: Comm, rank: int) -> str:
    """One rank is killed; the others say what they saw."""
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(torch.zeros(1), comm.world)
    except PeerLost as error:
        return type(error).__name__
    return "nothing"


def leave_early(comm: Comm) -> int:
    """Rank 0 has all it needs at once, the last rank reads late."""
    for size in (1, 1 << 16):
        comm.all_reduce(torch.ones(size), comm.world)
    return comm.rank
