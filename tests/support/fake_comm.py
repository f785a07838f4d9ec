"""A communicator of one process: every sum doubles, as if one other rank held the same bits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ntp_core.runtime.comm import Comm, Pending, Ranks


class DoublingComm(Comm):
    """Keeps what was started and finished, in order.

    Attributes:
        started, finished: ranks of each sum.
        addresses: where the memory of each sum begins.
        given: what was put into each sum.
    """

    def __init__(self, world_size: int = 2) -> None:
        super().__init__(0, world_size)
        self.started: list[Ranks] = []
        self.finished: list[Ranks] = []
        self.addresses: list[int] = []
        self.given: list[torch.Tensor] = []

    def start_all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        """Done at once."""
        assert tensor.is_contiguous()
        self.started.append(ranks)
        self.addresses.append(tensor.data_ptr())
        self.given.append(tensor.detach().clone().view(-1))
        tensor.mul_(2)
        return Pending(dist.Work(), ranks, tensor.numel() * tensor.element_size())

    def finish(self, pending: Pending) -> None:
        """Nothing is left to wait for."""
        self.finished.append(pending.ranks)
