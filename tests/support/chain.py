"""The chain behind a page of metrics, with real servers and the committed configuration.

Prometheus scrapes, rules fire, Alertmanager routes, the committed receiver prints. Only addresses,
token files and durations are replaced: a minute of production is two seconds here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
import yaml

from tests.repo.promql import ALERTS, ROOT
from tests.support.servers import Server, start_alertmanager, start_prometheus, wait_until

WEBHOOK_TOKEN = "webhook-token-of-this-test"
WAIT_S = 45.0
SECONDS_PER_MINUTE = 2


def quickened(text: str) -> str:
    """A rule file with its durations shortened: 15s -> 1s, 2m -> 4s."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * {"s": SECONDS_PER_MINUTE / 60, "m": SECONDS_PER_MINUTE}[found[3]]
        return f"{found[1]}{max(1, round(seconds))}s"

    return re.sub(r"(\[|offset |interval: |for: )(\d+)([sm])\b", shorter, text)


def quick_prometheus_config(page: str, alertmanager: str, token_file: Path) -> str:
    """The committed scrape config with the addresses of this test."""
    config = yaml.safe_load((ALERTS / "prometheus.yml").read_text())
    config["global"] = {
        "scrape_interval": "500ms",
        "scrape_timeout": "500ms",
        "evaluation_interval": "500ms",
    }
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

        def found() -> dict[str, Any] | None:
            self._drain()
            for line in self.lines:
                is_same = (line["alert"], line["status"]) == (alert, status)
                if is_same and labels.items() <= line["labels"].items():
                    return line
            return None

        result = wait_until(found, f"{alert} {status} at the receiver", within_s)
        assert isinstance(result, dict)
        return result

    def _read(self) -> None:
        assert self.process.stdout
        for text in self.process.stdout:
            self._queue.put(json.loads(text))

    def _drain(self) -> None:
        try:
            while True:
                self.lines.append(self._queue.get_nowait())
        except Empty:
            return


@dataclass(frozen=True, kw_only=True)
class Chain:
    """All parts behind the page, running.

    Attributes:
        address: host and port of the page that is scraped.
        log: what has arrived at the end.
    """

    address: str
    prometheus: Server
    alertmanager: Server
    log: AlertLog
    log_url: str

    def ask(self, path: str, **params: str) -> dict[str, Any]:
        """An answer of Prometheus' API; fails on an error or a warning."""
        url = f"{self.prometheus.url}/api/v1/{path}"
        body = httpx.get(url, params=params, trust_env=False, timeout=30).json()
        assert body["status"] == "success", (path, params, body)
        assert not body.get("warnings"), (path, params, body)
        return body

    def query(self, expr: str, **times: str) -> list[dict[str, Any]]:
        """The result of an expression, now or over a range."""
        path = "query_range" if times else "query"
        return self.ask(path, query=expr, **times)["data"]["result"]

    def wait_for_value(self, expr: str, within_s: float = WAIT_S) -> None:
        """Return when an expression has a value."""
        wait_until(lambda: self.query(expr), f"a value of {expr}", within_s)

    def open_runbook(self, line: dict[str, Any]) -> str:
        """The runbook that an alert links to, as this Prometheus serves it."""
        link = line["runbook"].replace("http://127.0.0.1:9090", self.prometheus.url)
        return httpx.get(link, trust_env=False).raise_for_status().text


@contextmanager
def start_chain(
    home: Path, address: str, token: str, flags: Sequence[str] = ("--enable-feature=exemplar-storage",)
) -> Iterator[Chain]:
    """Receiver, Alertmanager and Prometheus, started in this order so that no alert has to wait.

    Args:
        home: a folder for their files.
        address: host and port of the page to scrape.
        token: the page's bearer token.
        flags: of Prometheus, besides those that the chain needs.
    """
    token_file, webhook_file = home / "token", home / "webhook_token"
    token_file.write_text(token)
    webhook_file.write_text(WEBHOOK_TOKEN)
    (home / "prometheus").mkdir()
    for file in ALERTS.glob("*.rules.yml"):
        (home / "prometheus" / file.name).write_text(quickened(file.read_text()))
    log = _start_alert_log(webhook_file)
    try:
        log_url = f"http://127.0.0.1:{log.start_reading()}"
        with start_alertmanager(home, quick_alertmanager_config(log_url, webhook_file)) as manager:
            config = quick_prometheus_config(address, manager.url, token_file)
            needed = [f"--web.user-assets={ALERTS / 'runbooks'}", "--rules.alert.resend-delay=1s"]
            with start_prometheus(home, config, [*needed, *flags]) as prometheus:
                yield Chain(
                    address=address,
                    prometheus=prometheus,
                    alertmanager=manager,
                    log=log,
                    log_url=log_url,
                )
    finally:
        log.process.kill()
        log.process.communicate()


def _start_alert_log(token_file: Path) -> AlertLog:
    """The receiver as docker-compose.yml starts it, on a free port."""
    command = [sys.executable, str(ALERTS / "alert_log.py"), "--port", "0"]
    command += ["--token-file", str(token_file)]
    return AlertLog(process=subprocess.Popen(command, stdout=subprocess.PIPE, text=True))


def dashboard_queries(nutp_job: str) -> list[str]:
    """Every expression of the dashboard, its variables set for this job."""
    dashboard = json.loads((ROOT / "dashboards" / "job.json").read_text())
    queries = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    queries += [a["expr"] for a in dashboard["annotations"]["list"]]
    values = {"$nutp_job": nutp_job, "$__rate_interval": "4s", "$__range": "1m"}
    values |= {"$job": ".+", "$instance": ".+", "$rank": ".+"}
    for name, value in values.items():
        queries = [q.replace(name, value) for q in queries]
    return queries


def is_of_trouble(expr: str) -> bool:
    """Whether an expression shows only what has happened to a job: a healthy one has no value."""
    return "ALERTS{" in expr or "changes(" in expr
