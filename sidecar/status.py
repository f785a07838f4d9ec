"""`ntp-sidecar status`: what a running sidecar says, in a few lines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from sidecar.daemon import read_address
from sidecar.wire.process import is_running
from sidecar.wire.rundir import known_bases, list_run_dirs

DEFAULT_URL = "http://127.0.0.1:9440"
TIMEOUT_S = 5.0
PARTS = ("job", "ranks", "incidents")


class NoAnswer(Exception):
    """The sidecar could not be asked. The message is one line with what to do."""


def find_url(bases: Sequence[Path] | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Address of the sidecar to ask: inside a watched job its own; else that of this user's newest
    watched job on this node, below any base; else the default."""
    own = read_address(Path(env["NTP_SIDECAR_RUN_DIR"])) if "NTP_SIDECAR_RUN_DIR" in env else None
    if own is not None:
        return own[1]
    alive = []
    for base in known_bases() if bases is None else bases:
        for run_dir in list_run_dirs(base):
            address = read_address(run_dir)
            if address is not None and is_running(address[0], 0):
                with contextlib.suppress(OSError):  # removed just now
                    alive.append((run_dir.stat().st_mtime, address[1]))
    return max(alive)[1] if alive else DEFAULT_URL


def fetch_status(url: str, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Job, ranks and incidents as the API gives them. Raises NoAnswer."""
    token = env.get("NTP_SIDECAR_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    status: dict[str, Any] = {"url": url}
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=headers, trust_env=False) as client:
            for part in PARTS:
                answer = client.get(f"{url.rstrip('/')}/api/v1/{part}")
                answer.raise_for_status()
                body = answer.json()
                status[part] = body if part == "job" else body[part]
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        hint = "set NTP_SIDECAR_TOKEN" if code == 401 else "is it a sidecar's address?"
        raise NoAnswer(f"{url} answered {code}; {hint}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise NoAnswer(
            f"no sidecar answers at {url} ({type(error).__name__}); start one with "
            "`ntp-sidecar run -- CMD`, or give its address with --url"
        ) from error
    return status


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """The status for people."""
    job = status["job"]
    step_time = job["step_time_s"]
    lines = [
        f"job {job['job_id']}: {status_words(job)}, step {_or_unknown(job['step'])}, "
        f"loss {'not finite' if job['loss_is_finite'] is False else _or_unknown(job['loss'])}, "
        f"step time {'unknown' if step_time is None else f'{step_time:.3g} s'}",
        f"ranks: {job['ranks_alive']} alive, {job['ranks_dead']} dead{_left(job)}; "
        f"plan epoch {_or_unknown(job['plan_epoch'])}",
    ]
    if job["proposals_refused"]:
        why = job["refusal"] or "no reason is left"
        lines.append(f"proposals refused by the job: {job['proposals_refused']}, newest: {why}")
    lines += [
        f"rank {r['rank']}: {r['health']}, step {_or_unknown(r['step'])}, "
        f"slowness {_or_unknown(r['slowness'])}"
        for r in status["ranks"]
        if r["health"] != "ok"
    ]
    firing = [i for i in status["incidents"] if i["state"] == "firing"]
    lines += [f"{i['severity']}: {i['summary']} ({i['id']}, {i['runbook']})" for i in firing]
    return [*lines, f"page: {status['url']}"]


def _left(job: Mapping[str, Any]) -> str:
    """Ranks that the job goes on without."""
    return f", {job['ranks_left']} left" if job["ranks_left"] else ""


def status_words(job: Mapping[str, Any]) -> str:
    """The job's status for people: of an ended job with its exit status, where that is known."""
    word, code = str(job["status"]), job["exit_status"]
    return f"{word}, exit status {code}" if word == "ended" and code is not None else word


def _or_unknown(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
