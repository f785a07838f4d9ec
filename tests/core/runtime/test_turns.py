"""Ranks in turn: what they bring is added in order, and a failing one frees the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.turns import TurnsComm, in_turns


def test_turns_sum_in_every_group_and_hand_on_words() -> None:
    """Groups of their own, the whole world, the largest instead of the sum, bytes of one."""

    def body(comm: TurnsComm) -> tuple[float, float, float, bytes]:
        pair = (0, 1) if comm.rank < 2 else (2, 3)
        of_pair = comm.all_reduce(torch.tensor([10.0**comm.rank]), pair)
        of_all = comm.all_reduce(torch.tensor([10.0**comm.rank]), comm.world)
        most = comm.all_reduce(torch.tensor([float(comm.rank)]), comm.world, dist.ReduceOp.MAX)
        told = comm.broadcast_bytes(b"x" * comm.rank if comm.rank == 2 else None, 2)
        return float(of_pair), float(of_all), float(most), told

    told = in_turns(4, body)
    assert [t[0] for t in told] == [11.0, 11.0, 1100.0, 1100.0]
    assert {t[1:] for t in told} == {(1111.0, 3.0, b"xx")}


def test_turns_of_a_rank_that_fails_end_with_its_error() -> None:
    """Nobody waits for it."""

    def body(comm: TurnsComm) -> None:
        comm.all_reduce(torch.ones(1), comm.world)
        if comm.rank == 1:
            raise ValueError("rank 1")
        comm.all_reduce(torch.ones(1), comm.world)

    with pytest.raises(ValueError, match="rank 1"):
        in_turns(3, body)
