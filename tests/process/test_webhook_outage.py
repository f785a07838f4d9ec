"""Webhooks while their outbox cannot be written: nobody waits, and later everything arrives."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.notify.events import WebhookFormat, incident_event
from sidecar.notify.receiver import WebhookReceiver
from sidecar.notify.signer import load_secret
from tests.support import filled
from tests.support.servers import wait_until
from tests.support.webhook_receiver import ScriptedReceiver

AT_ONCE_S = 0.5
"""A call that waits for SQLite takes a second or more; one that does not, microseconds."""


class Sidecar:
    """The webhook side of a sidecar, in a process of its own."""

    def __init__(self, url: str, state_dir: Path) -> None:
        command = [sys.executable, "-m", "tests.support.webhook_process", url, str(state_dir)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, order: str) -> dict[str, Any]:
        """Give an order; returns what it says then. No order may take long."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert said["took_s"] < AT_ONCE_S
        return said

    def end(self) -> None:
        """As the end of a job ends it: what was handed over is kept first."""
        self.process.communicate(timeout=30)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[ScriptedReceiver]:
    """An endpoint that takes everything."""
    with ScriptedReceiver(load_secret(tmp_path / "state", environ={})) as made:
        yield made


@pytest.fixture
def sidecar(tmp_path: Path, receiver: ScriptedReceiver) -> Iterator[Sidecar]:
    """A sidecar whose outbox lies in the test's folder and has one message already."""
    made = Sidecar(receiver.url, tmp_path / "state")
    try:
        made.tell("incident 1")
        receiver.wait_for(lambda kept: len(kept) == 1, 30)
        wait_until(lambda: made.tell("counts")["delivered"] == 1, "delivered")
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def ids(*numbers: int) -> list[str]:
    """The ids under which these incidents must arrive."""
    events = [
        incident_event(
            "job", filled.incident(number=n), WebhookFormat.NUTP, external_url="http://h/"
        )
        for n in numbers
    ]
    return [e.id for e in events if e is not None]


def lock(state_dir: Path) -> sqlite3.Connection:
    """Hold the outbox as another process would: nobody else may write."""
    (file,) = state_dir.glob("outbox-*.sqlite")
    held = sqlite3.connect(file, isolation_level=None)
    held.execute("BEGIN EXCLUSIVE")
    return held


def test_outage_full_disk_all_arrive_with_their_ids(
    sidecar: Sidecar, receiver: ScriptedReceiver
) -> None:
    """While no byte can be written messages wait in memory; then all come, each once."""
    sidecar.tell("full")
    for number in (2, 3, 4):
        sidecar.tell(f"incident {number}")
    said = sidecar.tell("counts")
    assert (said["sent"], said["delivered"], said["dropped"]) == (4, 1, 0)
    assert receiver.ids == ids(1)
    sidecar.tell("free")
    receiver.wait_for(lambda kept: len(kept) == 4, 30)
    wait_until(lambda: sidecar.tell("counts")["delivered"] == 4, "all delivered")
    assert receiver.ids == ids(1, 2, 3, 4)
    assert sidecar.tell("counts")["queued"] == 0


def test_outage_locked_outbox_all_arrive_with_their_ids(
    sidecar: Sidecar, receiver: ScriptedReceiver, tmp_path: Path
) -> None:
    """Another process holds the file: handing over, and asking for counts, waits for nothing."""
    held = lock(tmp_path / "state")
    for number in (2, 3):
        sidecar.tell(f"incident {number}")
    assert sidecar.tell("counts")["sent"] == 3
    held.execute("ROLLBACK")
    held.close()
    receiver.wait_for(lambda kept: len(kept) == 3, 30)
    assert receiver.ids == ids(1, 2, 3)


def test_outage_locked_at_the_start_is_waited_out(tmp_path: Path) -> None:
    """A sidecar starts beside a locked outbox and delivers when it is free."""
    secret = load_secret(tmp_path / "state", environ={})
    with WebhookReceiver(secret) as endpoint:
        first = Sidecar(endpoint.url, tmp_path / "state")
        first.tell("counts")
        first.end()
        held = lock(tmp_path / "state")
        second = Sidecar(endpoint.url, tmp_path / "state")
        second.tell("incident 7")
        held.execute("ROLLBACK")
        held.close()
        (got,) = endpoint.wait_for(lambda kept: len(kept) == 1, 30)
        second.end()
    assert [got.id] == ids(7)


def test_outage_end_keeps_what_was_handed_over(tmp_path: Path) -> None:
    """Nobody listens: the message of the last tick is in the file for the next sidecar."""
    secret = load_secret(tmp_path / "state", environ={})
    with WebhookReceiver(secret) as endpoint:
        url, port = endpoint.url, int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
    first = Sidecar(url, tmp_path / "state")
    first.tell("incident 5")
    first.end()
    with WebhookReceiver(secret, port=port) as endpoint:
        second = Sidecar(url, tmp_path / "state")
        try:
            (got,) = endpoint.wait_for(lambda kept: len(kept) == 1, 60)
        finally:
            second.end()
    assert [got.id] == ids(5)
