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
from dataclasses import replace
from pathlib import Path

from sidecar.config import Config, ConfigError
from sidecar.export.otel import ChangeTracer
from sidecar.incidents.tracker import Transition
from sidecar.ingest.state import Change
from sidecar.notify.alertmanager import AlertmanagerClient, AlertmanagerFeed
from sidecar.notify.endpoint import check_url
from sidecar.notify.events import WebhookFormat, change_event, incident_event
from sidecar.notify.intake import Intake
from sidecar.notify.outbox import Outbox
from sidecar.notify.sender import Sender, SenderCounts
from sidecar.notify.signer import Signer, load_secret


class Webhooks:
    """The webhook of one job: an outbox, the thread that fills it and the one that empties it.

    Args:
        page_url: where messages link to.

    Raises:
        ConfigError: the state directory cannot be written.
        InvalidInput: the URL or the secret has a wrong form.
    """

    def __init__(
        self, config: Config, job_id: str, page_url: str, env: Mapping[str, str] = os.environ
    ) -> None:
        self._job_id = job_id
        self._external_url = f"{page_url}/"
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
        self._intake = Intake(self._sender.send)

    def start(self) -> None:
        """Begin to deliver, first what an earlier sidecar left."""
        self._sender.start()
        self._intake.start()

    @property
    def sent(self) -> int:
        """Messages of this sidecar that are in the outbox or wait for it."""
        return self._intake.sent

    @property
    def dropped(self) -> int:
        """Messages that could not be kept."""
        return self._intake.dropped

    def incidents(self, transitions: Iterable[Transition]) -> None:
        """Hand over a message for each incident that fired or resolved. Waits for nothing."""
        for t in transitions:
            message = incident_event(
                self._job_id, t.incident, self._format, external_url=self._external_url
            )
            if message is not None:
                self._intake.hand(message.id, message.body)

    def changes(self, ended: Iterable[Change], unix_offset_ns: int) -> None:
        """Hand over a message for each change that ended. Waits for nothing."""
        for change in ended:
            message = change_event(
                self._job_id, change, self._format, unix_offset_ns=unix_offset_ns
            )
            if message is not None:
                self._intake.hand(message.id, message.body)

    def counts(self) -> SenderCounts:
        """Attempts by outcome, and what waits: in the outbox, and for it."""
        counts = self._sender.counts()
        return replace(counts, queued=counts.queued + self._intake.waiting)

    def stop(self) -> None:
        """Keep what was handed over, then stop delivering; the rest stays in the outbox."""
        self._intake.stop()
        self._sender.stop()
        self._outbox.close()


def check_outlets(config: Config, env: Mapping[str, str] = os.environ) -> None:
    """Refuse settings of outlets as the daemon will, without opening anything.

    Raises:
        ConfigError, InvalidInput: as the daemon's own.
    """
    if config.webhook_url:
        check_url(config.webhook_url)
        config.state_path(env)
    if config.webhook_secret:
        Signer(config.webhook_secret)
    if config.alertmanager_url:
        check_url(config.alertmanager_url, "--alertmanager-url")
    make_tracer(config, env).shutdown()


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
        others = {k: v for k, v in env.items() if k != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
        env = {**others, "OTEL_EXPORTER_OTLP_ENDPOINT": config.otlp_endpoint}
    return ChangeTracer.from_environment(env)


def make_alertmanager_feed(config: Config, page_url: str) -> AlertmanagerFeed | None:
    """Keeps an Alertmanager up to date, if one is set.

    Args:
        page_url: where its alerts link to.

    Raises:
        InvalidInput: its URL has a wrong form.
    """
    if not config.alertmanager_url:
        return None
    client = AlertmanagerClient(config.alertmanager_url)
    return AlertmanagerFeed(client, external_url=f"{page_url}/")
