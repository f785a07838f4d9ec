"""Asks the demo's sidecar over its HTTP API, as anybody else would."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import httpx

POLL_S = 0.2

Data = dict[str, Any]


class StoryBroken(Exception):
    """What should have happened did not; the message says what and what was seen instead."""


class CannotStart(Exception):
    """The demo cannot begin with what it was given; the message is one line."""


class Api:
    """A client of one sidecar."""

    def __init__(self, url: str, alive: Callable[[], str]) -> None:
        """`alive` returns "" while the job and the sidecar run, else what is wrong."""
        token = os.environ.get("NTP_SIDECAR_TOKEN", "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=url, timeout=10.0, trust_env=False, headers=headers)
        self._alive = alive

    def get(self, path: str) -> Data:
        """One answer. Raises StoryBroken when there is none."""
        try:
            reply = self._client.get(path)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise StoryBroken(f"{path}: {self._why() or f'no answer: {error}'}") from error
        body: Data = reply.json()
        return body

    def job(self) -> Data:
        """The job as it is now."""
        return self.get("/api/v1/job")

    def incidents(self) -> list[Data]:
        """All incidents, newest first."""
        found: list[Data] = self.get("/api/v1/incidents")["incidents"]
        return found

    def changes(self) -> list[Data]:
        """All allocation changes, newest first."""
        found: list[Data] = self.get("/api/v1/changes")["changes"]
        return found

    def wait(
        self,
        what: str,
        seconds: float,
        look: Callable[[], Data | None],
        meanwhile: Callable[[Data], None] | None = None,
    ) -> Data:
        """The first result of `look` that is not None.

        Args:
            what: what is awaited, for the message when it does not come.
            meanwhile: called with the job at each look, to show progress.

        Raises:
            StoryBroken: after `seconds`, or when the job or the sidecar has ended.
        """
        end = time.monotonic() + seconds
        while True:
            found = look()
            if found is not None:
                return found
            if meanwhile is not None:
                meanwhile(self.job())
            wrong = self._alive()
            if wrong:
                raise StoryBroken(f"{what}: {wrong}")
            if time.monotonic() > end:
                job = self.job()
                raise StoryBroken(
                    f"{what}: not within {seconds:.0f} s (the job is at step {job['step']}, "
                    f"{job['status']})"
                )
            time.sleep(POLL_S)

    def _why(self) -> str:
        """What has ended, after an answer did not come: a process closes its port before it is
        seen to be gone."""
        end = time.monotonic() + POLL_S * 10
        while not (wrong := self._alive()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return wrong

    def close(self) -> None:
        """Close connections."""
        self._client.close()
