"""The dashboard: Grafana's schema, the rules of Grafana's dashboard-linter, and the catalog.

Grafana's server is not run here. The rules are re-implemented from the linter's documentation
(https://github.com/grafana/dashboard-linter); exceptions stand in dashboards/.lint, as for the
linter itself.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser as pp
import pytest
import yaml

from dashboards import build
from sidecar.catalog import METRICS
from tests.repo.promql import RATES, ROOT, Selected, faults, recorded, rules, selectors, substitute

Json = dict[str, Any]

FOLDER = ROOT / "dashboards"
UNITS = {"none", "short", "percentunit", "s", "bytes", "binBps", "cps"}
"""The part of Grafana's list of value formats that we use."""

with warnings.catch_warnings():
    # The classic model warns, when it is imported, that a second one exists. Grafana reads both.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard


@pytest.fixture
def dashboard() -> Json:
    """The committed dashboard."""
    return json.loads((FOLDER / "job.json").read_text())


def panels_of(dashboard: Json) -> Iterator[Json]:
    """All panels but rows, those inside collapsed rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def targets_of(dashboard: Json) -> Iterator[tuple[Json, str]]:
    """Every query with its panel."""
    for panel in panels_of(dashboard):
        for target in panel.get("targets", []):
            yield panel, target["expr"]


def variables_of(dashboard: Json) -> dict[str, Json]:
    """Template variables by name."""
    return {v["name"]: v for v in dashboard["templating"]["list"]}


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Where `after` misses or changes something of `before`. Defaults that it adds are no loss."""
    if isinstance(before, dict) and isinstance(after, dict):
        gone = [f"{path}/{k}" for k in before if k not in after]
        return gone + [
            x for k in before.keys() & after for x in lost(before[k], after[k], f"{path}/{k}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            x
            for i, p in enumerate(zip(before, after, strict=True))
            for x in lost(*p, f"{path}/{i}")
        ]
    return [] if before == after else [path]


def through_schema(dashboard: Json) -> Json:
    """The dashboard read and written again by Grafana's own types, which drop what they lack."""
    register_default_plugins()
    text = JSONEncoder(sort_keys=True).encode(Dashboard.from_json(copy.deepcopy(dashboard)))
    return json.loads(text)


def matcher(selected: Selected, label: str) -> str | None:
    """What a selector demands of a label, as operator and value."""
    return next(
        (f"{op.rsplit('.')[-1]} {value}" for name, op, value in selected.matchers if name == label),
        None,
    )


# The linter's rules. Each yields the title of a panel, or of the dashboard, that breaks it.


def datasource_rule(d: Json) -> Iterator[str]:
    """template-datasource-rule and panel-datasource-rule."""
    sources = [v for v in variables_of(d).values() if v["type"] == "datasource"]
    if [(v["name"], v["label"], v["query"]) for v in sources] != [
        ("datasource", "Data source", "prometheus")
    ]:
        yield "templating"
    users = [*panels_of(d), *(v for v in variables_of(d).values() if v["type"] == "query")]
    users += d["annotations"]["list"]
    for user in [*users, *(t for p in panels_of(d) for t in p["targets"])]:
        if user["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield user.get("title") or user.get("name") or user["refId"]


def template_rule(d: Json) -> Iterator[str]:
    """template-job-rule, template-instance-rule, template-on-time-change-reload-rule."""
    for name in ("job", "instance"):
        v = variables_of(d).get(name, {})
        if (v.get("label"), v.get("multi"), v.get("allValue")) != (name.title(), True, ".+"):
            yield name
    yield from (
        v["name"] for v in variables_of(d).values() if v["type"] == "query" and v["refresh"] != 2
    )


def template_promql_rule(d: Json) -> Iterator[str]:
    """template-label-promql-rule: the selector inside label_values parses and is in the catalog."""
    for v in variables_of(d).values():
        if v["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", v["query"])
            if not found or faults(f"sum by ({found[2]}) ({found[1]})"):
                yield v["name"]


def title_description_rule(d: Json) -> Iterator[str]:
    """panel-title-description-rule."""
    yield from (p["title"] for p in panels_of(d) if not p["title"] or not p.get("description"))


def units_rule(d: Json) -> Iterator[str]:
    """panel-units-rule."""
    yield from (
        p["title"] for p in panels_of(d) if p["fieldConfig"]["defaults"].get("unit") not in UNITS
    )


def no_targets_rule(d: Json) -> Iterator[str]:
    """panel-no-targets-rule."""
    yield from (p["title"] for p in panels_of(d) if not p.get("targets"))


def promql_rule(d: Json) -> Iterator[str]:
    """target-promql-rule."""
    for panel, expr in targets_of(d):
        try:
            pp.parse(substitute(expr))
        except ValueError:
            yield panel["title"]


def rate_interval_rule(d: Json) -> Iterator[str]:
    """target-rate-interval-rule: rates over what Grafana computes from the scrape interval."""
    for panel, expr in targets_of(d):
        if set(re.findall(r"\[[^\]]+\]", expr)) - {"[$__rate_interval]"}:
            yield panel["title"]


def job_rule(d: Json) -> Iterator[str]:
    """target-job-rule."""
    for panel, expr in targets_of(d):
        if any(matcher(s, "job") is None for s in selectors(expr)) or 'job=~"$job"' not in expr:
            yield panel["title"]


def instance_rule(d: Json) -> Iterator[str]:
    """target-instance-rule."""
    for panel, expr in targets_of(d):
        if any(matcher(s, "instance") is None for s in selectors(expr)):
            yield panel["title"]


def counter_rule(d: Json) -> Iterator[str]:
    """target-counter-agg-rule: a counter only means something inside rate, irate or increase."""
    for panel, expr in targets_of(d):
        counters = [
            s for s in selectors(expr) if s.metric.endswith(("_total", "_bucket", "_count", "_sum"))
        ]
        if any(s.function not in RATES for s in counters):
            yield panel["title"]


def uneditable_rule(d: Json) -> Iterator[str]:
    """template-uneditable-rule."""
    if d["editable"]:
        yield d["title"]


RULES: dict[str, Callable[[Json], Iterator[str]]] = {
    "template-datasource-rule": datasource_rule,
    "template-instance-rule": template_rule,
    "template-label-promql-rule": template_promql_rule,
    "panel-title-description-rule": title_description_rule,
    "panel-units-rule": units_rule,
    "panel-no-targets-rule": no_targets_rule,
    "target-promql-rule": promql_rule,
    "target-rate-interval-rule": rate_interval_rule,
    "target-job-rule": job_rule,
    "target-instance-rule": instance_rule,
    "target-counter-agg-rule": counter_rule,
    "template-uneditable-rule": uneditable_rule,
}


def excused(rule: str) -> set[str]:
    """Panels that dashboards/.lint excuses from a rule."""
    exclusions = yaml.safe_load((FOLDER / ".lint").read_text())["exclusions"]
    return {entry["panel"] for entry in exclusions.get(rule, {}).get("entries", [])}


@pytest.mark.parametrize("rule", RULES)
def test_dashboard_keeps_rule_of_the_linter(dashboard: Json, rule: str) -> None:
    """Each rule holds but for the panels that .lint names; an excuse nobody needs fails too."""
    assert excused(rule) == set(RULES[rule](dashboard))


def test_exceptions_have_reasons_and_name_rules() -> None:
    """Nobody is excused without a reason, or from a rule that does not exist."""
    exclusions = yaml.safe_load((FOLDER / ".lint").read_text())["exclusions"]
    assert set(exclusions) <= set(RULES)
    assert all(len(e["reason"]) > 20 for e in exclusions.values())


BREACHES: dict[str, Callable[[Json], object]] = {
    "template-datasource-rule": lambda d: next(panels_of(d)).update(datasource={"uid": "abc"}),
    "template-instance-rule": lambda d: variables_of(d)["instance"].update(allValue=".*"),
    "template-label-promql-rule": lambda d: variables_of(d)["rank"].update(
        query="label_values(nutp_no_such_metric, rank)"
    ),
    "panel-title-description-rule": lambda d: next(panels_of(d)).update(description=""),
    "panel-units-rule": lambda d: next(panels_of(d))["fieldConfig"]["defaults"].update(unit="secs"),
    "panel-no-targets-rule": lambda d: next(panels_of(d)).update(targets=[]),
    "target-promql-rule": lambda d: next(panels_of(d))["targets"][0].update(expr="sum(up"),
    "target-rate-interval-rule": lambda d: next(panels_of(d))["targets"][0].update(
        expr="rate(nutp_rank_steps_total[5m])"
    ),
    "target-job-rule": lambda d: next(panels_of(d))["targets"][0].update(expr="nutp_rank_up"),
    "target-instance-rule": lambda d: next(panels_of(d))["targets"][0].update(expr="nutp_rank_up"),
    "target-counter-agg-rule": lambda d: next(panels_of(d))["targets"][0].update(
        expr="nutp_rank_steps_total"
    ),
    "template-uneditable-rule": lambda d: d.update(editable=True),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_finds_a_planted_breach(dashboard: Json, rule: str) -> None:
    """Each rule can fail: it finds a fault planted for it."""
    BREACHES[rule](dashboard)
    assert set(RULES[rule](dashboard)) - excused(rule)


def test_committed_dashboard_is_what_the_builder_builds() -> None:
    """job.json is generated: `python -m dashboards.build` after each change of the panels."""
    assert (FOLDER / "job.json").read_text() == build.text()


def test_dashboard_survives_grafanas_schema(dashboard: Json) -> None:
    """Grafana's own types know every key and value: none is lost when they read and write it."""
    assert lost(dashboard, through_schema(dashboard)) == []
    assert dashboard["schemaVersion"] == 42


def test_schema_loses_a_misspelt_key(dashboard: Json) -> None:
    """The round trip can fail: a misspelt key does not come back, however deep it is."""
    dashboard["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    assert lost(dashboard, through_schema(dashboard)) == ["/panels/1/fieldConfig/defaults/unti"]


def test_ids_and_titles_are_unique_and_panels_do_not_overlap(dashboard: Json) -> None:
    """Grafana addresses panels by id, people by title, and draws each cell once."""
    ids = [p["id"] for p in dashboard["panels"]]
    titles = [p["title"] for p in dashboard["panels"]]
    cells = [
        (x, y)
        for p in dashboard["panels"]
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(
        len({t["refId"] for t in p["targets"]}) == len(p["targets"]) for p in panels_of(dashboard)
    )


def test_queries_use_only_what_is_exported_or_recorded(dashboard: Json) -> None:
    """Each metric and label of each query is in the catalog or recorded by our rules."""
    queries = [expr for _, expr in targets_of(dashboard)]
    queries += [a["expr"] for a in dashboard["annotations"]["list"]]
    assert {expr: found for expr in queries if (found := faults(expr))} == {}


def test_legends_name_labels_that_the_query_keeps(dashboard: Json) -> None:
    """A legend with a label that aggregation drops would show as an empty name."""
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            kept |= {x for s in selectors(target["expr"]) for x in recorded().get(s.metric, set())}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_every_metric_of_the_catalog_is_shown_or_alerted_on(dashboard: Json) -> None:
    """A metric that nobody looks at is cost without use; the info metrics serve joins."""
    queries = [expr for _, expr in targets_of(dashboard)]
    queries += [v["query"] for v in dashboard["templating"]["list"]]
    text = " ".join([*queries, *(r["expr"] for r in [*rules("record"), *rules("alert")])])
    unused = {
        m.name for m in METRICS if not re.search(rf"\b{m.name}(_total|_info|_bucket)?\b", text)
    }
    assert unused - {"nutp_rank", "nutp_incidents"} == set(), "add a panel for each of these"


def test_every_recorded_series_is_used(dashboard: Json) -> None:
    """A recorded series that no panel, alert or other rule reads is cost without use."""
    queries = [expr for _, expr in targets_of(dashboard)]
    queries += [r["expr"] for r in [*rules("record"), *rules("alert")]]
    used = {s.metric for expr in queries for s in selectors(expr)}
    assert set(recorded()) <= used


def test_provisioning_names_the_files_and_sources_that_exist(dashboard: Json) -> None:
    """The provider loads one folder, and links between data sources lead to provisioned ones."""
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/nutp.yaml").read_text())
    providers = yaml.safe_load((FOLDER / "provisioning/dashboards/nutp.yaml").read_text())
    uids = [s["uid"] for s in sources["datasources"]]
    prometheus = next(s for s in sources["datasources"] if s["type"] == "prometheus")
    links = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert sources["apiVersion"] == providers["apiVersion"] == 1
    assert len(set(uids)) == len(uids)
    assert {x["datasourceUid"] for x in links} | {prometheus["jsonData"]["alertmanagerUid"]} <= set(
        uids
    )
    assert [s["name"] for s in sources["datasources"] if s.get("isDefault")] == ["Prometheus"]
    assert all(not s["editable"] for s in sources["datasources"])
    assert [p["allowUiUpdates"] for p in providers["providers"]] == [False]
    assert dashboard["uid"] == "nutp-job"
    assert "id" not in dashboard
