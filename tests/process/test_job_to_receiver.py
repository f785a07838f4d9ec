"""The whole way, all of it real: a rank is slowed, and a person is told which.

An uneven job trains under its sidecar; Prometheus scrapes the sidecar, the committed rules fire,
Alertmanager routes, the committed receiver prints. The sidecar's own signed webhook goes to a
second receiver. It only advises, so that the rank stays slow until it is let go.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sidecar.demo.client import Api
from sidecar.demo.duty import DutyCycle
from sidecar.demo.scenario import Scenario
from sidecar.demo.stage import Stage, build_stage
from sidecar.notify.receiver import Received
from sidecar.proposals import Autopilot
from tests.repo.promql import recorded
from tests.support.chain import Chain, dashboard_queries, is_of_trouble, start_chain
from tests.support.servers import require_binary
from tests.support.starved import skip_when_starved

TOKEN = "scrape-token-of-this-test"
WAIT_S = 120.0
"""Longest wait for one thing, on a machine that does much else; a few seconds on an idle one."""
NAMED_S = 45.0
"""Longest wait for a slowed rank to be named, before it is slowed harder."""
MINUTE_S = 5.0
"""What a minute of the rules lasts: too long for a neighbour's noise to look like a slow rank."""
SLOW_RANK = 1
FACTORS = (8.0, 30.0, 100.0)
"""Where neighbours take most of the processors the others are slow too; then it takes more."""
SCENARIO = Scenario(batch=5, seq=32, max_steps=1_000_000)

pytestmark = pytest.mark.timeout(8 * WAIT_S)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A job under watch, and the chain behind its sidecar."""

    stage: Stage
    api: Api
    chain: Chain

    @property
    def job(self) -> str:
        """Its name, as all series carry it."""
        return self.stage.run_dir.name

    def wait_for_ranks(self) -> dict[int, int]:
        """Rank -> process, once the job trains."""
        trains = f'nutp_job_step{{nutp_job="{self.job}"}} > 5'
        self.chain.wait_for_value(trains, WAIT_S)
        return {r["rank"]: r["pid"] for r in self.api.get("/api/v1/ranks")["ranks"]}

    @contextmanager
    def slowed(self, pid: int) -> Iterator[dict[str, Any]]:
        """Slow a process until an alert says that a rank is slow, and for the block."""
        for factor in FACTORS:
            with DutyCycle(pid, factor):
                line = self.chain.log.look_for("NutpRankSlow", "firing", NAMED_S)
                if line is not None:
                    yield line
                    return
        raise AssertionError(f"no rank is called slow when made {FACTORS} times slower")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Job, sidecar and the servers behind it; at the end the job and its sidecar still run."""
    home = tmp_path_factory.mktemp("job")
    for name in ("prometheus", "prometheus-alertmanager"):
        require_binary(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NTP_SIDECAR_TOKEN", TOKEN)
        # A rank that stands still most of the time is slow here, not stuck.
        patch.setenv("NTP_SIDECAR_NO_PROGRESS_CONFIRM", "300")
        with build_stage(SCENARIO, 0, Autopilot.ADVISE) as stage:
            api = Api(stage.url, stage.wrong)
            address = stage.url.removeprefix("http://")
            # Without exemplars, to show that nothing here needs them.
            with start_chain(home, address, TOKEN, minute_s=MINUTE_S, flags=()) as chain:
                yield Watched(stage=stage, api=api, chain=chain)
            api.close()
            assert stage.wrong() == ""


def test_slowed_rank_is_named_to_both_receivers_and_no_other(watched: Watched) -> None:
    """Firing while one rank is slowed, resolved after it; those who waited for it are not named."""
    chain, told, pids = watched.chain, watched.stage.receiver, watched.wait_for_ranks()
    with skip_when_starved(pids):
        with watched.slowed(pids[SLOW_RANK]) as line:
            assert line["receiver"] == "tickets"
            assert line["labels"] == {
                "severity": "warning",
                "job": "ntp-sidecar",
                "instance": chain.address,
                "nutp_job": watched.job,
                "rank": str(SLOW_RANK),
            }
            assert chain.open_runbook(line).startswith("# NutpRankSlow")
            told.wait_for(lambda kept: "nutp.incident.fired" in kinds(kept), WAIT_S)
        chain.log.wait_for("NutpRankSlow", "resolved", within_s=WAIT_S, rank=str(SLOW_RANK))
        kept = told.wait_for(lambda kept: "nutp.incident.resolved" in kinds(kept), WAIT_S)
        named = {(x["alert"], x["labels"].get("rank")) for x in chain.log.lines}
        assert named == {("NutpRankSlow", str(SLOW_RANK))}
        assert {(i["check"], i["rank"]) for i in incidents(kept)} == {("slow_rank", SLOW_RANK)}
    assert not any(r.error for r in kept)
    assert watched.api.changes() == []


def test_healthy_job_has_every_series_and_no_alert(watched: Watched) -> None:
    """Dashboards have values, rules evaluate, nobody is woken; nothing needs exemplars."""
    chain = watched.chain
    pids = watched.wait_for_ranks()
    now_s = time.time()
    for expr in dashboard_queries(watched.job, MINUTE_S):
        chain.query(expr, start=f"{now_s - 30}", end=f"{now_s}", step="1")
        # No change of the plan has happened, so that none has a duration.
        if not is_of_trouble(expr) and "nutp_allocation_change_seconds" not in expr:
            chain.wait_for_value(expr, WAIT_S)
    for name in recorded():
        chain.wait_for_value(name, WAIT_S)
    assert chain.failing_rules() == set()
    span = {"start": f"{now_s - 30}", "end": f"{now_s}"}
    assert chain.ask("query_exemplars", query="nutp_step_seconds_bucket", **span)["data"] == []
    with skip_when_starved(pids):
        chain.wait_for_none('ALERTS{alertstate="firing"}', WAIT_S)


def test_page_of_a_real_job_passes_promtool(watched: Watched) -> None:
    """`promtool check metrics` finds no fault in what Prometheus scrapes."""
    watched.wait_for_ranks()
    page = httpx.get(
        f"{watched.stage.url}/metrics",
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
    ).raise_for_status()
    assert "nutp_rank_busy_seconds_total{" in page.text
    promtool = [require_binary("promtool"), "check", "metrics"]
    lint = subprocess.run(promtool, input=page.content, capture_output=True, timeout=60)
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, b"", b"")


def kinds(kept: list[Received]) -> list[str]:
    """What the sidecar's own webhooks say has happened."""
    return [json.loads(r.body)["type"] for r in kept]


def incidents(kept: list[Received]) -> list[dict[str, Any]]:
    """The incidents they are about."""
    return [json.loads(r.body)["data"]["incident"] for r in kept]
