"""Following the event stream of a sidecar, over breaks, without ever passing old for new."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

PATIENCE_S = 5.0
"""Without a new snapshot for this long the newest one is stale."""

RETRY_S = 1.0


class Unreachable(Exception):
    """No snapshot could be had at the start. One line: what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The newest snapshot, when it came (unix time), and why it is stale; None while it is live."""

    snapshot: dict[str, Any]
    at_unix_s: float
    problem: str | None = None


def follow(
    url: str, token: str | None, *, patience_s: float = PATIENCE_S, retry_s: float = RETRY_S
) -> Iterator[Seen]:
    """Every new snapshot; while there is none, the newest one again with its problem.

    Never ends. Raises Unreachable if the first snapshot cannot be had.
    """
    newest: Seen | None = None
    while True:
        try:
            for snapshot in _snapshots(url, token, patience_s):
                if snapshot is not None:
                    newest = Seen(snapshot=snapshot, at_unix_s=time.time())
                    yield newest
                elif newest is not None and time.time() - newest.at_unix_s > patience_s:
                    yield replace(newest, problem="the sidecar sends nothing new")
            problem = "the sidecar ended the stream"
        except (httpx.HTTPError, httpx.InvalidURL, _Refused) as error:
            problem = _explain(error)
        if newest is None:
            raise Unreachable(f"{problem} at {url}; {_remedy(problem)}")
        yield replace(newest, problem=problem)
        time.sleep(retry_s)


class _Refused(Exception):
    """The sidecar answered with an error; the text is its reason."""


_TOKEN_WANTED = "the sidecar wants its token"


def _snapshots(url: str, token: str | None, patience_s: float) -> Iterator[dict[str, Any] | None]:
    """Snapshots of one connection; None for each sign of life that brings no snapshot."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    address = f"{url.rstrip('/')}/api/v1/stream"
    with (
        httpx.Client(timeout=httpx.Timeout(patience_s, read=2 * patience_s)) as client,
        client.stream("GET", address, headers=headers) as answer,
    ):
        if answer.status_code != 200:
            raise _Refused(_reason(answer))
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])
            elif line.startswith(":"):
                yield None


def _reason(answer: httpx.Response) -> str:
    if answer.status_code == 401:
        return _TOKEN_WANTED
    try:
        reason = json.loads(answer.read())["error"]
    except (ValueError, KeyError, TypeError):
        reason = "this is no sidecar"
    return f"answer {answer.status_code}: {reason}"


def _explain(error: Exception) -> str:
    match error:
        case _Refused():
            return str(error)
        case httpx.ConnectError():
            return "no sidecar answers"
        case httpx.TimeoutException():
            return "the sidecar is silent"
        case httpx.RemoteProtocolError() | httpx.ReadError():
            return "the connection to the sidecar broke"
    return str(error) or type(error).__name__


def _remedy(problem: str) -> str:
    if problem == _TOKEN_WANTED:
        return "give it with --token"
    return "start one with 'ntp-sidecar run -- ...' or give its address with --url"
