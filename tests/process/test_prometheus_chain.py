"""The whole chain with real servers: page -> Prometheus -> rules -> Alertmanager -> webhook.

Prometheus and Alertmanager run with the committed configuration, of which only addresses, token
files and durations are replaced: a minute of production is two seconds here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml

from tests.process.catalog_page import CatalogPage
from tests.repo.promql import ALERTS, ROOT, recorded, rules
from tests.support.servers import Server, start_alertmanager, start_prometheus, wait_until

TOKEN = "scrape-token-of-this-test"
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

    def wait_for(self, alert: str, status: str, **labels: str) -> dict[str, Any]:
        """The first line about this alert with this status and these labels."""

        def found() -> dict[str, Any] | None:
            self._drain()
            for line in self.lines:
                is_same = (line["alert"], line["status"]) == (alert, status)
                if is_same and labels.items() <= line["labels"].items():
                    return line
            return None

        result = wait_until(found, f"{alert} {status} at the receiver", WAIT_S)
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
    """All parts, running."""

    page: CatalogPage
    prometheus: Server
    alertmanager: Server
    log: AlertLog
    log_url: str

    def query(self, expr: str, **times: str) -> list[dict[str, Any]]:
        """The result of an expression, now or over a range; fails on an error or a warning."""
        path = "query_range" if times else "query"
        params = {"query": expr, **times}
        answer = httpx.get(f"{self.prometheus.url}/api/v1/{path}", params=params, trust_env=False)
        body = answer.json()
        assert body["status"] == "success", (expr, body)
        assert not body.get("warnings"), (expr, body)
        return body["data"]["result"]


@pytest.fixture(scope="module")
def page() -> Iterator[CatalogPage]:
    """Where Prometheus scrapes. Replace it to put another source of metrics before the chain."""
    source = CatalogPage(TOKEN)
    yield source
    source.close()


@pytest.fixture(scope="module")
def chain(page: CatalogPage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """Receiver, Alertmanager and Prometheus, started in this order so that no alert has to wait."""
    home = tmp_path_factory.mktemp("chain")
    token_file, webhook_file = home / "token", home / "webhook_token"
    token_file.write_text(TOKEN)
    webhook_file.write_text(WEBHOOK_TOKEN)
    log = start_alert_log(webhook_file)
    log_url = f"http://127.0.0.1:{log.start_reading()}"
    (home / "prometheus").mkdir()
    for file in ALERTS.glob("*.rules.yml"):
        (home / "prometheus" / file.name).write_text(quickened(file.read_text()))
    try:
        with start_alertmanager(home, quick_alertmanager_config(log_url, webhook_file)) as manager:
            config = quick_prometheus_config(page.address, manager.url, token_file)
            flags = [f"--web.user-assets={ALERTS / 'runbooks'}", "--rules.alert.resend-delay=1s"]
            with start_prometheus(home, config, flags) as prometheus:
                yield Chain(
                    page=page,
                    prometheus=prometheus,
                    alertmanager=manager,
                    log=log,
                    log_url=log_url,
                )
    finally:
        log.process.kill()
        log.process.communicate()


def start_alert_log(token_file: Path) -> AlertLog:
    """The receiver as docker-compose.yml starts it, on a free port."""
    command = [sys.executable, str(ALERTS / "alert_log.py"), "--port", "0"]
    command += ["--token-file", str(token_file)]
    return AlertLog(process=subprocess.Popen(command, stdout=subprocess.PIPE, text=True))


def dashboard_queries() -> list[str]:
    """Every expression of the dashboard, its variables set for this job."""
    dashboard = json.loads((ROOT / "dashboards" / "job.json").read_text())
    queries = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    queries += [a["expr"] for a in dashboard["annotations"]["list"]]
    values = {"$nutp_job": "run-1", "$__rate_interval": "4s", "$__range": "1m"}
    values |= {"$job": ".+", "$instance": ".+", "$rank": ".+"}
    for name, value in values.items():
        queries = [q.replace(name, value) for q in queries]
    return queries


@pytest.mark.parametrize("expr", dashboard_queries())
def test_dashboard_query_runs_and_shows_something(chain: Chain, expr: str) -> None:
    """Prometheus accepts each query of the dashboard, and a healthy job has a value for it."""
    end_s = time.time()
    chain.query(expr, start=f"{end_s - 30}", end=f"{end_s}", step="1")
    if "ALERTS{" not in expr and "changes(" not in expr:  # a healthy job has none of these
        wait_until(lambda: chain.query(expr), f"a value of {expr}", WAIT_S)


def test_recorded_series_and_rules_are_healthy(chain: Chain) -> None:
    """Each recording rule yields series, and no rule fails to evaluate."""
    for name in recorded():
        wait_until(lambda n=name: chain.query(n), f"a value of {name}", WAIT_S)
    groups = httpx.get(f"{chain.prometheus.url}/api/v1/rules", trust_env=False).json()["data"]
    health = [(r["name"], r["health"]) for g in groups["groups"] for r in g["rules"]]
    assert {name for name, state in health if state != "ok"} == set()
    assert len(health) == len(rules("record")) + len(rules("alert"))


def test_healthy_job_raises_no_alert(chain: Chain) -> None:
    """With all series there and nothing wrong, every alert keeps quiet."""
    wait_until(lambda: chain.query("nutp_rank_up == 1"), "a first scrape", WAIT_S)
    assert chain.query('ALERTS{alertstate="firing"}') == []


def test_receiver_refuses_a_stranger(chain: Chain) -> None:
    """Without the token there is no way to write into the alert log."""
    body = {"alerts": [{"status": "firing", "labels": {"alertname": "Forged"}}]}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.post(chain.log_url, json=body, headers=headers, trust_env=False)
        assert answer.status_code == 401


def test_receiver_answers_nonsense_once_and_for_all(chain: Chain) -> None:
    """400 tells Alertmanager not to send the same again; unknown fields are no nonsense."""
    headers = {"Authorization": f"Bearer {WEBHOOK_TOKEN}"}
    for content in (b"", b"not json", b"[]", b'{"alerts": [{}]}', b'{"alerts": 3}'):
        answer = httpx.post(chain.log_url, content=content, headers=headers, trust_env=False)
        assert answer.status_code == 400, content
    body = {"alerts": [{"status": "firing", "labels": {"alertname": "New", "x": "1"}, "y": 2}]}
    assert httpx.post(chain.log_url, json=body, headers=headers, trust_env=False).is_success
    assert chain.log.wait_for("New", "firing")["labels"] == {"x": "1"}


def test_slow_rank_reaches_the_receiver_and_clears(chain: Chain) -> None:
    """A rank turns slow, a ticket names it and its runbook; it recovers, the ticket closes."""
    chain.page.slow_rank = 1
    line = chain.log.wait_for("NutpRankSlow", "firing")
    assert line["receiver"] == "tickets"
    assert line["labels"] == {
        "severity": "warning",
        "job": "ntp-sidecar",
        "instance": chain.page.address,
        "nutp_job": "run-1",
        "rank": "1",
    }
    assert "needs 3.10 times as long" in line["description"]
    runbook = line["runbook"].replace("http://127.0.0.1:9090", chain.prometheus.url)
    assert httpx.get(runbook, trust_env=False).text.startswith("# NutpRankSlow")
    chain.page.slow_rank = None
    chain.log.wait_for("NutpRankSlow", "resolved", rank="1")
    assert {x["alert"] for x in chain.log.lines} <= {"NutpRankSlow", "New"}


def test_sidecar_that_vanishes_pages(chain: Chain) -> None:
    """The sidecar answers no more: a critical alert says so, with a runbook that opens."""
    chain.page.close()
    line = chain.log.wait_for("NutpSidecarDown", "firing", cause="scrape_failed")
    assert line["receiver"] == "pager"
    assert line["labels"]["instance"] == chain.page.address
    runbook = line["runbook"].replace("http://127.0.0.1:9090", chain.prometheus.url)
    assert httpx.get(runbook, trust_env=False).status_code == 200
