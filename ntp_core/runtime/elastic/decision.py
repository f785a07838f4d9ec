"""Decisions that all ranks carry out, or none: what a step or a change becomes final by.

Each ends in one sum over the world whose result everybody acts upon, without talking to anyone: the
optimizer step with its clip coefficient, the adoption of a new plan. When a rank dies in that sum
some ranks may have the result and others an error. But whoever has put its part in is ready to act
and needs only the words. So after a loss the survivors differ by one decision at most, and those
behind act on the words of those ahead: nothing that one rank made final is ever taken back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ntp_core.runtime.comm import Comm

Act = Callable[[torch.Tensor], None]


def _nothing() -> None: ...


class Decisions:
    """The decisions of one rank, in order; the order is the same on all.

    Attributes:
        count: decisions that were carried out here.
        words: the result of the last one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.words = torch.zeros(0, dtype=torch.float64)
        self._act: Act | None = None
        self._undo: Callable[[], None] = _nothing

    @property
    def is_pending(self) -> bool:
        """This rank has put its part in and does not know what came out."""
        return self._act is not None

    def take(
        self,
        comm: Comm,
        words: torch.Tensor,
        act: Act,
        undo: Callable[[], None] = _nothing,
    ) -> None:
        """Sum `words` (float64) over the world and act on the result. Every rank takes part.

        Args:
            act: local work only: nothing in it may wait for another rank.
            undo: called instead of `act` when it turns out that nobody knows the result.

        Raises:
            PeerLost: the sum did not end here; the decision is pending.
        """
        self._act, self._undo = act, undo
        comm.all_reduce(words, comm.world)
        self.hear(words)

    def hear(self, words: torch.Tensor) -> None:
        """Carry out the pending decision with the words that others have."""
        act, self._act = self._act, None
        assert act is not None, "no decision is pending"
        self.count += 1
        self.words = words
        act(words)

    def drop(self) -> None:
        """Nobody has the result: the decision was not made."""
        if self._act is not None:
            self._act = None
            self._undo()
