"""Signed delivery against a real HTTP server: retries, answers, ends, secrets."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import random
import sqlite3
import stat
import threading
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_core.errors import InvalidInput
from ntp_core.observe import ChangeStatus
from sidecar.checks.finding import Severity
from sidecar.incidents.incident import IncidentState
from sidecar.notify.endpoint import check_url, redacted
from sidecar.notify.events import MAX_BODY_BYTES, WebhookFormat, change_event, incident_event
from sidecar.notify.outbox import MessageState, Outbox
from sidecar.notify.receiver import MAX_BODY_BYTES as RECEIVER_MAX_BYTES
from sidecar.notify.receiver import MAX_KEPT, Reply, WebhookReceiver
from sidecar.notify.retry import JITTER, SCHEDULE_S, delay_s, retry_after_s
from sidecar.notify.sender import Sender
from sidecar.notify.signer import SECRET_FILE, SECRET_VARIABLE, Signer, load_secret, new_secret
from tests.support import filled
from tests.support.servers import free_port, wait_until
from tests.support.webhook_receiver import HANG, ScriptedReceiver

PAGE = "http://node7:9999/"
NUTP, ALERTMANAGER = WebhookFormat.NUTP, WebhookFormat.ALERTMANAGER
NOW_S = (0.0,) * len(SCHEDULE_S)  # a schedule without waits
HOUR_S = 3600.0


class Delivery:
    """An outbox, a receiver and a sender between them; the clock can be moved."""

    def __init__(self, path, script=(), *, signed=True, schedule_s=NOW_S, url=None) -> None:
        self.secret = new_secret()
        self.ahead_s = 0.0
        self.box = Outbox(path / "o.db", clock=self.clock)
        self.receiver = ScriptedReceiver(self.secret if signed else None, script)
        signer = Signer(self.secret) if signed else None
        self.sender = Sender(
            self.box,
            url or self.receiver.url,
            signer,
            rng=random.Random(7),
            clock=self.clock,
            timeout_s=5,
            schedule_s=schedule_s,
        )

    def clock(self) -> float:
        return time.time() + self.ahead_s

    def forward(self, seconds: float) -> None:
        self.ahead_s += seconds
        self.sender.wake()

    def reached(self, state: MessageState, number: int = 1) -> None:
        wait_until(lambda: self.box.count(state) == number, f"{number} {state}", 20)

    def __enter__(self) -> Delivery:
        self.receiver.start()
        self.sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.sender.stop(5)
        self.receiver.stop()
        self.box.close()


def signature(secret: str, message_id: str, timestamp: str, body: bytes) -> str:
    """The signature as the specification words it, without the library."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def test_delivery_is_signed_as_the_specification_says(tmp_path) -> None:
    """The receiver gets the exact body, and a signature that an independent formula confirms."""
    with Delivery(tmp_path) as d:
        body = json.dumps({"text": "\u00fc \u4e2d"}, ensure_ascii=False).encode()
        assert d.sender.send("inc-1-fired-0", body)
        got = d.receiver.wait_for(lambda r: len(r) == 1, 20)[0]
        d.reached(MessageState.DELIVERED)
    assert (got.body, got.error, got.id) == (body, "", "inc-1-fired-0")
    assert got.headers["content-type"] == "application/json"
    expected = signature(d.secret, got.id, got.headers["webhook-timestamp"], body)
    assert got.headers["webhook-signature"] == expected
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 60


def test_signature_by_another_secret_is_refused(tmp_path) -> None:
    """The receiver answers 401 to a stranger; while a secret changes either one is accepted."""
    old, new = new_secret(), new_secret()
    cases = ((new_secret(), True), (f"{new} {old}", False), (f"{old}\n{new}", False))
    for number, (sent, error) in enumerate(cases):
        with ScriptedReceiver(old) as receiver:
            box = Outbox(tmp_path / f"{number}.db", clock=time.time)
            box.enqueue("m", b"{}")
            sender = Sender(box, receiver.url, Signer(sent), rng=random.Random(1))
            sender.start()
            got = receiver.wait_for(lambda r: len(r) == 1, 20)[0]
            assert bool(got.error) is error
            assert sender.stop(5)
            box.close()


@pytest.mark.parametrize("status", [500, 503, 429, 404, 400, 401])
def test_failed_attempts_are_repeated_until_success(tmp_path, status) -> None:
    """Whatever is not 2xx is tried again under the same id."""
    with Delivery(tmp_path, [status] * 3) as d:
        d.sender.send("m", b"{}")
        d.reached(MessageState.DELIVERED)
        counts = d.sender.counts()
    assert d.receiver.ids == ["m"] * 4
    assert (counts.delivered, counts.retried, counts.dead, counts.queued) == (1, 3, 0, 0)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_is_not_followed(tmp_path, status) -> None:
    """A signed message goes nowhere but to its endpoint."""
    with ScriptedReceiver(None) as elsewhere:
        away = Reply(status=status, headers={"location": elsewhere.url})
        with Delivery(tmp_path, [away, away]) as d:
            d.sender.send("m", b"{}")
            d.reached(MessageState.DELIVERED)
        assert d.receiver.ids == ["m"] * 3
        assert elsewhere.received == []


def test_each_attempt_has_a_fresh_timestamp_and_waits_by_the_schedule(tmp_path) -> None:
    """Attempts go out when the clock reaches their time, not before; ids stay."""
    with Delivery(tmp_path, [500, 500], signed=True, schedule_s=SCHEDULE_S) as d:
        d.sender.send("m", b"{}")
        d.receiver.wait_for(lambda r: len(r) == 1, 20)
        for number, wait_s in ((2, 5.0), (3, 30.0)):
            wait_until(lambda: d.box.next_due_s() > d.clock(), "next attempt planned", 20)
            left_s = d.box.next_due_s() - d.clock()
            assert wait_s - 3 < left_s <= wait_s * (1 + JITTER)
            d.forward(wait_s * (1 + JITTER))
            d.receiver.wait_for(lambda r, number=number: len(r) == number, 20)
        d.reached(MessageState.DELIVERED)
    stamps = [int(r.headers["webhook-timestamp"]) for r in d.receiver.received]
    assert stamps == sorted(set(stamps))
    assert not [r.error for r in d.receiver.received if r.error]


def test_retry_after_is_obeyed(tmp_path) -> None:
    """An endpoint that asks for an hour gets it, though the schedule says seconds."""
    script = [Reply(status=429, headers={"retry-after": "3600"})]
    with Delivery(tmp_path, script, signed=False) as d:  # the clock leaves the receiver's behind
        d.sender.send("m", b"{}")
        d.receiver.wait_for(lambda r: len(r) == 1, 20)
        wait_until(lambda: d.box.next_due_s() > d.clock(), "next attempt planned", 20)
        assert 3590 < d.box.next_due_s() - d.clock() <= 3600
        d.forward(3600)
        d.reached(MessageState.DELIVERED)


def test_gone_endpoint_gets_nothing_more_until_enabled(tmp_path) -> None:
    """After 410 nothing is sent; what was asked for later waits and is sent when enabled."""
    with Delivery(tmp_path, [410]) as d:
        d.sender.send("first", b"{}")
        d.reached(MessageState.DEAD)
        d.sender.send("second", b"{}")
        counts = d.sender.counts()
        assert (counts.enabled, counts.dead, counts.queued) == (False, 1, 1)
        assert d.receiver.ids == ["first"]
        d.sender.enable()
        d.reached(MessageState.DELIVERED)
        assert d.sender.replay() == 1
        d.reached(MessageState.DELIVERED, 2)
    assert d.receiver.ids == ["first", "second", "first"]


def test_message_is_dead_after_the_last_attempt_and_can_be_replayed(tmp_path, caplog) -> None:
    """After all attempts the message rests, with its error; replay starts anew."""
    with Delivery(tmp_path, [500] * len(SCHEDULE_S)) as d:
        d.sender.send("m", b"{}")
        d.reached(MessageState.DEAD)
        dead = d.box.messages(MessageState.DEAD)[0]
        assert (dead.attempts, dead.error) == (len(SCHEDULE_S), "answered 500")
        assert d.sender.replay("m") == 1
        d.reached(MessageState.DELIVERED)
    assert len(d.receiver.ids) == len(SCHEDULE_S) + 1
    assert "given up" in caplog.text


def test_unreachable_endpoint_loses_nothing(tmp_path, caplog) -> None:
    """While nobody listens messages wait; when the endpoint comes up all arrive, each once."""
    port = free_port()
    secret = new_secret()
    box = Outbox(tmp_path / "o.db", clock=time.time)
    url = f"http://127.0.0.1:{port}/webhook?token=query-secret"
    short = (0.0, *(0.05,) * 400)
    sender = Sender(box, url, Signer(secret), rng=random.Random(3), schedule_s=short)
    sender.start()
    ids = [f"m{n}" for n in range(5)]
    for name in ids:
        assert sender.send(name, b"{}")
    wait_until(lambda: sender.counts().retried > 10, "some attempts failed", 20)
    assert sender.counts().queued == 5
    with WebhookReceiver(secret, port=port) as endpoint:
        got = endpoint.wait_for(lambda r: {m.id for m in r} == set(ids), 20)
        wait_until(lambda: box.count(MessageState.DELIVERED) == 5, "all delivered", 20)
        assert sender.stop(5)
    assert sorted(m.id for m in got) == ids
    assert caplog.text.count("will retry") == 1, "one line for an outage"
    assert "query-secret" not in caplog.text
    box.close()


class FullDisk(Outbox):
    """An outbox that can be read but for a while not written."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.failures_left = 3

    def mark_delivered(self, message_id: str) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise sqlite3.OperationalError("database or disk is full")
        super().mark_delivered(message_id)


def test_delivery_that_cannot_be_recorded_is_not_repeated(tmp_path, caplog) -> None:
    """On a full disk the record is tried again, not the delivery; one line says so."""
    box = FullDisk(tmp_path / "o.db", clock=time.time)
    secret = new_secret()
    with ScriptedReceiver(secret) as receiver:
        sender = Sender(box, receiver.url, Signer(secret), rng=random.Random(1))
        sender.start()
        sender.send("m", b"{}")
        receiver.wait_for(lambda r: len(r) == 1, 20)

        def recorded() -> bool:
            sender.wake()
            return box.count(MessageState.DELIVERED) == 1

        wait_until(recorded, "recorded", 20)
        assert sender.stop(5)
        assert receiver.ids == ["m"]
    assert (sender.counts().delivered, caplog.text.count("trying again")) == (1, 1)
    box.close()


def test_outbox_that_is_no_database_is_refused(tmp_path) -> None:
    """What will never work is said at once; what is locked or full now is not that."""
    (tmp_path / "o.db").write_text("no database, and long enough to be seen as none" * 9)
    with pytest.raises(sqlite3.DatabaseError):
        Outbox(tmp_path / "o.db", clock=time.time)
    with pytest.raises(sqlite3.OperationalError):
        Outbox(tmp_path, clock=time.time)


def test_stop_does_not_wait_for_a_silent_endpoint(tmp_path) -> None:
    """Stop returns within its limit; the message of the attempt stays for the next process."""
    secret = new_secret()
    box = Outbox(tmp_path / "o.db", clock=time.time)
    with ScriptedReceiver(secret, [HANG]) as receiver:
        sender = Sender(box, receiver.url, Signer(secret), rng=random.Random(1))
        sender.start()
        sender.send("m", b"{}")
        receiver.wait_for(lambda r: len(r) == 1, 20)
        assert sender.stop(0.2) is False
        assert box.count(MessageState.PENDING) == 1
    wait_until(lambda: not sender._thread.is_alive(), "thread ended with the answer", 20)
    box.close()


def test_idle_sender_stops_at_once(tmp_path) -> None:
    """A sender that waits for work ends when told, also before its start."""
    box = Outbox(tmp_path / "o.db", clock=time.time)
    assert Sender(box, "http://127.0.0.1:9/", None, rng=random.Random(1)).stop()
    sender = Sender(box, "http://127.0.0.1:9/", None, rng=random.Random(1))
    sender.start()
    assert sender.stop()
    box.enqueue("m", b"{}")
    assert sender.counts().queued == 1
    box.close()
    assert sender.counts().queued == 1, "a report after the end still has the number"


def test_receiver_bounds_what_it_takes_and_keeps() -> None:
    """Too large, without a length, unsigned or garbled: refused; only the newest are kept."""
    with WebhookReceiver(new_secret()) as receiver, httpx.Client(trust_env=False) as client:
        large = client.post(receiver.url, content=b"x" * (RECEIVER_MAX_BYTES + 1))
        endless = client.post(receiver.url, content=iter([b"x"]))
        assert (large.status_code, endless.status_code) == (413, 411)
        assert receiver.received == []
        garbled = {"webhook-id": "g", "webhook-timestamp": "x", "webhook-signature": "v1"}
        for number in range(MAX_KEPT + 3):
            answer = client.post(receiver.url, content=b"\xff", headers=garbled)
            assert answer.status_code == 401, number
        assert len(receiver.received) == MAX_KEPT
        assert all(r.error for r in receiver.received)
        with pytest.raises(TimeoutError, match="received 256"):
            receiver.wait_for(lambda r: not r, 0.01)


def test_secret_is_never_shown(tmp_path, caplog) -> None:
    """No repr, log line or stored message holds the secret or its bytes in another form."""
    caplog.set_level(logging.DEBUG)
    with Delivery(tmp_path, [500, 410]) as d:
        d.sender.send("m", b"{}")
        d.reached(MessageState.DEAD)
    signer = Signer(d.secret)
    shown = f"{signer!r} {d.sender!r} {vars(d.box)!r} {caplog.text} {threading.enumerate()!r}"
    key = d.secret.removeprefix("whsec_")
    assert key not in shown
    assert base64.b64decode(key).hex() not in shown
    assert key.encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("o.db*"))


@pytest.mark.parametrize(
    "secret", ["", "hunter2-in-plain", "whsec_***", "whsec_aGk=", "whsec_" + "QUFB" * 30]
)
def test_wrong_secret_is_refused_without_being_repeated(tmp_path, secret) -> None:
    """The error says what form a secret has, and not what was given."""
    with pytest.raises(InvalidInput, match="whsec_ and base64") as caught:
        Signer(secret)
    assert not secret.removeprefix("whsec_") or secret not in str(caught.value)
    file = tmp_path / "secret"
    file.write_text(secret)
    with pytest.raises(InvalidInput):
        load_secret(tmp_path, environ={}, secret_file=file)


def test_secret_comes_from_file_then_environment_then_is_made(tmp_path) -> None:
    """The order of sources; the made one stays and only its owner can read it."""
    file, in_file, in_environment = tmp_path / "s", new_secret(), new_secret()
    file.write_text(in_file + "\n")
    environ = {SECRET_VARIABLE: in_environment}
    state = tmp_path / "state"
    assert load_secret(state, environ=environ, secret_file=file) == in_file
    assert load_secret(state, environ=environ) == in_environment
    assert not state.exists()
    made = load_secret(state, environ={})
    assert load_secret(state, environ={}) == made
    assert stat.S_IMODE((state / SECRET_FILE).stat().st_mode) == 0o600
    assert [p.name for p in state.iterdir()] == [SECRET_FILE]
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_secret(state, environ={}, secret_file=tmp_path / "missing")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org/hook",
        "ftp://example.org/",
        "http://",
        "http:///path",
        "https://:80/",
        "http://host:99999/",
        "http://host:port/",
        "http://[::1/",
        "http://host/a b",
        "http://host/\n",
        "file:///etc/passwd",
    ],
)
def test_wrong_address_is_refused_in_one_line(url) -> None:
    """The message names the option and the value and says what to give."""
    with pytest.raises(InvalidInput) as caught:
        check_url(url)
    message = str(caught.value)
    assert message.startswith("--webhook-url ")
    assert repr(url) in message
    assert "give http://HOST[:PORT]/PATH" in message
    assert "\n" not in message


def test_good_addresses_pass_and_secrets_in_them_are_not_shown() -> None:
    """Host names, addresses and ports; what may be secret is cut from what is shown."""
    for url in ("http://127.0.0.1:1/x", "https://hooks.example.org/a?b=c", "http://[::1]:80/"):
        assert check_url(url) == url
    assert redacted("https://user:pw@host:1/p?token=t#f") == "https://host:1/p"
    with pytest.raises(InvalidInput) as caught:
        check_url("ftp://user:pw@host/p?token=t")
    assert "pw" not in str(caught.value)
    assert "token" not in str(caught.value)


@given(st.integers(0, len(SCHEDULE_S) - 1), st.floats(0, 1e9), st.integers(0, 2**32))
def test_wait_is_within_jitter_and_never_below_what_was_asked(failures, asked_s, seed) -> None:
    """Bounds of the wait, for any answer and any random source; the same seed repeats it."""
    plain = delay_s(failures, random.Random(seed))
    assert SCHEDULE_S[failures] <= plain <= SCHEDULE_S[failures] * (1 + JITTER)
    wait_s = delay_s(failures, random.Random(seed), retry_after_s=asked_s)
    assert wait_s == max(plain, min(asked_s, 24 * HOUR_S))
    assert delay_s(len(SCHEDULE_S), random.Random(seed)) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("0", 0.0),
        ("-5", 0.0),
        ("1.5", 1.5),
        ("soon", None),
        ("inf", None),
        ("nan", None),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        ("Thu, 01 Jan 2099 00:00:00 GMT", 4070908800.0 - 1e9),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, expected) -> None:
    """Both forms of the header; nonsense is ignored."""
    assert retry_after_s(value, 1e9) == expected


def test_incident_events_tell_fired_and_resolved() -> None:
    """Types, time and data of our events; a pending incident is not told."""
    assert (
        incident_event("j", filled.incident(IncidentState.PENDING), NUTP, external_url=PAGE) is None
    )
    fired = json.loads(incident_event("j", filled.incident(), NUTP, external_url=PAGE).body)
    assert fired["type"] == "nutp.incident.fired"
    assert fired["timestamp"] == "2023-11-14T22:13:30.000Z"
    assert fired["data"]["job_id"] == "j"
    assert fired["data"]["incident"]["summary"].startswith("Rank 1 needs 3.1 times")
    assert fired["data"]["incident"]["runbook"] == "alerts/runbooks/NutpRankSlow.md"
    resolved = json.loads(
        incident_event("j", filled.incident(IncidentState.RESOLVED), NUTP, external_url=PAGE).body
    )
    assert (resolved["type"], resolved["timestamp"]) == (
        "nutp.incident.resolved",
        "2023-11-14T22:13:40.000Z",
    )


def test_event_ids_are_stable_and_distinct() -> None:
    """The same happening has one id in every process; another job, incident or state another."""
    fired = filled.incident()
    again = filled.incident()
    again.finding = filled.incident(severity=Severity.CRITICAL).finding
    ids = [
        incident_event("j", fired, NUTP, external_url=PAGE).id,
        incident_event("k", fired, NUTP, external_url=PAGE).id,
        incident_event("j", filled.incident(number=2), NUTP, external_url=PAGE).id,
        incident_event("j", filled.incident(IncidentState.RESOLVED), NUTP, external_url=PAGE).id,
        change_event("j", filled.change(), NUTP, unix_offset_ns=filled.UNIX_OFFSET_NS).id,
    ]
    assert len(set(ids)) == len(ids)
    assert incident_event("j", again, NUTP, external_url=PAGE).id == ids[0]
    assert ids[0] == "inc-1-fired-" + ids[0].rsplit("-", 1)[1]
    assert not [i for i in ids if "." in i], "a dot would be ambiguous in what is signed"


def test_change_event_has_the_change_without_its_spans() -> None:
    """A change that ended is told with its plans and bytes; a running one is not."""
    running = filled.change(status=None)
    assert change_event("j", running, NUTP, unix_offset_ns=0) is None
    ended = filled.change(status=ChangeStatus.ROLLED_BACK)
    assert change_event("j", ended, ALERTMANAGER, unix_offset_ns=0) is None
    event = change_event("j", ended, NUTP, unix_offset_ns=filled.UNIX_OFFSET_NS)
    body = json.loads(event.body)
    assert body["type"] == "nutp.allocation.changed"
    assert body["data"]["change"]["status"] == "rolled_back"
    assert body["data"]["change"]["bytes_moved"] == 1000
    assert "spans" not in body["data"]["change"]


def test_alertmanager_format_has_the_fields_of_version_4() -> None:
    """The body has every field that a receiver of Alertmanager's webhooks reads."""
    for state, status in ((IncidentState.FIRING, "firing"), (IncidentState.RESOLVED, "resolved")):
        body = json.loads(
            incident_event("j", filled.incident(state), ALERTMANAGER, external_url=PAGE).body
        )
        assert (body["version"], body["status"], body["truncatedAlerts"]) == ("4", status, 0)
        alert = body["alerts"][0]
        assert body["externalURL"] == alert["generatorURL"] == PAGE
        assert alert["status"] == status
        assert alert["labels"]["alertname"] == "NutpRankSlow"
        assert alert["labels"]["rank"] == "1"
        assert alert["startsAt"] == "2023-11-14T22:13:30.000Z"
        expected = "2023-11-14T22:13:40.000Z" if status == "resolved" else "0001-01-01T00:00:00Z"
        assert alert["endsAt"] == expected
        assert {"groupKey", "receiver", "groupLabels", "commonLabels", "commonAnnotations",
                "externalURL"} <= body.keys()  # fmt: skip


def test_large_signals_do_not_break_the_size_limit() -> None:
    """A body stays below the limit; the summary is kept."""
    incident = filled.incident()
    incident.finding.signals.update({f"signal {n}": "x" * 200 for n in range(200)})
    event = incident_event("j", incident, NUTP, external_url=PAGE)
    assert len(event.body) <= MAX_BODY_BYTES
    assert json.loads(event.body)["data"]["incident"]["summary"]
