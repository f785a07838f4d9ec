"""Process groups and collectives: the one place that talks to torch.distributed.

Groups are named by their global ranks and numbered in the order of creation, which is the same on
every rank. Each collective is timed and told to the observer with its group's number and sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ntp_core.observe import NULL_OBSERVER, Observer, Op

Ranks = tuple[int, ...]

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Pending:
    """An all-reduce under way; `Comm.finish` waits for it."""

    work: dist.Work
    ranks: Ranks
    num_bytes: int


class Comm:
    """Collectives of one rank.

    Args:
        rank, world_size: of the default group, which must exist when world_size > 1.
        observer: told of each collective.
        timeout_s: a collective that takes longer raises on this rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        observer: Observer = NULL_OBSERVER,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.world: Ranks = tuple(range(world_size))
        self.observer = observer
        self.wait_ns = 0  # time spent inside collectives since it was last set to 0
        self._timeout = timedelta(seconds=timeout_s)
        self._numbers: dict[Ranks, int] = {self.world: 0}
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {self.world: None}
        self._seqs: dict[Ranks, int] = {self.world: 0}

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        observer: Observer = NULL_OBSERVER,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        store: Store | None = None,
    ) -> Comm:
        """Join the default group, through `store` or by the environment (`env://`)."""
        dist.init_process_group(
            "gloo",
            init_method="env://" if store is None else None,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, world_size, observer, timeout_s)

    def close(self) -> None:
        """Leave all groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def ensure_groups(self, wanted: Iterable[Ranks]) -> None:
        """Create the groups that do not exist yet. Every rank calls it with the same groups."""
        for ranks in sorted(set(wanted)):
            if ranks in self._groups or len(ranks) < 2:
                continue
            group = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo")
            self._numbers[ranks] = len(self._numbers)
            self._groups[ranks] = group
            self._seqs[ranks] = 0

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Ranks, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce in place over `ranks`; a group of one is left as it is."""
        if len(ranks) > 1:
            begin = self._begin(Op.ALL_REDUCE, ranks, tensor.numel() * tensor.element_size())
            dist.all_reduce(tensor, op=op, group=self._groups[ranks])
            self._end(Op.ALL_REDUCE, ranks, begin)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        """Begin to sum in place over a group of two ranks or more, and return at once.

        All ranks of a group start its collectives in the same order, and finish them in that order.
        """
        work = dist.all_reduce(tensor, group=self._groups[ranks], async_op=True)
        assert work is not None
        return Pending(work, ranks, tensor.numel() * tensor.element_size())

    def finish(self, pending: Pending) -> None:
        """Wait for a started collective.

        The observer is told of the wait alone: a rank that computes while a sum is under way is not
        inside a collective, and must not look so when it hangs.
        """
        begin = self._begin(Op.ALL_REDUCE, pending.ranks, pending.num_bytes)
        pending.work.wait()
        self._end(Op.ALL_REDUCE, pending.ranks, begin)

    def exchange(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_sizes: list[int],
        in_sizes: list[int],
        ranks: Ranks,
    ) -> None:
        """All-to-all inside a group, of sizes that all ranks know: `in_sizes[i]` elements of
        `source` go to `ranks[i]`, `out_sizes[i]` of `out` come from it."""
        begin = self._begin(Op.ALL_TO_ALL, ranks, source.numel() * source.element_size())
        dist.all_to_all_single(out, source, out_sizes, in_sizes, group=self._groups[ranks])
        self._end(Op.ALL_TO_ALL, ranks, begin)

    def all_to_all(self, send: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send `send[r]` (1-dim, uint8) to each rank r of the world; returns what came from each.

        The one collective of gloo that takes unequal sizes; the sizes travel first.
        """
        if len(self.world) == 1:
            return [send[0].clone()]
        sizes = torch.tensor([t.numel() for t in send], dtype=torch.int64)
        incoming = torch.empty_like(sizes)
        self._all_to_all(incoming, sizes, None, None)
        flat = torch.cat(send)
        counts = [int(n) for n in incoming]
        received = torch.empty(sum(counts), dtype=torch.uint8)
        self._all_to_all(received, flat, counts, [t.numel() for t in send])
        return list(torch.split(received, counts))

    def broadcast_bytes(self, data: bytes | None, src: int) -> bytes:
        """The bytes that rank `src` holds, on every rank of the world."""
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        self._broadcast(size, src)
        if self.rank == src and data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            buffer = torch.zeros(int(size), dtype=torch.uint8)
        if int(size):
            self._broadcast(buffer, src)
        return bytes(buffer.numpy().tobytes())

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        if len(self.world) > 1:
            begin = self._begin(Op.BROADCAST, self.world, tensor.numel() * tensor.element_size())
            dist.broadcast(tensor, src)
            self._end(Op.BROADCAST, self.world, begin)

    def _all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_sizes: list[int] | None,
        in_sizes: list[int] | None,
    ) -> None:
        begin = self._begin(Op.ALL_TO_ALL, self.world, source.numel() * source.element_size())
        dist.all_to_all_single(out, source, out_sizes, in_sizes)
        self._end(Op.ALL_TO_ALL, self.world, begin)

    def _begin(self, op: Op, ranks: Ranks, num_bytes: int) -> int:
        self._seqs[ranks] += 1
        self.observer.collective_begin(op, self._numbers[ranks], self._seqs[ranks], num_bytes)
        return time.monotonic_ns()

    def _end(self, op: Op, ranks: Ranks, begin_ns: int) -> None:
        took = time.monotonic_ns() - begin_ns
        self.wait_ns += took
        self.observer.collective_end(op, self._numbers[ranks], self._seqs[ranks], took)
