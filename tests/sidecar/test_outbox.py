"""The outbox: nothing is lost, whatever is killed; bounds hold; time is an argument."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.notify.outbox import MessageState, Outbox
from sidecar.notify.receiver import Received, Reply
from sidecar.notify.sender import Sender
from sidecar.notify.signer import Signer, new_secret
from tests.support.webhook_receiver import HANG, ScriptedReceiver

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def child(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.outbox_process", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> str:
    """SIGKILL; returns what it had still written."""
    process.kill()
    rest = process.communicate()[0]
    assert process.returncode == -9
    return rest


def test_message_is_due_at_once_and_until_delivered(tmp_path) -> None:
    """A message waits as pending and leaves when it is marked."""
    box = Outbox(tmp_path / "sub" / "outbox.db", clock=Clock())
    assert box.due() is None
    assert box.next_due_s() is None
    assert box.enqueue("a", b"body")
    message = box.due()
    assert message is not None
    assert (message.id, message.body, message.attempts) == ("a", b"body", 0)
    box.mark_delivered("a")
    assert box.due() is None
    assert box.count(MessageState.DELIVERED) == 1
    box.close()


def test_same_id_is_kept_once_even_after_delivery(tmp_path) -> None:
    """An event announced again, before or after its delivery, adds nothing."""
    box = Outbox(tmp_path / "o.db", clock=Clock())
    assert box.enqueue("a", b"first")
    assert not box.enqueue("a", b"second")
    box.mark_delivered("a")
    assert not box.enqueue("a", b"third")
    assert box.due() is None
    assert box.messages(MessageState.DELIVERED)[0].body == b"first"
    box.close()


def test_retry_waits_for_its_time_and_counts_attempts(tmp_path) -> None:
    """A failed message is not due before its time; others are served meanwhile."""
    clock = Clock()
    box = Outbox(tmp_path / "o.db", clock=clock)
    box.enqueue("a", b"")
    box.mark_retry("a", due_s=1005.0, error="answered 500")
    box.enqueue("b", b"")
    assert box.due().id == "b"
    box.mark_delivered("b")
    assert box.due() is None
    assert box.next_due_s() == 1005.0
    clock.now_s = 1005.0
    message = box.due()
    assert (message.id, message.attempts, message.error) == ("a", 1, "answered 500")
    box.close()


def test_dead_message_comes_back_only_by_replay(tmp_path) -> None:
    """Replay makes one dead message, or all, pending again with a fresh count."""
    box = Outbox(tmp_path / "o.db", clock=Clock())
    for name in "abc":
        box.enqueue(name, b"")
        box.mark_dead(name, "answered 500")
    assert box.due() is None
    assert box.replay("b") == 1
    assert box.replay("nothing") == 0
    assert (box.due().id, box.due().attempts) == ("b", 0)
    assert box.replay() == 2
    assert box.count(MessageState.PENDING) == 3
    box.close()


def test_bound_takes_delivered_then_dead_then_oldest_pending(tmp_path) -> None:
    """Over the limit the least valuable messages go first."""
    box = Outbox(tmp_path / "o.db", clock=Clock(), max_messages=3)
    for name in ("pending-1", "dead-1", "done-1"):
        box.enqueue(name, b"")
    box.mark_dead("dead-1", "")
    box.mark_delivered("done-1")

    def kept() -> set[str]:
        return {m.id for state in MessageState for m in box.messages(state)}

    box.enqueue("pending-2", b"")
    assert kept() == {"pending-1", "dead-1", "pending-2"}
    box.enqueue("pending-3", b"")
    assert kept() == {"pending-1", "pending-2", "pending-3"}
    box.enqueue("pending-4", b"")
    assert kept() == {"pending-2", "pending-3", "pending-4"}
    box.close()


@pytest.mark.parametrize("kept_before_kill", [1, 7, 40])
def test_sigkill_while_enqueuing_loses_no_acknowledged_message(tmp_path, kept_before_kill) -> None:
    """Every id whose enqueue returned is in the file after kill -9, whole, and is delivered."""
    path = tmp_path / "o.db"
    filler = child("fill", str(path))
    kept = [filler.stdout.readline().strip() for _ in range(kept_before_kill)]
    kept += kill(filler).split()
    secret = new_secret()
    box = Outbox(path, clock=time.time)
    with ScriptedReceiver(secret) as receiver:
        sender = Sender(box, receiver.url, Signer(secret), rng=random.Random(1))
        sender.start()
        waiting = [m.id for m in box.messages(MessageState.PENDING, limit=100_000)]
        done = [m.id for m in box.messages(MessageState.DELIVERED, limit=100_000)]
        assert set(kept) <= {*waiting, *done}
        wanted = set(kept[:100])
        got = receiver.wait_for(lambda r: wanted <= {m.id for m in r}, 30)
        assert sender.stop()
    assert all(m.body == b'{"number": %s}' % m.id.removeprefix("msg-").encode() for m in got)
    assert not [m.error for m in got if m.error]
    box.close()


@pytest.mark.parametrize("answer", ["before", "instead"])
def test_sigkill_while_delivering_repeats_the_message_under_its_id(tmp_path, answer) -> None:
    """Killed after the endpoint took the message, or while it hangs: the next process sends it."""
    path = tmp_path / "o.db"
    secret = new_secret()
    box = Outbox(path, clock=time.time)
    for number in range(3):
        box.enqueue(f"inc-{number}-fired", b"{}")
    processes: list[subprocess.Popen[str]] = []

    def kill_then_accept(received: Received) -> Reply:
        if processes and processes[0].poll() is None:
            kill(processes[0])
        return Reply(status=200)

    script = [HANG] if answer == "instead" else []
    with ScriptedReceiver(secret, script) as receiver:
        if answer == "before":
            receiver._reply = kill_then_accept
        processes.append(child("drain", str(path), receiver.url, NUTP_TEST_SECRET=secret))
        receiver.wait_for(lambda r: len(r) == 1, 30)
        if answer == "instead":
            kill(processes[0])
        processes[0].wait(30)
        assert box.count(MessageState.PENDING) == 3
        sender = Sender(box, receiver.url, Signer(secret), rng=random.Random(1))
        sender.start()
        got = receiver.wait_for(lambda r: len(r) == 4, 30)
        assert sender.stop()
    assert got[0].id in {m.id for m in got[1:]}
    assert {m.id for m in got[1:]} == {f"inc-{n}-fired" for n in range(3)}
    assert not [m.error for m in got if m.error]
    box.close()
