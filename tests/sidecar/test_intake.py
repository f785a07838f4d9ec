"""The queue between a tick and the outbox: bounded, in order, and never waited for."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from sidecar.notify.intake import Intake
from tests.support.servers import wait_until


class Shelf:
    """Stands in for an outbox: fails while it is told to, can be held, and knows its ids."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.is_broken = False
        self.is_open = threading.Event()
        self.is_open.set()
        self.tries = 0

    def keep(self, message_id: str, body: bytes) -> bool:
        """As `Sender.send`."""
        self.is_open.wait(30)
        self.tries += 1
        if self.is_broken:
            raise sqlite3.OperationalError("database or disk is full")
        is_new = message_id not in self.kept
        if is_new:
            self.kept.append(message_id)
        return is_new


def test_intake_keeps_in_order_after_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are tried again, said once, and the order stays."""
    shelf = Shelf()
    shelf.is_broken = True
    intake = Intake(shelf.keep, retry_s=0.01)
    intake.start()
    for number in range(5):
        intake.hand(f"m{number}", b"{}")
    wait_until(lambda: shelf.tries > 3, "several tries")
    assert (intake.sent, intake.waiting, shelf.kept) == (5, 5, [])
    shelf.is_broken = False
    wait_until(lambda: intake.waiting == 0, "all kept")
    assert shelf.kept == [f"m{n}" for n in range(5)]
    assert intake.stop()
    assert caplog.text.count("disk is full") == 1


def test_intake_repeat_is_not_counted_as_sent() -> None:
    """The outbox knows the id of an earlier sidecar's message."""
    shelf = Shelf()
    shelf.kept.append("old")
    intake = Intake(shelf.keep)
    intake.start()
    for name in ("old", "new"):
        intake.hand(name, b"{}")
    assert intake.stop()
    assert (intake.sent, intake.dropped, shelf.kept) == (1, 0, ["old", "new"])


def test_intake_beyond_its_bound_drops_the_oldest_and_counts() -> None:
    """Handing over returns at once also when the outbox stands still."""
    shelf = Shelf()
    shelf.is_open.clear()
    intake = Intake(shelf.keep, max_waiting=3)
    intake.start()
    for number in range(5):
        intake.hand(f"m{number}", b"{}")
    assert (intake.waiting, intake.dropped, intake.sent) == (3, 2, 3)
    shelf.is_open.set()
    assert intake.stop()
    assert shelf.kept[-3:] == ["m2", "m3", "m4"]


def test_intake_stop_counts_what_could_not_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    """It gives up within its limit, and says how many are lost."""
    shelf = Shelf()
    shelf.is_broken = True
    intake = Intake(shelf.keep, retry_s=0.01)
    intake.start()
    intake.hand("m", b"{}")
    assert intake.stop(0.2) is False
    assert (intake.dropped, intake.sent) == (1, 0)
    assert "1 messages could not be kept" in caplog.text
