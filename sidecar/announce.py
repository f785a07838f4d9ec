"""Tells the outside: webhooks of incidents and changes, traces of changes.

The tick hands over and goes on. Threads of the outlets do the sending, so that a receiver that is
slow or gone costs nothing here; what could not be sent stays in the outbox.
"""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sidecar.config import Config, ConfigError
from sidecar.export.otel import ChangeTracer
from sidecar.incidents.tracker import Transition
from sidecar.ingest.state import Change
from sidecar.notify.alertmanager import AlertmanagerClient, AlertmanagerFeed
from sidecar.notify.events import WebhookFormat, change_event, incident_event
from sidecar.notify.outbox import Outbox
from sidecar.notify.sender import Sender, SenderCounts
from sidecar.notify.signer import Signer, load_secret


class Webhooks:
    """The webhook of one job: an outbox and the thread that empties it.

    Attributes:
        sent: messages put into the outbox by this sidecar.

    Raises:
        ConfigError: the state directory cannot be written.
        InvalidInput: the URL or the secret has a wrong form.
    """

    def __init__(self, config: Config, job_id: str, env: Mapping[str, str] = os.environ) -> None:
        self.sent = 0
        self._job_id = job_id
        self._format = WebhookFormat(config.webhook_format)
        state_dir = config.state_path(env)
        _make_dir(state_dir)
        secret = config.webhook_secret or load_secret(state_dir, environ={})
        # One outbox for each endpoint: messages for an old address are not sent to a new one.
        name = hashlib.sha256(config.webhook_url.encode()).hexdigest()[:12]
        try:
            self._outbox = Outbox(state_dir / f"outbox-{name}.sqlite", clock=time.time)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the webhook outbox in '{state_dir}' cannot be opened ({error}); "
                "give a writable --state-dir"
            ) from error
        self._sender = Sender(self._outbox, config.webhook_url, Signer(secret), rng=random.Random())

    def start(self) -> None:
        """Begin to deliver, first what an earlier sidecar left."""
        self._sender.start()

    def incidents(self, transitions: Iterable[Transition]) -> None:
        """Queue a message for each incident that fired or resolved."""
        for t in transitions:
            message = incident_event(self._job_id, t.incident, self._format)
            if message is not None:
                self.sent += self._sender.send(message.id, message.body)

    def changes(self, ended: Iterable[Change], unix_offset_ns: int) -> None:
        """Queue a message for each change that ended."""
        for change in ended:
            message = change_event(
                self._job_id, change, self._format, unix_offset_ns=unix_offset_ns
            )
            if message is not None:
                self.sent += self._sender.send(message.id, message.body)

    def counts(self) -> SenderCounts:
        """Attempts by outcome, and what waits."""
        return self._sender.counts()

    def stop(self) -> None:
        """Stop delivering; the rest stays in the outbox."""
        self._sender.stop()
        self._outbox.close()


def _make_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ConfigError(
            f"state directory '{path}' cannot be written ({error.strerror}); "
            "give a writable one with --state-dir or NTP_SIDECAR_STATE_DIR"
        ) from error


def make_tracer(config: Config, env: Mapping[str, str] = os.environ) -> ChangeTracer:
    """The exporter of traces: to the endpoint that is set, else as the OTEL_* variables say.

    Raises:
        InvalidInput: the variables ask for something that is not built in.
    """
    if config.otlp_endpoint:
        env = {**env, "OTEL_EXPORTER_OTLP_ENDPOINT": config.otlp_endpoint}
    return ChangeTracer.from_environment(env)


def make_alertmanager_feed(config: Config) -> AlertmanagerFeed | None:
    """Keeps an Alertmanager up to date, if one is set.

    Raises:
        InvalidInput: its URL has a wrong form.
    """
    if not config.alertmanager_url:
        return None
    return AlertmanagerFeed(AlertmanagerClient(config.alertmanager_url))
