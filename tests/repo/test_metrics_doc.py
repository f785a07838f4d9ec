"""docs/metrics.md is what the catalog says; docs/webhooks.md shows events as they are sent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.catalog import CHECKS, METRICS
from sidecar.incidents.incident import IncidentState
from sidecar.notify.events import EventType, WebhookFormat, change_event, incident_event
from sidecar.notify.retry import SCHEDULE_S
from sidecar.notify.signer import Signer, new_secret
from tests.support import filled

ROOT = Path(__file__).parents[2]
WEBHOOKS = (ROOT / "docs" / "webhooks.md").read_text()


def test_page_is_the_generators_output() -> None:
    """The committed page equals a fresh one; its head says how to make it."""
    fresh = subprocess.run(
        [sys.executable, "-m", "sidecar.export.docs"], cwd=ROOT, capture_output=True, check=True
    )
    assert (ROOT / "docs" / "metrics.md").read_bytes() == fresh.stdout


def test_page_names_every_metric_and_check_once() -> None:
    """Nothing of the catalog is missing in the tables."""
    rows = [
        line.split("|")[1].strip(" `")
        for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    names = [re.sub("_(total|info)$", "", row) for row in rows]
    for name in [m.name for m in METRICS] + [c.name for c in CHECKS]:
        assert names.count(name) == 1, name


def json_examples() -> list[dict]:
    return [json.loads(text) for text in re.findall(r"```json\n(.*?)```", WEBHOOKS, re.DOTALL)]


def test_webhook_page_shows_every_type_with_the_fields_that_are_sent() -> None:
    """The examples have the same keys as real events."""
    fired, resolved = filled.incident(), filled.incident(IncidentState.RESOLVED)
    sent = [
        incident_event("demo-1", fired, WebhookFormat.NUTP, external_url="http://h/"),
        incident_event("demo-1", resolved, WebhookFormat.NUTP, external_url="http://h/"),
        change_event("demo-1", filled.change(), WebhookFormat.NUTP, unix_offset_ns=0),
    ]
    bodies = {b["type"]: b for b in (json.loads(m.body) for m in sent)}
    shown = {b["type"]: b for b in json_examples()}
    assert bodies.keys() == shown.keys() == {str(t) for t in EventType}
    for name, body in bodies.items():
        assert body.keys() == shown[name].keys()
        for part, value in body["data"].items():
            shown_part = shown[name]["data"][part]
            if isinstance(value, dict):
                assert value.keys() == shown_part.keys(), name


def test_webhook_page_shows_the_schedule() -> None:
    """The table of waits is the schedule in force."""
    units = {"s": 1, "min": 60, "h": 3600}
    line = next(line for line in WEBHOOKS.splitlines() if line.startswith("0 s, "))
    waits = [part.split() for part in line.rstrip(".").split(", ")]
    assert tuple(float(n) * units[unit] for n, unit in waits) == SCHEDULE_S


@pytest.mark.parametrize("wrong", [False, True])
def test_verification_in_ten_lines_works(wrong) -> None:
    """The code on the page accepts a right signature and refuses a wrong one."""
    code = re.search(r"```python\n(.*?)```", WEBHOOKS, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line]) <= 10
    scope: dict = {}
    exec(code, scope)
    secret, body, now_s = new_secret(), b'{"type": "x"}', 1.7e9
    headers = Signer(secret).headers("id-1", body, now_s)
    other = new_secret() if wrong else secret
    assert scope["is_genuine"](other, headers, body, now_s) is not wrong
    assert not scope["is_genuine"](secret, headers, body + b" ", now_s)
    assert not scope["is_genuine"](secret, headers, body, now_s + 301)
