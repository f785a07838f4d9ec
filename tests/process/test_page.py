"""The live page in a real browser: it shows, follows, tells when it is stale, and fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from sidecar.checks.finding import Finding, Severity
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import JobState, RankState
from sidecar.view import snapshot_view
from sidecar.web.server import WebServer
from tests.support.sample_state import (
    NOW_NS,
    UNIX_OFFSET_NS,
    sample_checks,
    sample_incidents,
    sample_job,
    sample_snapshot,
)
from tests.support.servers import require_binary
from tests.support.web_source import FixedSource, serving

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests here."""
    path = require_binary("chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield running
        running.close()


@pytest.fixture
def source() -> FixedSource:
    """The sample state."""
    return FixedSource()


@pytest.fixture
def server(source: FixedSource) -> Iterator[WebServer]:
    """A server without token."""
    with serving(source) as running:
        yield running


class Visit:
    """One page, with everything that went wrong or outside on it."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        self.requests: list[Request] = []
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.goto(url)
        expect(self.page.locator("body")).to_have_attribute("data-connection", "live")

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def has_side_scroll(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(
            self.page.evaluate(
                "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            )
        )

    def close(self) -> None:
        """Leave, and fail if the browser complained."""
        self.context.close()
        assert self.problems == []


@pytest.fixture
def visit(browser: Browser, server: WebServer) -> Iterator[Visit]:
    """The page of the sample at the usual width."""
    visited = Visit(browser, server.url, viewport={"width": 1280, "height": 900})
    yield visited
    visited.close()


def shown(snapshot_of: JobState, incidents: list[Incident]) -> dict[str, Any]:
    """A state as the API shows it."""
    return snapshot_view(
        snapshot_of, incidents, sample_checks(), now_ns=NOW_NS, unix_offset_ns=UNIX_OFFSET_NS
    )


def divergence(summary: str) -> Incident:
    """A new critical incident."""
    return Incident(
        id="inc-3",
        finding=Finding(
            check="replica_divergence",
            subject="replica 1",
            severity=Severity.CRITICAL,
            summary=summary,
            signals={"fingerprint": "differs in 1 unit"},
            replica=1,
            tensor="layers.0.mlp.up",
            unit=7,
        ),
        state=IncidentState.FIRING,
        opened_unix_ns=NOW_NS + UNIX_OFFSET_NS,
        opened_step=41,
        last_seen_unix_ns=NOW_NS + UNIX_OFFSET_NS,
        fired_unix_ns=NOW_NS + UNIX_OFFSET_NS,
    )


def test_page_shows_ranks_incident_change_and_checks(visit: Visit) -> None:
    """All that the sample holds is on the page, in words."""
    page = visit.page
    expect(page.locator("#job-id")).to_have_text("demo-1")
    expect(page.locator("#status")).to_have_text("▲ degraded")
    expect(page.locator(".tile")).to_have_count(5)
    slow = page.locator(".tile").nth(1)
    expect(slow).to_contain_text("Rank 1▲ slow")
    expect(slow).to_contain_text("3.10\u00d7")
    expect(slow).to_contain_text("1 / 2 / 0")
    incident = page.locator("#incidents-open .incident")
    expect(incident).to_have_count(1)
    expect(incident).to_contain_text("Rank 1 needs 3.1x the time of its peers")
    expect(incident).to_contain_text("last in 19 of 20 steps")
    runbook = incident.get_by_role("link", name="Runbook NutpRankSlow")
    expect(runbook).to_have_attribute("href", "/runbooks/NutpRankSlow.md")
    text = page.request.get(str(page.evaluate("location.origin")) + "/runbooks/NutpRankSlow.md")
    assert "## Act" in text.text()
    expect(page.locator("#incidents-past-title")).to_have_text("Resolved (1)")
    expect(page.locator("#changes")).to_contain_text("Epoch 2✓ committedrank slow, after step 23")
    expect(page.locator(".span")).to_have_count(12)
    expect(page.locator("#checks tr")).to_have_count(4)
    expect(page.locator("#checks tr").nth(2)).to_contain_text("? unknown")
    assert page.title() == "1 firing · demo-1"


def test_page_shows_units_as_widths(visit: Visit) -> None:
    """Segments of a bar are as wide as their units: 11 of 24 against 2 of 24."""
    widths = visit.page.eval_on_selector_all(
        ".replica:first-child .cut:nth-child(2) .segment",
        "nodes => nodes.map(n => n.getBoundingClientRect().width)",
    )
    assert len(widths) == 3
    assert widths[0] / widths[1] == pytest.approx(11 / 2, rel=0.1)


def test_page_follows_without_reload(source: FixedSource, visit: Visit) -> None:
    """A new snapshot changes values and adds an incident; the page and its focus stay."""
    page = visit.page
    page.evaluate("window.isSame = true")
    page.locator(".change").focus()
    source.publish(
        shown(sample_job(steps=42), [*sample_incidents(), divergence("Replica 1 differs.")])
    )
    expect(page.locator("#figures .value").first).to_have_text("42")
    expect(page.locator("#status")).to_have_text("✖ critical")
    first = page.locator("#incidents-open .incident").first
    expect(first).to_contain_text("Replica 1 differs.")
    expect(first).to_contain_text("tensor layers.0.mlp.up, unit 7")
    expect(page.locator("#announce-now")).to_have_text("New critical incident: Replica 1 differs.")
    expect(page.locator(".change")).to_be_focused()
    assert page.evaluate("window.isSame") is True


def test_page_shows_text_from_the_job_as_text(source: FixedSource, visit: Visit) -> None:
    """Markup in names and summaries stays text."""
    attack = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
    job = sample_job(steps=42)
    job.job_id = attack
    source.publish(shown(job, [divergence(attack)]))
    expect(visit.page.locator("#job-id")).to_have_text(attack)
    expect(visit.page.locator(".incident-summary").first).to_have_text(attack)
    assert visit.page.locator("img").count() == 0
    assert "broken" not in visit.page.title().split(" · ")[0]


def test_page_timeline_is_reached_and_read_by_keyboard(visit: Visit) -> None:
    """Tab comes to the change and then to its spans; arrows choose a span and show its numbers."""
    page = visit.page
    page.locator("#theme").focus()
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.className || document.activeElement.id")
        )
        if reached[-1] == "span":
            break
    assert "change" in reached
    assert reached[-1] == "span", reached
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    expect(page.locator(".span[aria-selected=true] .span-name")).to_have_text("rank 0")
    expect(page.locator(".span-detail")).to_contain_text("nutp.transfer.rank, rank 0")
    expect(page.locator(".span-detail")).to_contain_text("1.20 MiB")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_page_chart_is_read_by_keyboard_and_pointer(visit: Visit) -> None:
    """The cursor moves with arrows and pointer; its values are also there for readers."""
    page = visit.page
    chart = page.locator("#chart svg")
    chart.focus()
    page.keyboard.press("Home")
    expect(page.locator("#chart-readout")).to_have_text("step 1: 807 ms")
    for _ in range(22):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#chart-readout")).to_contain_text("step 23:")
    expect(chart).to_have_attribute("aria-valuetext", "step 23: 800 ms, epoch 2, rank slow")
    page.keyboard.press("End")
    expect(page.locator("#chart-readout")).to_have_text("step 41: 421 ms")
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 60, box["y"] + 80)
    expect(page.locator("#chart-readout")).to_have_text("step 1: 807 ms")


def test_page_chart_merges_marks_of_one_step(source: FixedSource, visit: Visit) -> None:
    """Two incidents that opened at the same step are one mark with both texts and their number."""
    first, second = divergence("Replica 1 differs."), divergence("Rank 4 is dead.")
    second.id = "inc-4"
    source.publish(shown(sample_job(steps=42), [first, second]))
    marks = visit.page.locator(".mark-incident")
    expect(visit.page.locator(".mark-count")).to_have_text("2")
    expect(marks).to_have_count(1)
    title = marks.locator("title").text_content()
    assert title == "step 41: Rank 4 is dead.\nstep 41: Replica 1 differs." or title == (
        "step 41: Replica 1 differs.\nstep 41: Rank 4 is dead."
    )


def test_page_of_an_ended_job_says_so_in_the_tab(source: FixedSource, visit: Visit) -> None:
    """Ended, with the exit status; nothing is awaited any more."""
    job = sample_job()
    for rank in job.ranks.values():
        rank.alive, rank.exited = False, 3
    source.publish(shown(job, []))
    expect(visit.page).to_have_title("ended, exit status 3 \u00b7 demo-1")
    expect(visit.page.locator("#status")).to_have_text("\u25cb ended, exit status 3")
    expect(visit.page.locator("#incidents-empty")).to_have_text(
        "No open incident. The job has ended."
    )


def test_page_says_which_checks_can_never_apply(source: FixedSource, visit: Visit) -> None:
    """They wait for no data."""
    snapshot = shown(sample_job(), [])
    snapshot["checks"][2]["applies"] = False
    source.publish(snapshot)
    expect(visit.page.locator("#checks tr").nth(2)).to_contain_text("not applicable")
    expect(visit.page.locator("#incidents-empty")).to_contain_text(
        "not applicable: replica_divergence"
    )


def test_page_incident_leads_to_its_change(visit: Visit) -> None:
    """The link of an incident focuses the change it caused."""
    visit.page.get_by_role("button", name="Change to epoch 2").click()
    expect(visit.page.locator(".change")).to_be_focused()


def test_page_asks_nobody_else(visit: Visit, server: WebServer) -> None:
    """Every request goes to the sidecar itself."""
    hosts = {urlsplit(r.url).netloc for r in visit.requests}
    assert hosts == {urlsplit(server.url).netloc}
    assert len(visit.requests) > 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_page_fits_without_side_scroll(
    browser: Browser, server: WebServer, tmp_path: Path, width: int, scheme: Any
) -> None:
    """From a phone to a desk, in both schemes; a screenshot of each is kept."""
    visited = Visit(
        browser, server.url, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    expect(visited.page.locator(".tile")).to_have_count(5)
    assert not visited.has_side_scroll()
    ground = visited.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(244, 245, 246)" if scheme == "light" else "rgb(15, 18, 21)")
    visited.page.screenshot(path=tmp_path / f"page_{scheme}_{width}.png", full_page=True)
    visited.close()


def test_page_theme_button_outlives_a_reload(visit: Visit) -> None:
    """The chosen theme wins over the system's and is kept."""
    page = visit.page
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 21)"


def test_page_empty_states_say_what_is_awaited(source: FixedSource, visit: Visit) -> None:
    """Before the first rank the page tells how to start one; a job without plan says so."""
    page = visit.page
    source.publish(shown(JobState(job_id="j"), []))
    expect(page.locator("#topology-none")).to_contain_text("ntp-sidecar run --")
    expect(page.locator("#incidents-empty")).to_contain_text("Nothing to judge")
    expect(page.locator("#changes-empty")).to_contain_text("No allocation change yet")
    expect(page.locator("#chart-empty")).to_contain_text("No step committed yet")
    expect(page.locator(".tile")).to_have_count(0)
    plain = JobState(job_id="j")
    plain.ranks[0] = RankState(rank=0, pid=1, alive=True)
    source.publish(shown(plain, []))
    expect(page.locator("#topology-unplanned")).to_be_visible()
    expect(page.locator(".tile")).to_have_count(1)
    expect(page.locator(".tile")).to_contain_text("slowness unknown")


def test_page_says_stale_when_the_sidecar_is_gone_and_live_when_back(browser: Browser) -> None:
    """Old values are marked at once; after a restart the page goes on by itself."""
    source = FixedSource()
    with serving(source) as server:
        visited = Visit(browser, server.url)
        port = server.port
    page = visited.page
    expect(page.locator("body")).to_have_attribute("data-connection", "stale")
    expect(page.locator("#stale")).to_contain_text("Stale since ")
    assert page.title().startswith("stale")
    source.publish(sample_snapshot(steps=42))
    with serving(source, port=port):
        expect(page.locator("body")).to_have_attribute("data-connection", "live", timeout=WAIT_MS)
        expect(page.locator("#figures .value").first).to_have_text("42")
        expect(page.locator("#stale")).to_be_hidden()
    refused = [p for p in visited.problems if "ERR_" not in p]
    visited.problems = refused  # the browser itself reports the broken stream
    visited.close()


def test_page_says_stale_when_nothing_new_comes(visit: Visit) -> None:
    """A sidecar that answers but does not tick is stale too."""
    expect(visit.page.locator("#stale")).to_contain_text("sends nothing", timeout=WAIT_MS)
    expect(visit.page.locator("body")).to_have_attribute("data-connection", "stale")


def test_page_with_token_follows_and_keeps_it_in_links(browser: Browser) -> None:
    """Opened with `?token=` everything works; the links carry it on."""
    with serving(FixedSource(), token="a b&c") as server:
        visited = Visit(browser, f"{server.url}/?token=a%20b%26c")
        expect(visited.page.locator(".tile")).to_have_count(5)
        link = visited.page.get_by_role("link", name="Report").get_attribute("href")
        assert link is not None
        assert link.endswith("/api/v1/report?token=a%20b%26c")
        runbook = visited.page.get_by_role("link", name="Runbook").first.get_attribute("href")
        assert runbook == "/runbooks/NutpRankSlow.md?token=a%20b%26c"
        visited.close()


def test_page_with_many_ranks_shows_all_numbers_of_the_slow_one_only(
    source: FixedSource, visit: Visit
) -> None:
    """Beyond 16 ranks healthy tiles are short, until all numbers are asked for."""
    job = sample_job()
    for rank in range(5, 24):
        job.ranks[rank] = RankState(rank=rank, pid=1, alive=True)
    source.publish(shown(job, sample_incidents()))
    page = visit.page
    lines = page.locator(".tile .tile-lines:visible")
    expect(page.locator(".tile")).to_have_count(24)
    expect(lines).to_have_count(1)
    assert not visit.has_side_scroll()
    page.get_by_role("button", name="Numbers of all ranks").click()
    expect(lines).to_have_count(24)
