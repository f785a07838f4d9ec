"""One verdict on all ranks: what fails on one fails, with the same words, on every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ntp_core.errors import CheckpointError
from ntp_core.runtime.comm import Comm

T = TypeVar("T")


def agreed(comm: Comm, act: Callable[[], T]) -> T:
    """Do something on every rank. `act` must not talk to other ranks.

    Raises:
        CheckpointError: on every rank, with the words of the first rank on which `act` failed.
    """
    result: list[T] = []
    error = ""
    try:
        result.append(act())
    except (OSError, CheckpointError) as caught:
        error = str(caught) or type(caught).__name__
    nobody = comm.world[-1] + 1
    word = torch.tensor([comm.rank if error else nobody], dtype=torch.int64)
    first = int(comm.all_reduce(word, comm.world, dist.ReduceOp.MIN))
    if first < nobody:
        told = comm.broadcast_bytes(error.encode() if comm.rank == first else None, first)
        raise CheckpointError(f"rank {first}: {told.decode()}")
    return result[0]


def from_first(comm: Comm, act: Callable[[], str]) -> str:
    """What `act` gives on the leader, on every rank. Raises CheckpointError on every rank."""
    text = agreed(comm, lambda: act() if comm.is_leader else "")
    return comm.broadcast_bytes(text.encode() if comm.is_leader else None, comm.world[0]).decode()
