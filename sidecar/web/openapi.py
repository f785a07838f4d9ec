"""The OpenAPI 3.1 document of the JSON API, served at `/api/v1/openapi.json`.

Every schema is closed: a key that is not listed here is a mistake, and a test that reads real
answers says so.
"""

from __future__ import annotations

from typing import Any

import sidecar

Schema = dict[str, Any]

INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
SECONDS: Schema = {"type": "number", "minimum": 0}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _object(description: str, **properties: Schema) -> Schema:
    """A closed object in which every property is present."""
    # `from` is a keyword of Python, so it comes in as `from_`.
    named = {name.rstrip("_"): schema for name, schema in properties.items()}
    return {
        "type": "object",
        "description": description,
        "properties": named,
        "required": list(named),
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


JOB = _object(
    "The job as far as this node sees it. Unknown values are null.",
    job_id=TEXT,
    step=_or_null(COUNT),
    loss=_or_null(NUMBER),
    loss_is_finite=_or_null(FLAG),
    loss_first=_or_null(NUMBER),
    gradient_norm=_or_null(NUMBER),
    world_size=_or_null(COUNT),
    ranks_alive=COUNT,
    ranks_dead=COUNT,
    ranks_left=COUNT,
    proposals_refused=COUNT,
    refusal=_or_null(TEXT),
    plan_epoch=_or_null(COUNT),
    plan_digest=_or_null(TEXT),
    step_time_s=_or_null(SECONDS),
    step_times_s=_list(SECONDS),
    steps=_list(COUNT),
    replicas_identical_steps=COUNT,
    replicas_checked_steps=COUNT,
    started_unix_s=_or_null(NUMBER),
    status=_one_of("healthy", "degraded", "critical", "starting", "ended", "unknown"),
    exit_status=_or_null(COUNT),
)

COLLECTIVE = _object(
    "The collective a rank is in.", op=TEXT, group=INTEGER, seq=INTEGER, age_s=SECONDS
)

RANK = _object(
    "One watched rank.",
    rank=COUNT,
    replica=_or_null(COUNT),
    tp_rank=_or_null(COUNT),
    pid=COUNT,
    alive=_or_null(FLAG),
    exit_status=_or_null(INTEGER),
    step=COUNT,
    progress_age_s=_or_null(SECONDS),
    share=_or_null(NUMBER),
    slowness=_or_null(NUMBER),
    busy_s=_or_null(SECONDS),
    wait_s=_or_null(SECONDS),
    health=_one_of(
        "ok", "slow", "stuck", "diverged", "dead", "left", "standby", "exited", "unknown"
    ),
    collective={"anyOf": [_ref("Collective"), {"type": "null"}]},
    events=COUNT,
    events_lost=COUNT,
    units=_or_null(_map(COUNT)),
)

REPLICA = _object(
    "One replica of the plan. Shares are units in tp_rank order.",
    id=COUNT,
    tp_degree=COUNT,
    ranks=_list(COUNT),
    batch=COUNT,
    shares=_map(_list(COUNT)),
)

PLAN = _object(
    "The plan in force; null and empty before one is seen.",
    epoch=_or_null(COUNT),
    digest=_or_null(TEXT),
    global_batch=_or_null(COUNT),
    counts=_map(COUNT),
    replicas=_list(_ref("Replica")),
)

SPAN = _object(
    "One span of a change; `start_s` counts from the start of the change.",
    name=TEXT,
    rank=_or_null(COUNT),
    start_s=NUMBER,
    seconds=SECONDS,
    bytes=COUNT,
    children=_list(_ref("Span")),
)

CHANGE = _object(
    "One allocation change.",
    epoch=COUNT,
    reason=TEXT,
    status=_one_of("running", "committed", "rolled_back", "failed"),
    verified=_or_null(FLAG),
    from_=TEXT,
    to=TEXT,
    step=COUNT,
    started_unix_s=NUMBER,
    seconds=_or_null(SECONDS),
    bytes_moved=COUNT,
    bytes_lower_bound=COUNT,
    units_verified=COUNT,
    trace_id=_or_null(TEXT),
    incident=_or_null(TEXT),
    error=_or_null(TEXT),
    judged=_or_null(TEXT),
    step_time_before_s=_or_null(SECONDS),
    step_time_after_s=_or_null(SECONDS),
    step_time_ideal_s=_or_null(SECONDS),
    spans=_list(_ref("Span")),
)

INCIDENT = _object(
    "One finding followed over time. `signals` are the measurements that agree.",
    id=TEXT,
    check=TEXT,
    severity=_one_of("info", "warning", "critical"),
    state=_one_of("pending", "firing", "resolved"),
    subject=TEXT,
    summary=TEXT,
    signals=_map(TEXT),
    rank=_or_null(COUNT),
    replica=_or_null(COUNT),
    tensor=_or_null(TEXT),
    unit=_or_null(COUNT),
    opened_step=COUNT,
    opened_unix_s=NUMBER,
    fired_unix_s=_or_null(NUMBER),
    resolved_unix_s=_or_null(NUMBER),
    changes=_list(COUNT),
    trace_ids=_list(TEXT),
    runbook=_or_null(TEXT),
)

CHECK = _object(
    "One check. While it is not ready its silence means unknown; `applies` is false where it "
    "can never judge this job.",
    name=TEXT,
    family=TEXT,
    applies=FLAG,
    ready=FLAG,
    runs=COUNT,
    failures=COUNT,
    firing=COUNT,
    help=TEXT,
)

SNAPSHOT = _object(
    "The data of a `snapshot` event.",
    job=_ref("Job"),
    ranks=_list(_ref("Rank")),
    plan=_ref("Plan"),
    changes=_list(_ref("Change")),
    incidents=_list(_ref("Incident")),
    checks=_list(_ref("Check")),
)

SCHEMAS: dict[str, Schema] = {
    "Job": JOB,
    "Collective": COLLECTIVE,
    "Rank": RANK,
    "Replica": REPLICA,
    "Plan": PLAN,
    "Span": SPAN,
    "Change": CHANGE,
    "Incident": INCIDENT,
    "Check": CHECK,
    "Snapshot": SNAPSHOT,
    "Probe": _object("State of the sidecar.", status=_one_of("ok", "unavailable"), reason=TEXT),
    "Error": _object("Why a request was refused.", error=TEXT),
    "Report": {"type": "object", "description": "Summary of the whole run."},
    "Ranks": _object("Every rank, by number.", ranks=_list(_ref("Rank"))),
    "Changes": _object("Newest first.", changes=_list(_ref("Change"))),
    "Incidents": _object("Newest first.", incidents=_list(_ref("Incident"))),
    "Checks": _object("Every check.", checks=_list(_ref("Check"))),
}

_JSON_PATHS = {
    "/api/v1/job": ("Job", "The job: step, loss, step time, counts"),
    "/api/v1/ranks": ("Ranks", "Every rank"),
    "/api/v1/plan": ("Plan", "The plan in force"),
    "/api/v1/changes": ("Changes", "Allocation changes as span trees"),
    "/api/v1/incidents": ("Incidents", "Incidents"),
    "/api/v1/checks": ("Checks", "State of each check"),
    "/api/v1/report": ("Report", "Summary of the whole run"),
}


def _answer(description: str, media_type: str, schema: Schema) -> Schema:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _operation(summary: str, answers: dict[str, Schema], *, is_open: bool = False) -> Schema:
    # `{}` beside the schemes: on loopback the sidecar runs without a token.
    security: list[Schema] = [] if is_open else [{}, {"bearer": []}, {"query": []}]
    return {"get": {"summary": summary, "security": security, "responses": answers}}


def _paths() -> dict[str, Schema]:
    refused = {"401": _answer("The token is missing or wrong", "application/json", _ref("Error"))}
    paths = {
        path: _operation(
            summary, {"200": _answer(summary, "application/json", _ref(name)), **refused}
        )
        for path, (name, summary) in _JSON_PATHS.items()
    }
    events = _answer("Events named `snapshot`, data as in Snapshot", "text/event-stream", TEXT)
    full = _answer("Too many streams are open", "application/json", _ref("Error"))
    paths["/api/v1/stream"] = _operation(
        "All of the above but the report, at every change",
        {"200": events, "503": full, **refused},
    )
    paths["/metrics"] = _operation(
        "Metrics for Prometheus", {"200": _answer("Exposition", "text/plain", TEXT), **refused}
    )
    for path in ("/healthz", "/readyz"):
        probe = {
            code: _answer(text, "application/json", _ref("Probe"))
            for code, text in (("200", "Good"), ("503", "Not good, with the reason"))
        }
        paths[path] = _operation("State of the sidecar", probe, is_open=True)
    return paths


def openapi_document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ntp-sidecar",
            "version": sidecar.__version__,
            "description": "What the sidecar sees of one job. Read only.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(),
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "query": {"type": "apiKey", "in": "query", "name": "token"},
            },
        },
    }
