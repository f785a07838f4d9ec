"""Builds dashboards/job.json, Grafana's classic dashboard (schema version 42).

Run `python -m dashboards.build` after a change of `panels.py`; a test fails when the committed file
differs from what this script builds. Everything is set explicitly, because Grafana's own defaults
differ between releases.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from dashboards.panels import JOB, NODE, ROWS, Panel

Json = dict[str, Any]

OUTPUT = Path(__file__).with_name("job.json")
UID = "nutp-job"
SCHEMA_VERSION = 42
COLUMNS = 24
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
REFRESH_ON_TIME_CHANGE = 2


def dashboard() -> Json:
    """The whole dashboard."""
    return {
        "uid": UID,
        "title": "Nonuniform tensor parallelism: one job",
        "description": "Speed, health and allocation of one job, and the sidecars that watch it.",
        "tags": ["nutp"],
        "timezone": "utc",
        "editable": False,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": variables()},
        "annotations": {"list": annotations()},
        "links": [],
        "panels": panels(),
    }


def variables() -> list[Json]:
    """What the reader chooses. One job at a time; all of its nodes and ranks by default."""
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "hide": 0,
            "multi": False,
            "includeAll": False,
            "skipUrlSync": False,
        },
        _variable("job", "Job", "label_values(nutp_build_info, job)"),
        _variable("instance", "Instance", 'label_values(nutp_build_info{job=~"$job"}, instance)'),
        _variable(
            "nutp_job", "Training job", f"label_values(nutp_job_ranks{{{NODE}}}, nutp_job)", False
        ),
        _variable("rank", "Rank", f"label_values(nutp_rank_up{{{JOB}}}, rank)"),
    ]


def _variable(name: str, label: str, query: str, multi: bool = True) -> Json:
    variable: Json = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "definition": query,
        "refresh": REFRESH_ON_TIME_CHANGE,
        "sort": 3,
        "hide": 0,
        "multi": multi,
        "includeAll": multi,
        "skipUrlSync": False,
    }
    if multi:
        variable |= {"allValue": ".+", "current": {"text": ["All"], "value": ["$__all"]}}
    return variable


def annotations() -> list[Json]:
    """Lines in every panel: allocation changes, and the alerts of this job."""
    return [
        _annotation(
            "Allocation changes",
            "purple",
            f"max(changes(nutp_plan_epoch{{{JOB}}}[1m])) > 0",
            "Allocation change",
        ),
        _annotation(
            "Alerts",
            "red",
            'ALERTS{alertname=~"Nutp.+", alertstate="firing", nutp_job=~"$nutp_job"}',
            "{{alertname}} rank {{rank}}",
        ),
    ]


def _annotation(name: str, colour: str, query: str, title: str) -> Json:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "expr": query,
        "step": "15s",
        "titleFormat": title,
        "tagKeys": "severity",
        "useValueForTime": False,
    }


def panels() -> list[Json]:
    """Rows and panels, placed from left to right and from top to bottom."""
    ids, placed, y = count(1), [], 0
    for title, row in ROWS:
        placed.append(_row(next(ids), title, y))
        x, y = 0, y + 1
        height = 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            placed.append(_panel(next(ids), panel, {"x": x, "y": y, "w": panel.width, "h": height}))
            x += panel.width
        y += height
    return placed


def _row(number: int, title: str, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(number: int, panel: Panel, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            _target(chr(ord("A") + i), legend, query, panel.kind)
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
        "transformations": _TABLE if panel.kind == "table" else [],
    }


def _target(letter: str, legend: str, query: str, kind: str) -> Json:
    is_series = kind == "timeseries"
    return {
        "refId": letter,
        "datasource": SOURCE,
        "expr": query,
        "legendFormat": legend or "__auto",
        "format": "table" if kind == "table" else "time_series",
        "instant": not is_series,
        "range": is_series,
        "exemplar": is_series and "_bucket" in query,
    }


def _defaults(panel: Panel) -> Json:
    steps = [{"color": "green", "value": None}]
    steps += [{"color": colour, "value": value} for value, colour in panel.limits]
    defaults: Json = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "noValue": "unknown",
    }
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": _lines(panel)}
    return defaults


def _lines(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if panel.stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if panel.limits else "off"},
    }


_REDUCE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": _REDUCE,
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value",
        "wideLayout": True,
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}
_TABLE: list[Json] = [
    {
        "id": "organize",
        "options": {
            "excludeByName": {"Time": True, "nutp_job": True},
            "renameByName": {"Value": "changes"},
        },
    }
]


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text())
