"""Process groups of one rank, made without torch's global default group.

A group belongs to its members alone: nobody else takes part when it is made, it may be made while
other ranks are dead, and it can be left behind without a word to anyone. Its name keeps it apart
from all groups before it on the same store, so that no late message of an old group arrives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ntp_core.errors import PeerLost


class Group(Protocol):
    """What is used of a process group; torch's backends all have it."""

    def allreduce(
        self, tensors: list[torch.Tensor], options: dist.AllreduceOptions, /
    ) -> dist.Work: ...

    def broadcast(
        self, tensors: list[torch.Tensor], options: dist.BroadcastOptions, /
    ) -> dist.Work: ...

    def alltoall_base(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_sizes: list[int],
        in_sizes: list[int],
        options: dist.AllToAllOptions,
        /,
    ) -> dist.Work: ...


def make_group(store: Store, name: str, index: int, size: int, timeout_s: float) -> Group:
    """A gloo group of `size` ranks, of which this is number `index`. All of them make it.

    Args:
        timeout_s: longest wait for the others while it is made, and for them in its collectives
            where these are not given a time of their own.

    Raises:
        PeerLost: the others did not come.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        group = dist.ProcessGroupGloo(PrefixStore(name, store), index, size, timeout)
        return cast(Group, group)
    except RuntimeError as error:  # DistStoreError, DistNetworkError are RuntimeErrors
        raise PeerLost(f"group {name} of {size} ranks did not form: {_first_line(error)}") from None


class Graveyard:
    """Groups that were left while a collective may still run in them.

    gloo cannot abort one: it ends when the peer's connection does, or by its time limit. Until then
    its threads read and write the buffers it was given, and to destroy its group would wait for it.
    So both are kept here, untouched, and buried when all is over.
    """

    def __init__(self) -> None:
        self._left: list[tuple[list[Group], list[dist.Work]]] = []

    def leave(self, groups: Sequence[Group], running: Sequence[dist.Work]) -> None:
        """Take groups and what was started in them."""
        self._left.append((list(groups), list(running)))
        self.bury()

    def bury(self) -> None:
        """Destroy the groups in which nothing runs any more."""
        self._left = [
            (groups, running)
            for groups, running in self._left
            if not all(w.is_completed() for w in running)
        ]

    def __len__(self) -> int:
        """Sets of groups that wait."""
        return len(self._left)


GRAVEYARD = Graveyard()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
