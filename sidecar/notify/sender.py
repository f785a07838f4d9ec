"""Sender: a thread that delivers what is due in an outbox to one endpoint.

Only a 2xx answer is success. Everything else is tried again by the schedule of
`sidecar.notify.retry`; after the last attempt the message is dead until it is replayed. 410 says
that the endpoint is gone: nothing more is sent to it until `enable`. Redirects are not followed: a
signed message goes where its owner said, nowhere else. The caller of `send` never waits for the
network, but for the disk: a tick hands its messages to `sidecar.notify.intake` instead.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from sidecar import __version__
from sidecar.notify.endpoint import check_url, is_loopback, redacted
from sidecar.notify.outbox import Message, MessageState, Outbox
from sidecar.notify.retry import SCHEDULE_S, delay_s, retry_after_s
from sidecar.notify.signer import Signer

log = logging.getLogger(__name__)

TIMEOUT_S = 15.0
"""For each of connect, write and read (Standard Webhooks recommends 15 to 30 s)."""

_POLL_S = 5.0  # another process may have added a message to the file
_COUNT_WAIT_S = 0.02  # whoever counts holds up the tick
_GONE = 410


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderCounts:
    """Attempts by outcome since the start of this sender, and messages that wait."""

    delivered: int
    retried: int
    dead: int
    queued: int
    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Outcome of one attempt: a status, or 0 and why there is none."""

    status: int
    error: str
    retry_after_s: float | None = None


class Sender:
    """Delivers one outbox to one URL.

    Args:
        outbox: where messages wait. The sender does not close it.
        url: the endpoint, http or https.
        signer: signs each attempt anew; None sends without signature.
        rng: jitter; pass a seeded one where a run must repeat.
        clock: unix time, the same as the outbox's.
        timeout_s: for each of connect, write and read.
        schedule_s: waits before each attempt.
    """

    def __init__(
        self,
        outbox: Outbox,
        url: str,
        signer: Signer | None,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.time,
        timeout_s: float = TIMEOUT_S,
        schedule_s: tuple[float, ...] = SCHEDULE_S,
    ) -> None:
        self._outbox = outbox
        self._url = check_url(url)
        self._signer = signer
        self._rng = rng
        self._clock = clock
        self._schedule_s = schedule_s
        self._client = httpx.Client(
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=not is_loopback(url),
            headers={"user-agent": f"ntp-sidecar/{__version__}"},
        )
        self._changed = threading.Condition()
        self._woken = self._stopping = False
        self._enabled = True
        self._failing = self._blocked = False
        self._counts = {"delivered": 0, "retried": 0, "dead": 0}
        self._queued = 0
        self._unrecorded: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="webhook-sender", daemon=True)

    def start(self) -> None:
        """Start delivering, with what an earlier process left in the outbox."""
        self._thread.start()

    def send(self, message_id: str, body: bytes) -> bool:
        """Keep a message and deliver it as soon as can be. False when the id is known already."""
        added = self._outbox.enqueue(message_id, body)
        self.wake()
        return added

    def replay(self, message_id: str | None = None) -> int:
        """Try dead messages (or one of them) again from the start. Returns how many."""
        count = self._outbox.replay(message_id)
        self.wake()
        return count

    def enable(self) -> None:
        """Send again to an endpoint that had answered 410."""
        self._enabled = True
        self.wake()

    def wake(self) -> None:
        """Look for due messages now."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def counts(self) -> SenderCounts:
        """Counts so far. When the outbox is closed, or busy, `queued` is what it held last."""
        with contextlib.suppress(sqlite3.Error, TimeoutError):
            self._queued = self._outbox.count(MessageState.PENDING, wait_s=_COUNT_WAIT_S)
        return SenderCounts(**self._counts, queued=self._queued, enabled=self._enabled)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Stop within `timeout_s`. False when an attempt was still under way.

        The message of that attempt stays in the outbox and is sent again by the next sender.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._client.close()
        self.counts()
        return True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._record_now()
                message = self._outbox.due() if self._enabled else None
                if message is None:
                    self._wait()
                else:
                    self._deliver(message)
            except sqlite3.Error as error:  # disk full, file locked, or closed while we stop
                if not self._stopping:
                    if not self._blocked:  # once for an outage
                        log.warning("webhook outbox: %s; trying again", error)
                    self._blocked = True
                    self._pause(_POLL_S)
            else:
                self._blocked = False

    def _record(self, note: Callable[[], None]) -> None:
        """Note an attempt's outcome. Until that has succeeded nothing more is sent: a message that
        was delivered would be sent again and again for as long as the disk is full."""
        self._unrecorded = note
        self._record_now()

    def _record_now(self) -> None:
        if self._unrecorded is not None:
            self._unrecorded()
            self._unrecorded = None

    def _wait(self) -> None:
        due_s = self._outbox.next_due_s() if self._enabled else None
        self._pause(_POLL_S if due_s is None else min(_POLL_S, max(0.0, due_s - self._clock())))

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._woken and not self._stopping:
                self._changed.wait(seconds)
            self._woken = False

    def _deliver(self, message: Message) -> None:
        answer = self._attempt(message)
        if 200 <= answer.status < 300:
            self._counts["delivered"] += 1
            self._failing = False
            self._record(lambda: self._outbox.mark_delivered(message.id))
            return
        self._failed(message, answer)

    def _failed(self, message: Message, answer: _Answer) -> None:
        if answer.status == _GONE:
            self._enabled = False
            self._bury(message, "410 Gone: the endpoint was removed")
            return
        wait_s = delay_s(
            message.attempts + 1,
            self._rng,
            retry_after_s=answer.retry_after_s,
            schedule_s=self._schedule_s,
        )
        if wait_s is None:
            self._bury(message, answer.error)
            return
        self._counts["retried"] += 1
        if not self._failing:  # once, not for every message of an outage
            log.warning("webhook to %s failed: %s; will retry", redacted(self._url), answer.error)
        self._failing = True
        due_s = self._clock() + wait_s
        self._record(lambda: self._outbox.mark_retry(message.id, due_s, answer.error))

    def _bury(self, message: Message, error: str) -> None:
        self._counts["dead"] += 1
        log.error("webhook %s to %s is given up: %s", message.id, redacted(self._url), error)
        self._record(lambda: self._outbox.mark_dead(message.id, error))

    def _attempt(self, message: Message) -> _Answer:
        headers = {"content-type": "application/json"}
        if self._signer is not None:
            headers |= self._signer.headers(message.id, message.body, self._clock())
        else:
            headers["webhook-id"] = message.id
        try:
            # Streamed, so that a long answer is not read: only its head counts.
            with self._client.stream(
                "POST", self._url, content=message.body, headers=headers
            ) as response:
                status = response.status_code
                after = retry_after_s(response.headers.get("retry-after"), self._clock())
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return _Answer(status=0, error=f"{type(error).__name__}: {error}")
        return _Answer(status=status, error=f"answered {status}", retry_after_s=after)
