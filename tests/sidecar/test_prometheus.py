"""Exposition: what is in it, in which form, and that real readers accept it."""

from __future__ import annotations

import subprocess

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ntp_core.observe import ChangeStatus, Reason
from sidecar.catalog import METRICS, MetricType
from sidecar.export.continuity import RestartOffsets
from sidecar.export.families import MAX_LABEL_CHARS, label_value
from sidecar.export.histograms import BucketCounts
from sidecar.export.prometheus import Exporter
from sidecar.export.selfstats import JobView, SidecarStats
from sidecar.incidents.incident import IncidentState
from sidecar.ingest.spans import root_span_id, trace_id_of
from sidecar.ingest.state import JobState, RankState
from tests.support import filled
from tests.support.filled import MS, NOW_NS, S
from tests.support.servers import require_binary, start_prometheus, wait_until

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def exporter_of(*views: JobView, stats: SidecarStats | None = None, **limits: int) -> Exporter:
    exporter = Exporter(version="1.2.3", **limits)
    for view in views:
        exporter.follow(view.job)
    exporter.publish(views, stats or filled.filled_stats(), NOW_NS)
    return exporter


def families(exporter: Exporter) -> dict[str, Family]:
    text = exporter.render(OPENMETRICS)[0].decode()
    return {f.name: f for f in parse_openmetrics(text)}


def samples(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in families(exporter).values()
        for s in f.samples
    }


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    return samples(exporter).get((name, tuple(sorted(labels.items()))))


def test_filled_state_exposes_exactly_the_catalog() -> None:
    """Names, types, units, help and labels are the catalog's, none more and none less."""
    exposed = families(exporter_of(filled.filled_view()))
    assert set(exposed) == {m.name for m in METRICS}
    extra = {MetricType.HISTOGRAM: {"le"}}
    for m in METRICS:
        family = exposed[m.name]
        assert (family.type, family.unit, family.documentation) == (m.type, m.unit, m.help)
        assert family.samples, f"{m.name} has no sample in a filled state"
        for sample in family.samples:
            assert set(sample.labels) - extra.get(m.type, set()) == set(m.labels), sample


def test_histograms_have_the_catalogs_buckets() -> None:
    """The bounds are those of the catalog and +Inf, and the count is the last bucket."""
    exposed = families(exporter_of(filled.filled_view()))
    for m in METRICS:
        if m.type is MetricType.HISTOGRAM:
            rows = [s for s in exposed[m.name].samples if s.name.endswith("_bucket")]
            assert {float(s.labels["le"]) for s in rows} == {*m.buckets, float("inf")}


def test_text_format_passes_promtool_lint() -> None:
    """`promtool check metrics` finds no fault in the text format."""
    promtool = require_binary("promtool")
    body, content_type = exporter_of(filled.filled_view()).render("text/plain")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    result = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_both_formats_hold_the_same_values() -> None:
    """Each format by its own parser gives the same samples."""
    exporter = exporter_of(filled.filled_view())
    text = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in parse_text(exporter.render(None)[0].decode())
        for s in f.samples
    }
    assert text == samples(exporter)
    assert not [name for name, _ in text if name.endswith("_created")]


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        (OPENMETRICS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=0.0.1", False),
        # what Prometheus 2.42 and 3.x send
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
            "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
            "text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
            True,
        ),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nonsense", False),
        (";;;=,q=1,", False),
    ],
)
def test_accept_header_chooses_the_format(accept: str | None, openmetrics: bool) -> None:
    """The reader gets the format it likes best, and the text format when in doubt."""
    body, content_type = exporter_of(filled.filled_view()).render(accept)
    assert content_type.startswith("application/openmetrics-text") is openmetrics
    assert body.endswith(b"# EOF\n") is openmetrics


def test_unknown_values_have_no_series() -> None:
    """A rank of which nothing is known yet is not healthy, not dead and not at zero."""
    bare = JobState(job_id="j", ranks={0: RankState(rank=0, pid=1)})
    known = {n for n, labels in samples(exporter_of(JobView(job=bare))) if ("rank", "0") in labels}
    assert known == {
        "nutp_rank_steps_total",
        "nutp_rank_busy_seconds_total",
        "nutp_rank_wait_seconds_total",
        "nutp_rank_gc_pause_seconds_total",
        "nutp_probe_events_total",
        "nutp_probe_events_lost_total",
    }
    exporter = exporter_of(JobView(job=bare), stats=SidecarStats())
    for name in ("nutp_job_loss", "nutp_plan_epoch", "nutp_job_gradient_norm"):
        assert value(exporter, name, nutp_job="j") is None
    assert value(exporter, "nutp_sidecar_tick_seconds") is None
    assert value(exporter, "nutp_webhook_queue") is None
    assert value(exporter, "nutp_job_ranks", nutp_job="j", state="alive") == 0


def test_dead_rank_goes_down_and_its_age_grows() -> None:
    """A dead rank's series say that it is dead and for how long; they do not freeze."""
    view = filled.filled_view()
    exporter = exporter_of(view)
    labels = {"nutp_job": "demo-1", "rank": "1"}
    assert value(exporter, "nutp_rank_up", **labels) == 1
    assert value(exporter, "nutp_rank_progress_age_seconds", **labels) == 0.5
    view.job.ranks[1].alive = False
    exporter.publish([view], filled.filled_stats(), NOW_NS + 30 * S)
    assert value(exporter, "nutp_rank_up", **labels) == 0
    assert value(exporter, "nutp_rank_progress_age_seconds", **labels) == 30.5
    assert value(exporter, "nutp_job_ranks", nutp_job="demo-1", state="dead") == 1
    assert value(exporter, "nutp_job_ranks", nutp_job="demo-1", state="alive") == 4


def test_counters_go_on_when_a_rank_restarts() -> None:
    """A new process of the same rank adds to what the old one counted, also per operation."""
    view = filled.filled_view()
    exporter = exporter_of(view)
    before = samples(exporter)
    view.job.ranks[1] = filled.rank_state(1, pid=9999, steps=1)
    view.job.ranks[1].start_ns += 30 * S
    view.job.ranks[1].ops.clear()
    exporter.follow(view.job)
    exporter.publish([view], filled.filled_stats(), NOW_NS)
    after = samples(exporter)
    for key, number in before.items():
        if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
            assert after[key] >= number, key
    labels = {"nutp_job": "demo-1", "rank": "1"}
    assert value(exporter, "nutp_rank_steps_total", **labels) == 3
    assert value(exporter, "nutp_collectives_total", op="all_reduce", **labels) == 7


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=5))
def test_restarts_add_up_to_the_sum_over_processes(processes: list[list[int]]) -> None:
    """Whatever each process counted, the total is the sum of what each had counted last."""
    offsets, shown = RestartOffsets(), [0.0]
    for number, increments in enumerate(processes):
        count = 0
        for increment in increments:
            count += increment
            raw = {("steps", ()): float(count)}
            shown.append(offsets.carry(("j", 0), (4000, number), raw)["steps", ()])
    assert shown == sorted(shown)
    assert shown[-1] == sum(map(sum, processes))
    offsets.keep_jobs(["other"])
    assert offsets.carry(("j", 0), (1, 1), {("steps", ()): 3.0}) == {("steps", ()): 3.0}


def test_ranks_over_the_limit_are_counted_as_dropped() -> None:
    """The limit holds over all jobs, and the page says how much is missing."""
    views = [filled.filled_view("a"), filled.filled_view("b")]
    full = exporter_of(*views)
    cut = exporter_of(*views, max_ranks=7)
    shown = {dict(labels)["nutp_job"] + dict(labels)["rank"] for _, labels in samples(cut)
             if "rank" in dict(labels)}  # fmt: skip
    assert shown == {"a0", "a1", "a2", "a3", "a4", "b0", "b1"}
    missing = samples(full).keys() - samples(cut).keys()
    assert value(cut, "nutp_sidecar_series_dropped_total") == len(missing)
    cut.publish(views[1:], filled.filled_stats(), NOW_NS)
    assert value(cut, "nutp_sidecar_series_dropped_total") == len(missing)


def test_step_histogram_counts_each_step_of_a_replica_once() -> None:
    """Three ranks of a replica report the same step: it is one step, and its tokens count once."""
    view = filled.filled_view()
    exporter = exporter_of(view)
    exporter.follow(view.job)
    exporter.publish([view], filled.filled_stats(), NOW_NS)
    assert value(exporter, "nutp_step_seconds_count", nutp_job="demo-1", replica="0") == 2
    assert value(exporter, "nutp_step_seconds_count", nutp_job="demo-1", replica="1") == 2
    assert value(exporter, "nutp_job_tokens_total", nutp_job="demo-1") == 4000


def test_steps_of_a_restarted_job_are_counted_again() -> None:
    """After a restart from a checkpoint steps run a second time, and take time a second time."""
    job = JobState(job_id="j", ranks={r: filled.rank_state(r, steps=5) for r in range(3)})
    exporter = exporter_of(JobView(job=job))
    for rank in range(3):
        again = filled.rank_state(rank, steps=0, pid=5000 + rank)
        again.start_ns += 100 * S
        for number in (4, 5, 6):
            sample = filled.step(number)
            sample.end_ns += 100 * S
            filled.add_step(again, sample)
        job.ranks[rank] = again
    exporter.follow(job)
    exporter.publish([JobView(job=job)], filled.filled_stats(), NOW_NS)
    assert value(exporter, "nutp_step_seconds_count", nutp_job="j", replica="0") == 5 + 3


def test_step_exemplar_points_to_the_change_behind_the_step() -> None:
    """A step under the changed plan carries the change's trace and root span; an older one none."""
    view = filled.filled_view()
    job = view.job
    job.ranks = {0: filled.rank_state(0, steps=0)}
    slow, fast = filled.step(5, epoch=1, ms=300), filled.step(20, epoch=2, ms=30)
    for sample in (slow, fast):
        filled.add_step(job.ranks[0], sample)
    rows = {
        float(s.labels["le"]): s.exemplar
        for s in families(exporter_of(view))["nutp_step_seconds"].samples
        if s.name.endswith("_bucket")
    }
    trace_id = trace_id_of("demo-1", job.changes[0])
    assert rows[0.05].labels == {"trace_id": trace_id, "span_id": root_span_id(trace_id)}
    assert rows[0.05].value == 0.03
    assert float(rows[0.05].timestamp) == filled.UNIX_NS / 1e9 + 20
    assert [bound for bound, exemplar in rows.items() if exemplar] == [0.05]


def test_step_during_a_rolled_back_change_is_tied_to_it_and_later_steps_are_not() -> None:
    """A change that was undone slowed the step in which it ran, and nothing after."""
    job = JobState(job_id="j", changes=[filled.change(status=ChangeStatus.ROLLED_BACK)])
    rank = job.ranks[0] = filled.rank_state(0, steps=0)
    filled.add_step(rank, filled.step(11, epoch=1, ms=900))
    filled.add_step(rank, filled.step(12, epoch=1, ms=30))
    rows = families(exporter_of(JobView(job=job)))["nutp_step_seconds"].samples
    assert [s.labels["le"] for s in rows if s.exemplar] == ["1.0"]


def test_changes_are_counted_once_when_they_end() -> None:
    """A running change is not counted; it counts when it ends, and only once."""
    view = filled.filled_view()
    view.job.changes = [filled.change(status=None)]
    exporter = exporter_of(view)
    labels = {"nutp_job": "demo-1", "reason": "rank_slow"}
    assert value(exporter, "nutp_allocation_change_seconds_count", **labels) is None
    ended = view.job.changes[0]
    ended.end_ns, ended.status = ended.begin_ns + 400 * MS, ChangeStatus.COMMITTED
    for _ in range(3):
        exporter.follow(view.job)
        exporter.publish([view], filled.filled_stats(), NOW_NS)
    assert value(exporter, "nutp_allocation_changes_total", status="committed", **labels) == 1
    assert value(exporter, "nutp_allocation_change_seconds_sum", **labels) == 0.4
    assert value(exporter, "nutp_allocation_moved_bytes_total", nutp_job="demo-1") == 1000
    assert Reason.RANK_SLOW.name.lower() == labels["reason"]


def test_resolved_incident_stays_at_zero_firing() -> None:
    """After an incident clears its gauge is 0, its counter keeps the number that fired."""
    view = filled.filled_view()
    exporter = exporter_of(view)
    labels = {"nutp_job": "demo-1", "check": "slow_rank", "severity": "warning"}
    assert value(exporter, "nutp_incidents_firing", **labels) == 1
    for incidents in ([filled.incident(IncidentState.RESOLVED)], []):
        cleared = JobView(job=view.job, incidents=incidents)
        exporter.publish([cleared], filled.filled_stats(), NOW_NS)
        assert value(exporter, "nutp_incidents_firing", **labels) == 0
        assert value(exporter, "nutp_incidents_total", **labels) == 1


@pytest.mark.parametrize(
    "name", ['quote " and \\ and\nnewline', "\udcff\udc80", "\u00fc\u4e2d", ""]
)
def test_odd_job_names_survive_both_formats(name: str) -> None:
    """Any job name gives a page that both parsers read."""
    exporter = exporter_of(filled.filled_view(name))
    shown = label_value(name)
    assert value(exporter, "nutp_job_step", nutp_job=shown) == 2
    text = exporter.render(None)[0].decode()
    assert {s.labels["nutp_job"] for f in parse_text(text) for s in f.samples if "rank" in s.labels
            } == {shown}  # fmt: skip


def test_long_label_values_are_cut_and_stay_distinct() -> None:
    """Two long names with the same beginning are two values."""
    one, two = label_value("x" * 500 + "1"), label_value("x" * 500 + "2")
    assert len(one) == len(two) == MAX_LABEL_CHARS
    assert one != two


def test_bucket_bounds_are_inclusive() -> None:
    """A value on a bound counts below it, one beyond the last in +Inf only."""
    counts = BucketCounts((0.1, 1.0))
    for number in (0.1, 0.5, 1.0, 7.0):
        counts.observe(number)
    assert counts.rows() == [("0.1", 1), ("1.0", 3), ("+Inf", 4)]
    assert counts.total == pytest.approx(8.6)


def test_real_prometheus_scrapes_values_and_exemplars(tmp_path, metrics_server) -> None:
    """Prometheus scrapes the page, answers a query and gives back the trace id."""
    view = filled.filled_view()
    filled.add_step(view.job.ranks[0], filled.step(20))
    exporter = exporter_of(view)
    target = metrics_server(exporter.render)
    config = (
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: sidecar, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with start_prometheus(tmp_path, config) as server:

        def query(path: str, **parameters: str) -> list[dict]:
            answer = httpx.get(f"{server.url}/api/v1/{path}", params=parameters, trust_env=False)
            return answer.json()["data"]

        query_up = "nutp_rank_up{nutp_job='demo-1',rank='3'}"
        found = wait_until(lambda: query("query", query=query_up)["result"], "rank 3 scraped")
        assert found[0]["value"][1] == "1"
        exemplars = wait_until(
            lambda: query("query_exemplars", query="nutp_step_seconds_bucket",
                          start="1699999000", end="1700001000"),
            "exemplar stored",
        )  # fmt: skip
    trace_id = trace_id_of("demo-1", view.job.changes[0])
    assert exemplars[0]["exemplars"][0]["labels"]["trace_id"] == trace_id
