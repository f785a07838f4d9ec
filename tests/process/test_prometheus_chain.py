"""Page -> Prometheus -> rules -> Alertmanager -> webhook, for a page with every metric there is.

The page stands in for a sidecar, so that each series of the catalog has a value, and an alert can
be raised at will. A real job goes through the same chain in test_job_to_receiver.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.process.catalog_page import CatalogPage
from tests.repo.promql import recorded
from tests.support.chain import (
    WEBHOOK_TOKEN,
    Chain,
    dashboard_queries,
    is_of_trouble,
    start_chain,
)

TOKEN = "scrape-token-of-this-test"
JOB = "run-1"


@pytest.fixture(scope="module")
def page() -> Iterator[CatalogPage]:
    """Where Prometheus scrapes."""
    source = CatalogPage(TOKEN)
    yield source
    source.close()


@pytest.fixture(scope="module")
def chain(page: CatalogPage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """All servers behind the page."""
    with start_chain(tmp_path_factory.mktemp("chain"), page.address, TOKEN) as started:
        yield started


@pytest.mark.parametrize("expr", dashboard_queries(JOB))
def test_dashboard_query_runs_and_shows_something(chain: Chain, expr: str) -> None:
    """Prometheus accepts each query of the dashboard, and a healthy job has a value for it."""
    end_s = time.time()
    chain.query(expr, start=f"{end_s - 30}", end=f"{end_s}", step="1")
    if not is_of_trouble(expr):
        chain.wait_for_value(expr)


def test_recorded_series_and_rules_are_healthy(chain: Chain) -> None:
    """Each recording rule yields series, and no rule fails to evaluate."""
    for name in recorded():
        chain.wait_for_value(name)
    assert chain.failing_rules() == set()


def test_healthy_job_raises_no_alert(chain: Chain) -> None:
    """With all series there and nothing wrong, every alert keeps quiet."""
    chain.wait_for_value("nutp_rank_up == 1")
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


def test_slow_rank_reaches_the_receiver_and_clears(chain: Chain, page: CatalogPage) -> None:
    """A rank turns slow, a ticket names it and its runbook; it recovers, the ticket closes."""
    page.slow_rank = 1
    line = chain.log.wait_for("NutpRankSlow", "firing")
    assert line["receiver"] == "tickets"
    assert line["labels"] == {
        "severity": "warning",
        "job": "ntp-sidecar",
        "instance": chain.address,
        "nutp_job": JOB,
        "rank": "1",
    }
    assert "needs 3.10 times as long" in line["description"]
    assert chain.open_runbook(line).startswith("# NutpRankSlow")
    page.slow_rank = None
    chain.log.wait_for("NutpRankSlow", "resolved", rank="1")
    assert {x["alert"] for x in chain.log.lines} <= {"NutpRankSlow", "New"}


def test_sidecar_that_vanishes_pages(chain: Chain, page: CatalogPage) -> None:
    """The sidecar answers no more: a critical alert says so, with a runbook that opens."""
    page.close()
    line = chain.log.wait_for("NutpSidecarDown", "firing", cause="scrape_failed")
    assert line["receiver"] == "pager"
    assert line["labels"]["instance"] == chain.address
    assert chain.open_runbook(line).startswith("# NutpSidecarDown")
