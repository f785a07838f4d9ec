"""Activation checkpointing that keeps collectives in step (arXiv 1604.06174).

A recomputed layer sums over its replica again. torch stops a recomputation as soon as it has what
backward needs, which may be before the last sum on one rank and after it on another whose share is
empty; then ranks would wait for each other for ever. So every recomputation runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

T = TypeVar("T")


def recomputed(function: Callable[..., T], *args: object) -> T:
    """`function(*args)`, of which backward keeps only the arguments.

    Args:
        function: repeats itself exactly: no random numbers but those of `UnitDropout`. All ranks of
            a replica call it alike.
    """
    with set_checkpoint_early_stop(False):
        out = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return cast(T, out)
