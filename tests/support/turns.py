"""Many ranks in one process, one at a time: for degrees that no machine of ours has processes for.

Each rank is a thread. One runs while the others wait: a rank passes the turn on when it comes to a
sum, and once all ranks of the group have come, what they brought is added up here, in the order of
their ranks. So the layers are the real ones and only the network is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ntp_core.runtime.comm import Comm, Ranks

T = TypeVar("T")

MEET_TIMEOUT_S = 60.0


class TurnsComm(Comm):
    """Collectives of one rank among threads.

    Attributes:
        sums: how many it took part in.
    """

    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(rank, table.num_ranks)
        self._table = table
        self.sums = 0

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Ranks, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce in place over `ranks`."""
        if len(ranks) > 1:
            self.sums += 1
            tensor.copy_(self._table.meet(ranks, self.rank, tensor, op))
        return tensor

    def broadcast_bytes(self, data: bytes | None, src: int) -> bytes:
        """The bytes that rank `src` holds."""
        told = self._table.meet(self.world, self.rank, data if self.rank == src else None, None)
        assert isinstance(told, bytes)
        return told


class Table:
    """Where ranks meet."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.turn = threading.Lock()
        self._barriers: dict[Ranks, threading.Barrier] = {}
        self._brought: dict[Ranks, dict[int, object]] = {}
        self._ops: dict[Ranks, object] = {}
        self._made: dict[Ranks, object] = {}
        self._is_broken = False

    def meet(self, ranks: Ranks, rank: int, what: object, op: object) -> object:
        """What all ranks of a group brought, put together; the turn is passed on meanwhile."""
        brought = self._brought.setdefault(ranks, {})
        brought[rank] = what
        self._ops[ranks] = op
        if ranks not in self._barriers:
            self._barriers[ranks] = threading.Barrier(
                len(ranks), lambda: self._put_together(ranks), MEET_TIMEOUT_S
            )
        if self._is_broken:
            self._barriers[ranks].abort()
        self.turn.release()
        try:
            self._barriers[ranks].wait()
        finally:
            self.turn.acquire()
        return self._made[ranks]

    def give_up(self) -> None:
        """Free whoever waits: a rank has failed."""
        self._is_broken = True
        for barrier in self._barriers.values():
            barrier.abort()

    def _put_together(self, ranks: Ranks) -> None:
        parts = [self._brought[ranks].pop(g) for g in ranks]
        tensors = [p for p in parts if isinstance(p, torch.Tensor)]
        if not tensors:
            (self._made[ranks],) = [p for p in parts if p is not None]
            return
        assert len({(t.shape, t.dtype) for t in tensors}) == 1, "ranks meet in one sum"
        is_max = self._ops[ranks] == dist.ReduceOp.MAX
        total = tensors[0].detach().clone()
        for t in tensors[1:]:
            total = torch.maximum(total, t) if is_max else total + t
        self._made[ranks] = total


def in_turns(num_ranks: int, body: Callable[[TurnsComm], T]) -> list[T]:
    """What `body` returns on each rank.

    Raises:
        Exception: the first that a rank raised.
    """
    table = Table(num_ranks)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with table.turn:
            try:
                results[rank] = body(TurnsComm(rank, table))
            except threading.BrokenBarrierError:
                pass  # another rank's error is the one to tell
            except BaseException as error:
                errors.append(error)
                table.give_up()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert len(results) == num_ranks, "ranks waited for each other in vain"
    return [results[rank] for rank in range(num_ranks)]
