"""One answer on all ranks before anything is changed: what is wrong on one is refused on every one.

A rank that raised alone would leave the others waiting in their first sum. So every rank checks
what it was given, and then all tell each other, in the groups that exist already: no process group
is created before all have agreed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ntp_core.errors import InvalidInput, ModelMismatch, PlanError
from ntp_core.runtime.comm import Comm

T = TypeVar("T")
Described = tuple[T, dict[str, Any]]

_KINDS: dict[str, type[InvalidInput]] = {"PlanError": PlanError}


def in_accord(comm: Comm, check: Callable[[], Described[T]]) -> T:
    """What `check` gives on this rank, once it has passed on every rank, on the same things.

    Args:
        check: does not talk to other ranks; gives a result, and in plain JSON what must be the same
            on all ranks, by name.

    Raises:
        InvalidInput: on every rank alike: the words of the lowest rank on which `check` refused, or
            the first thing that is not what the lowest rank has.
    """
    result: list[T] = []
    described: dict[str, Any] = {}
    try:
        made, described = check()
        result.append(made)
        refused = None
    except InvalidInput as error:
        refused = error
    if len(comm.world) == 1:
        if refused is not None:
            raise refused
        return result[0]
    digests, refusals = _shared(comm, described, is_refused=refused is not None)
    for rank in comm.world:
        if refusals[rank]:
            words = None if refused is None else [type(refused).__name__, str(refused)]
            _refuse(comm, rank, words)
    _compare(comm, described, digests)
    return result[0]


def _shared(
    comm: Comm, described: dict[str, Any], *, is_refused: bool
) -> tuple[dict[int, int], dict[int, bool]]:
    """Every rank's digest of what it was given, and whether it refused."""
    body = json.dumps(described, sort_keys=True).encode()
    digest = int.from_bytes(hashlib.sha256(body).digest()[:8], "little") >> 1
    told = torch.zeros(2, len(comm.world), dtype=torch.int64)
    told[:, comm.world.index(comm.rank)] = torch.tensor([digest, int(is_refused)])
    comm.all_reduce(told, comm.world)
    digests, refusals = told.tolist()
    return (
        dict(zip(comm.world, digests, strict=True)),
        {g: bool(r) for g, r in zip(comm.world, refusals, strict=True)},
    )


def _compare(comm: Comm, described: dict[str, Any], digests: dict[int, int]) -> None:
    first = comm.world[0]
    others = [g for g in comm.world if digests[g] != digests[first]]
    if not others:
        return
    body = json.dumps(described).encode() if comm.rank == first else None
    right = json.loads(comm.broadcast_bytes(body, first))
    words = (
        f"it was given {_difference(described, right)} on rank {first}. Ranks {others} differ from "
        f"rank {first}; give every rank the same model, plan and rules."
    )
    _refuse(comm, others[0], ["ModelMismatch", words])


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    for name in [*theirs, *(n for n in mine if n not in theirs)]:
        if mine.get(name) != theirs.get(name):
            have, due = (json.dumps(d.get(name))[:200] for d in (mine, theirs))
            return f"{name}: {have}, but {due}"
    return "things in another order than"


def _refuse(comm: Comm, rank: int, words: list[str] | None) -> None:
    """The same error on every rank, in the words of `rank`."""
    body = json.dumps(words).encode() if comm.rank == rank else None
    kind, text = json.loads(comm.broadcast_bytes(body, rank))
    raise _KINDS.get(kind, ModelMismatch)(f"rank {rank}: {text}")
