"""A decision is carried out once, with the words that came out, or not at all."""

from __future__ import annotations

import pytest
import torch

from ntp_core.errors import PeerLost
from ntp_core.runtime.comm import Comm, Ranks
from ntp_core.runtime.elastic.decision import Decisions


class LostComm(Comm):
    """Its sums never end here."""

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks, *args: object) -> torch.Tensor:
        """Lost."""
        raise PeerLost("of this test")


def test_decision_acts_on_the_sum() -> None:
    """Alone, the sum is one's own part."""
    decisions, heard = Decisions(), []
    words = torch.tensor([1.0, 2.0], dtype=torch.float64)
    decisions.take(Comm(0, 1), words, lambda w: heard.append(w.tolist()))
    assert (heard, decisions.count, decisions.is_pending) == ([[1.0, 2.0]], 1, False)


def test_decision_lost_waits_for_the_words_of_others() -> None:
    """It acts once, when it hears them."""
    decisions, heard = Decisions(), []
    with pytest.raises(PeerLost):
        decisions.take(LostComm(0, 2), torch.zeros(1), lambda w: heard.append(float(w[0])))
    assert (decisions.count, decisions.is_pending, heard) == (0, True, [])
    decisions.hear(torch.tensor([7.0]))
    assert (decisions.count, decisions.is_pending, heard) == (1, False, [7.0])
    decisions.drop()
    assert heard == [7.0]


def test_decision_that_nobody_made_is_undone() -> None:
    """Never acted upon; undone once."""
    decisions, told = Decisions(), []
    with pytest.raises(PeerLost):
        decisions.take(
            LostComm(0, 2),
            torch.zeros(1),
            lambda w: told.append("act"),
            lambda: told.append("undo"),
        )
    decisions.drop()
    decisions.drop()
    assert (told, decisions.count, decisions.is_pending) == (["undo"], 0, False)
