"""The chain behind a page of metrics, with real servers and the committed configuration.

Prometheus scrapes, rules fire, Alertmanager routes, the committed receiver prints. Only addresses,
token files and durations are replaced: a minute of production is a few seconds here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
import yaml

from tests.repo.promql import ALERTS, ROOT, rules
from tests.support.servers import (
    EXEMPLARS,
    Server,
    start_alertmanager,
    start_prometheus,
    wait_until,
)

WEBHOOK_TOKEN = "webhook-token-of-this-test"
WAIT_S = 45.0
POLL_S = 0.1
"""Between two questions to a server, so that asking does not slow what is asked about."""


def quickened(text: str, minute_s: float) -> str:
    """A rule file with its durations shortened; with a minute of 2 s: 15s -> 1s, 2m -> 4s."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * {"s": minute_s / 60, "m": minute_s}[found[3]]
        return f"{found[1]}{max(1, round(seconds))}s"

    return re.sub(r"(\[|offset |interval: |for: )(\d+)([sm])\b", shorter, text)


def quick_prometheus_config(page: str, alertmanager: str, token_file: Path, minute_s: float) -> str:
    """The committed scrape config with the addresses of this test; 15s become a quarter minute."""
    config = yaml.safe_load((ALERTS / "prometheus.yml").read_text())
    quarter = f"{250 * minute_s:.0f}ms"
    for name in ("scrape_interval", "scrape_timeout", "evaluation_interval"):
        config["global"][name] = quarter
    scrape = config["scrape_configs"][0]
    scrape["static_configs"] = [{"targets": [page]}]
    scrape["authorization"]["credentials_file"] = str(token_file)
    config["scrape_configs"] = [scrape]
    targets = [alertmanager.removeprefix("http://")]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": targets}]}]
    return yaml.safe_dump(config)


def quick_alertmanager_config(receiver: str, token_file: Path) -> str:
    """The committed routes, with this test's receiver and short waiting times."""
    config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text())
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": "100ms", "group_interval": "1s"}
    for item in config["receivers"]:
        for hook in item["webhook_configs"]:
            hook["url"] = hook["url"].replace("http://alert-log:9095", receiver)
            hook["http_config"]["authorization"]["credentials_file"] = str(token_file)
    return yaml.safe_dump(config)


@dataclass(kw_only=True)
class AlertLog:
    """The committed receiver (alerts/alert_log.py) as a process, and the lines it prints."""

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    _queue: SimpleQueue[dict[str, Any]] = field(default_factory=SimpleQueue)

    def start_reading(self) -> int:
        """Read lines in a thread from now on; the first one tells the port."""
        Thread(target=self._read, daemon=True).start()
        return int(self._queue.get(timeout=WAIT_S)["listening"])

    def wait_for(
        self, alert: str, status: str, *, within_s: float = WAIT_S, **labels: str
    ) -> dict[str, Any]:
        """The first line about this alert with this status and these labels."""
        line = self.look_for(alert, status, within_s, **labels)
        assert line is not None, f"{alert} {status} at the receiver: not in {within_s} s"
        return line

    def look_for(
        self, alert: str, status: str, within_s: float, **labels: str
    ) -> dict[str, Any] | None:
        """The same, None when it does not come in time."""
        deadline_s = time.monotonic() + within_s
        while True:
            for line in self.lines:
                is_same = (line["alert"], line["status"]) == (alert, status)
                if is_same and labels.items() <= line["labels"].items():
                    return line
            try:
                self.lines.append(self._queue.get(timeout=max(0, deadline_s - time.monotonic())))
            except Empty:
                return None

    def _read(self) -> None:
        assert self.process.stdout
        for text in self.process.stdout:
            self._queue.put(json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Chain:
    """All parts behind the page, running.

    Attributes:
        address: host and port of the page that is scraped.
        log: what has arrived at the end.
        client: of all questions, because a new one for each costs more than the question.
    """

    address: str
    prometheus: Server
    alertmanager: Server
    log: AlertLog
    log_url: str
    client: httpx.Client

    def ask(self, path: str, **params: str) -> dict[str, Any]:
        """An answer of Prometheus' API; fails on an error or a warning."""
        url = f"{self.prometheus.url}/api/v1/{path}"
        body = self.client.get(url, params=params).json()
        assert body["status"] == "success", (path, params, body)
        assert not body.get("warnings"), (path, params, body)
        return body

    def query(self, expr: str, **times: str) -> list[dict[str, Any]]:
        """The result of an expression, now or over a range."""
        path = "query_range" if times else "query"
        return self.ask(path, query=expr, **times)["data"]["result"]

    def wait_for_value(self, expr: str, within_s: float = WAIT_S) -> None:
        """Return when an expression has a value."""
        wait_until(lambda: self.query(expr), f"a value of {expr}", within_s, POLL_S)

    def wait_for_none(self, expr: str, within_s: float = WAIT_S) -> None:
        """Return when an expression has no value."""
        wait_until(lambda: not self.query(expr), f"no value of {expr}", within_s, POLL_S)

    def failing_rules(self) -> set[str]:
        """Names of the rules that could not be evaluated; not one may be missing."""
        loaded = [r for g in self.ask("rules")["data"]["groups"] for r in g["rules"]]
        assert len(loaded) == len(rules("record")) + len(rules("alert"))
        return {r["name"] for r in loaded if r["health"] != "ok"}

    def open_runbook(self, line: dict[str, Any]) -> str:
        """The runbook that an alert links to, as this Prometheus serves it."""
        link = line["runbook"].replace("http://127.0.0.1:9090", self.prometheus.url)
        return self.client.get(link).raise_for_status().text


@contextmanager
def start_chain(
    home: Path,
    address: str,
    token: str,
    *,
    minute_s: float = 2.0,
    flags: Sequence[str] = (EXEMPLARS,),
) -> Iterator[Chain]:
    """Receiver, Alertmanager and Prometheus, started in this order so that no alert has to wait.

    Args:
        home: a folder for their files.
        address: host and port of the page to scrape.
        token: the page's bearer token.
        minute_s: what a minute of the rules lasts here.
        flags: of Prometheus, besides those that the chain needs; default: as docker-compose.yml.
    """
    token_file, webhook_file = home / "token", home / "webhook_token"
    token_file.write_text(token)
    webhook_file.write_text(WEBHOOK_TOKEN)
    (home / "prometheus").mkdir()
    for file in ALERTS.glob("*.rules.yml"):
        (home / "prometheus" / file.name).write_text(quickened(file.read_text(), minute_s))
    log = _start_alert_log(webhook_file)
    try:
        log_url = f"http://127.0.0.1:{log.start_reading()}"
        with start_alertmanager(home, quick_alertmanager_config(log_url, webhook_file)) as manager:
            config = quick_prometheus_config(address, manager.url, token_file, minute_s)
            needed = [f"--web.user-assets={ALERTS / 'runbooks'}", "--rules.alert.resend-delay=1s"]
            with (
                start_prometheus(home, config, [*needed, *flags]) as prometheus,
                httpx.Client(trust_env=False, timeout=30) as client,
            ):
                yield Chain(
                    address=address,
                    prometheus=prometheus,
                    alertmanager=manager,
                    log=log,
                    log_url=log_url,
                    client=client,
                )
    finally:
        log.process.kill()
        log.process.communicate()


def _start_alert_log(token_file: Path) -> AlertLog:
    """The receiver as docker-compose.yml starts it, on a free port."""
    command = [sys.executable, str(ALERTS / "alert_log.py"), "--port", "0"]
    command += ["--token-file", str(token_file)]
    return AlertLog(process=subprocess.Popen(command, stdout=subprocess.PIPE, text=True))


def dashboard_queries(nutp_job: str, minute_s: float = 2.0) -> list[str]:
    """Every expression of the dashboard, its variables set for this job; rates over 2 minutes."""
    dashboard = json.loads((ROOT / "dashboards" / "job.json").read_text())
    queries = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    queries += [a["expr"] for a in dashboard["annotations"]["list"]]
    values = {"$nutp_job": nutp_job, "$__rate_interval": f"{2 * minute_s:.0f}s", "$__range": "1m"}
    values |= {"$job": ".+", "$instance": ".+", "$rank": ".+"}
    for name, value in values.items():
        queries = [q.replace(name, value) for q in queries]
    return queries


def is_of_trouble(expr: str) -> bool:
    """Whether an expression shows only what has happened to a job: a healthy one has no value."""
    return "ALERTS{" in expr or "changes(" in expr
