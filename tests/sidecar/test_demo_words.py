"""The demo's lines: what is not known yet is said so, and never raises."""

from __future__ import annotations

from typing import Any

from sidecar.demo.command import facts_of
from sidecar.demo.story import step_line
from sidecar.ingest.state import JobState
from sidecar.report import RunFacts, build_report
from sidecar.view import job_view
from tests.support.sample_state import NOW_NS, sample_job


def test_step_line_of_a_job_without_a_loss_says_so() -> None:
    """Nothing is known before the first step, and a loss may turn into no number."""
    unknown = job_view(JobState(job_id="j"), [], now_ns=NOW_NS)
    assert step_line(unknown).startswith("step 0, loss not known -> not known, an unknown time")
    broken: dict[str, Any] = {**job_view(sample_job(), [], now_ns=NOW_NS), "loss": None}
    assert step_line(broken).startswith("step 41, loss 5.32 -> not known, 0.42 s a step")


def test_summary_of_a_report_without_values_shows_dashes() -> None:
    """Every value that the report may leave out can be left out."""
    report = build_report(JobState(job_id="j"), [], RunFacts())
    rows = dict(facts_of(report))
    assert rows["steps"].startswith("0, loss - -> -")
    assert rows["sidecar"] == "- of a core, -"
    assert rows["probe"] == "0 records, - ns each, 0 lost"


def test_summary_of_a_change_uses_the_units_of_the_page() -> None:
    """Binary units, and only what is over the lower bound is counted."""
    report = build_report(sample_job(), [], RunFacts())
    rows = dict(facts_of(report))
    assert rows["rank_slow"] == "2.15 MiB moved, exactly the least possible, verified"
