"""Process groups and collectives: the one place that talks to torch.distributed.

Groups are named by their global ranks and numbered in the order of creation, which is the same on
every rank. Each collective is timed and told to the observer with its group's number and sequence.

A wait for a collective is cut into slices. Between them the rank asks whether the others have given
the present groups up (`Comm.fence`): beside a peer that is stopped, or that waits elsewhere, gloo
itself would say nothing until its time limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ntp_core.errors import PeerLost
from ntp_core.observe import NULL_OBSERVER, Observer, Op
from ntp_core.runtime.process_group import GRAVEYARD, Group, make_group

Ranks = tuple[int, ...]

DEFAULT_TIMEOUT_S = 60.0
SLICE_S = 0.05
"""How long a rank waits for a collective before it looks at the fence; then again and again."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An all-reduce under way; `Comm.finish` waits for it."""

    work: dist.Work
    ranks: Ranks
    num_bytes: int


class Comm:
    """Collectives of one rank.

    Args:
        rank, world_size: of the world at the start; with world_size > 1 make it by `connect`.
        observer: told of each collective.
        timeout_s: a collective that takes longer raises PeerLost on this rank.

    Attributes:
        world: global ranks of all members, ascending.
        generation: grows when the members change; names all groups.
        fence: asked while a collective makes one wait; true when the others have left the present
            groups, so that it cannot end.
        wait_ns: time spent inside collectives since it was last set to 0.
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
        self.generation = 0
        self.observer = observer
        self.fence: Callable[[], bool] = lambda: False
        self.wait_ns = 0
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._running: list[dist.Work] = []
        self._groups: dict[Ranks, Group] = {}
        self._numbers: dict[Ranks, int] = {self.world: 0}
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
        """Meet the other ranks, through `store` or by the environment (`env://`)."""
        if store is None:
            store, rank, world_size = next(rendezvous("env://", rank, world_size))
            # torchrun keeps its store over a restart, with the addresses of the ranks before.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"ntp/attempt/{attempt}", store)
        comm = cls(rank, world_size, observer, timeout_s)
        comm.join(store, comm.world, 0, timeout_s)
        return comm

    @property
    def is_leader(self) -> bool:
        """Whether this is the lowest rank: it reads for all and speaks for all."""
        return self.rank == self.world[0]

    def join(self, store: Store, world: Ranks, generation: int, timeout_s: float) -> None:
        """Leave all groups, and make the world of another generation with its other members.

        Args:
            store: seen by all members.
            timeout_s: longest wait for the others.

        Raises:
            PeerLost: they did not come.
        """
        self.leave()
        self.world, self.generation, self._store = world, generation, store
        self._numbers = {world: generation << 16}
        self._seqs = {world: 0}
        if len(world) > 1:
            self._groups[world] = self._make(world, timeout_s)

    def leave(self) -> None:
        """Leave all groups at once, whatever runs in them."""
        GRAVEYARD.leave(list(self._groups.values()), self._running)
        self._groups, self._running = {}, []

    def close(self) -> None:
        """Leave all groups for good."""
        self.leave()

    def ensure_groups(self, wanted: Iterable[Ranks]) -> None:
        """Create the groups that do not exist yet. Every rank calls it with the same groups."""
        for ranks in sorted(set(wanted)):
            if ranks in self._numbers or len(ranks) < 2:
                continue
            self._numbers[ranks] = (self.generation << 16) + len(self._numbers)
            self._seqs[ranks] = 0
            if self.rank in ranks and self._store is not None:
                self._groups[ranks] = self._make(ranks, self._timeout_s)

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Ranks, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce in place over `ranks`; a group of one is left as it is."""
        if len(ranks) > 1:
            begin = self._begin(Op.ALL_REDUCE, ranks, tensor.numel() * tensor.element_size())
            self._wait(self._all_reduce(tensor, ranks, op))
            self._end(Op.ALL_REDUCE, ranks, begin)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        """Begin to sum in place over a group of two ranks or more, and return at once.

        All ranks of a group start its collectives in the same order, and finish them in that order.
        """
        work = self._all_reduce(tensor, ranks, dist.ReduceOp.SUM)
        return Pending(work, ranks, tensor.numel() * tensor.element_size())

    def finish(self, pending: Pending) -> None:
        """Wait for a started collective.

        The observer is told of the wait alone: a rank that computes while a sum is under way is not
        inside a collective, and must not look so when it hangs.
        """
        begin = self._begin(Op.ALL_REDUCE, pending.ranks, pending.num_bytes)
        self._wait(pending.work)
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
        self._all_to_all(out, source, out_sizes, in_sizes, ranks)

    def all_to_all(self, send: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send `send[i]` (1-dim, uint8) to rank `world[i]`; returns what came from each, in order.

        The one collective of gloo that takes unequal sizes; the sizes travel first.
        """
        if len(self.world) == 1:
            return [send[0].clone()]
        sizes = torch.tensor([t.numel() for t in send], dtype=torch.int64)
        incoming = torch.empty_like(sizes)
        self._all_to_all(incoming, sizes, [], [], self.world)
        filled = [t for t in send if t.numel()]
        flat = filled[0] if len(filled) == 1 else torch.cat(send)
        counts = [int(n) for n in incoming]
        received = torch.empty(sum(counts), dtype=torch.uint8)
        self._all_to_all(received, flat, counts, [t.numel() for t in send], self.world)
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
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = self.world.index(src), self._limit
            begin = self._begin(Op.BROADCAST, self.world, tensor.numel() * tensor.element_size())
            self._wait(self._groups[self.world].broadcast([tensor], options))
            self._end(Op.BROADCAST, self.world, begin)

    def _all_reduce(
        self, tensor: torch.Tensor, ranks: Ranks, op: dist.ReduceOp.RedOpType
    ) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]  # the stub forgets the named operations
        options.timeout = self._limit
        # Without its graph: whatever still runs after a loss would keep old shapes alive with it.
        work = self._groups[ranks].allreduce([tensor.detach()], options)
        self._running.append(work)
        return work

    def _all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_sizes: list[int],
        in_sizes: list[int],
        ranks: Ranks,
    ) -> None:
        options = dist.AllToAllOptions()
        options.timeout = self._limit
        begin = self._begin(Op.ALL_TO_ALL, ranks, source.numel() * source.element_size())
        group = self._groups[ranks]
        self._wait(group.alltoall_base(out, source, out_sizes, in_sizes, options))
        self._end(Op.ALL_TO_ALL, ranks, begin)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _make(self, ranks: Ranks, timeout_s: float) -> Group:
        assert self._store is not None
        name = f"ntp/{self.generation}/group/{self._numbers[ranks]}"
        return make_group(self._store, name, ranks.index(self.rank), len(ranks), timeout_s)

    def _wait(self, work: dist.Work) -> None:
        """Until it is done.

        Raises:
            PeerLost: it failed, took too long, or the others have left the groups.
        """
        if not self._running or self._running[-1] is not work:
            self._running.append(work)
        deadline = time.monotonic() + self._timeout_s
        while not self._done_within(work, SLICE_S):
            if self.fence():
                raise PeerLost(f"the others have left generation {self.generation}")
            if time.monotonic() > deadline:
                raise PeerLost(f"a collective was not over within {self._timeout_s:g} s")
        self._running.remove(work)

    def _done_within(self, work: dist.Work, seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it may have ended well just after its time was up
            except RuntimeError as error:
                raise PeerLost(f"a collective failed: {str(error).splitlines()[0][:200]}") from None
        return True

    def _begin(self, op: Op, ranks: Ranks, num_bytes: int) -> int:
        self._seqs[ranks] += 1
        self.observer.collective_begin(op, self._numbers[ranks], self._seqs[ranks], num_bytes)
        return time.monotonic_ns()

    def _end(self, op: Op, ranks: Ranks, begin_ns: int) -> None:
        took = time.monotonic_ns() - begin_ns
        self.wait_ns += took
        self.observer.collective_end(op, self._numbers[ranks], self._seqs[ranks], took)
