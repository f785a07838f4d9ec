"""Alerts and their surroundings, judged by the real promtool and amtool."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.catalog import CHECKS
from tests.repo.promql import ALERTS, ROOT, faults, rules
from tests.support.servers import require_binary

NAMES = sorted({r["alert"] for r in rules("alert")})
SEVERITIES = {"critical", "warning"}
HEADINGS = ["## Means", "## Check", "## Act", "## Confirm"]


def run(tool: str, *args: object, cwd: Path = ALERTS) -> subprocess.CompletedProcess[str]:
    """Run a real tool; its output is for the message of a failing test."""
    command = [require_binary(tool), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def copied(tmp_path: Path) -> Path:
    """A copy of alerts/ whose rules a test may spoil."""
    return Path(shutil.copytree(ALERTS, tmp_path / "alerts"))


def test_rules_are_valid() -> None:
    """Promtool accepts every rule file and finds no duplicate rule."""
    done = run("promtool", "check", "rules", "--lint-fatal", *sorted(ALERTS.glob("*.rules.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", NAMES)
def test_rule_fires_and_keeps_quiet_as_its_test_file_says(alert: str) -> None:
    """Promtool runs the firing, quiet and boundary cases of each alert."""
    file = ALERTS / "tests" / f"{alert}.test.yml"
    done = run("promtool", "test", "rules", file)
    names = [t["name"].split(" - ")[0] for t in yaml.safe_load(file.read_text())["tests"]]
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(names) == {"firing", "quiet", "boundary"}


@pytest.mark.parametrize("alert", NAMES)
@pytest.mark.parametrize("expr", ["vector(1) < 0", "vector(1)"], ids=["never", "always"])
def test_rule_tests_find_a_spoilt_rule(alert: str, expr: str, tmp_path: Path) -> None:
    """The cases can fail: on an alert that never fires, and on one that always does."""
    folder = copied(tmp_path)
    file = folder / "alerts.rules.yml"
    content = yaml.safe_load(file.read_text())
    for rule in (r for g in content["groups"] for r in g["rules"] if r["alert"] == alert):
        rule["expr"] = expr
    file.write_text(yaml.safe_dump(content))
    done = run("promtool", "test", "rules", folder / "tests" / f"{alert}.test.yml")
    assert done.returncode == 1, done.stdout + done.stderr


def test_rules_use_only_what_is_exported_or_recorded() -> None:
    """Each metric and label of each rule is in the catalog or recorded by our rules."""
    every = [*rules("record"), *rules("alert")]
    assert {r["expr"]: found for r in every if (found := faults(r["expr"]))} == {}


def test_recorded_names_follow_the_convention() -> None:
    """level:metric:operations, so that a reader knows what a series is from its name."""
    for rule in rules("record"):
        assert re.fullmatch(r"[a-z_]+:[a-z_]+:[a-z0-9_]+", rule["record"]), rule["record"]
        assert "_total" not in rule["record"]


def test_ranges_hold_four_scrapes() -> None:
    """Prometheus 3 leaves the first sample of a range out; four scrapes leave enough on both."""
    for rule in [*rules("record"), *rules("alert")]:
        for amount, unit in re.findall(r"\[(\d+)([smh])\]", rule["expr"]):
            assert int(amount) * {"s": 1, "m": 60, "h": 3600}[unit] >= 4 * 15, rule["expr"]


def test_every_check_of_the_catalog_has_its_alert() -> None:
    """A check without an alert pages nobody."""
    assert {c.alert for c in CHECKS} <= set(NAMES)


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda r: r["alert"])
def test_alert_says_what_a_woken_person_needs(rule: dict[str, Any]) -> None:
    """Each alert has a severity, a sentence, a description and two links, and does not flap."""
    notes = rule["annotations"]
    assert rule["labels"]["severity"] in SEVERITIES
    assert notes["summary"].endswith(".")
    assert len(notes["description"]) > len(notes["summary"])
    assert notes["runbook_url"].endswith(f"/{rule['alert']}.md")
    assert "/d/nutp-job" in notes["dashboard_url"]
    assert "for" in rule or "keep_firing_for" in rule
    assert "absent(" not in rule["expr"] or rule["labels"]["cause"] == "no_target"


def test_alert_of_one_name_has_one_summary() -> None:
    """Alertmanager groups by name: one name with two sentences would read as two troubles."""
    summaries = {(r["alert"], r["annotations"]["summary"]) for r in rules("alert")}
    assert len(summaries) == len(NAMES)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """The link in a page leads somewhere, and no runbook is left over."""
    assert sorted(p.stem for p in (ALERTS / "runbooks").glob("*.md")) == NAMES


@pytest.mark.parametrize("alert", NAMES)
def test_runbook_has_its_four_parts(alert: str) -> None:
    """Means, check, act, confirm, in this order, each with content, and what not to do."""
    text = (ALERTS / "runbooks" / f"{alert}.md").read_text()
    assert text.startswith(f"# {alert}\n")
    assert re.findall(r"^## .*$", text, re.MULTILINE) == HEADINGS
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)
    assert all(len(part.split()) > 20 for part in parts[1:])
    assert "Do not" in text
    assert "```" in text


@pytest.mark.parametrize("alert", NAMES)
def test_runbook_links_and_paths_exist(alert: str) -> None:
    """Links between runbooks and docs resolve, and API paths are those of docs/api.md."""
    file = ALERTS / "runbooks" / f"{alert}.md"
    api = (ROOT / "docs" / "api.md").read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", file.read_text()):
        assert (file.parent / target).exists(), target
    for path in set(re.findall(r"/api/v1/\w+", file.read_text())):
        assert path in api or path.replace("stream", "") == "/api/v1/", path


def test_commands_in_runbooks_exist() -> None:
    """Nobody types a command at night that the program does not know."""
    pages = [*(ALERTS / "runbooks").glob("*.md"), ROOT / "docs" / "operations.md"]
    named = {
        c for p in pages for c in re.findall(r"ntp-sidecar ([a-z]+)\b(?! is| has)", p.read_text())
    }
    assert {"status", "top", "config"} <= named
    for command in sorted(named):
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", command, "--help"], cwd=ROOT, capture_output=True
        )
        assert done.returncode == 0, command


def test_prometheus_config_is_valid(tmp_path: Path) -> None:
    """Promtool accepts the scrape config with its rules, once the token file is there."""
    folder = copied(tmp_path)
    token = tmp_path / "token"
    token.write_text("example")
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("/run/nutp/token", str(token)))
    done = run("promtool", "check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout


def test_scrape_config_has_backstops_and_the_name_that_rules_look_for() -> None:
    """Labels that run wild are cut off, and NutpSidecarDown looks for the job that is scraped."""
    config = yaml.safe_load((ALERTS / "prometheus.yml").read_text())
    scrape = config["scrape_configs"][0]
    wanted = {s for r in rules("alert") for s in re.findall(r'job="([^"]+)"', r["expr"])}
    assert wanted == {scrape["job_name"]}
    assert scrape["sample_limit"] >= 4000
    assert scrape["label_limit"] >= 8


def test_alertmanager_config_is_valid() -> None:
    """Amtool accepts the routes and receivers."""
    done = run("amtool", "check-config", ALERTS / "alertmanager.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda r: r["alert"])
def test_alert_reaches_the_receiver_of_its_severity(rule: dict[str, Any]) -> None:
    """Amtool routes critical alerts to the pager and warnings to the tickets."""
    receiver = {"critical": "pager", "warning": "tickets"}[rule["labels"]["severity"]]
    labels = [f"{k}={v}" for k, v in {**rule["labels"], "alertname": rule["alert"]}.items()]
    config = f"--config.file={ALERTS / 'alertmanager.yml'}"
    done = run(
        "amtool", "config", "routes", "test", config, f"--verify.receivers={receiver}", *labels
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_inhibition_compares_labels_that_alerts_carry() -> None:
    """A label that neither side has would count as equal and silence strangers."""
    config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text())
    for rule in config["inhibit_rules"]:
        for label in set(rule["equal"]) - {"job"}:
            assert any(m.startswith(f"{label}=~") for m in rule["source_matchers"]), rule
    assert all(
        "credentials" not in str(r).replace("credentials_file", "") for r in config["receivers"]
    )
