"""One frame of `ntp-sidecar top`: a snapshot as rich renderables. Pure, but for the age of things.

Made for 80 columns; wider terminals get longer bars. In a terminal of limited height the ranks that
need attention stay and healthy ones are counted instead of shown.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sidecar.top.follow import Seen
from sidecar.top.units import UNKNOWN, age, bar, duration, number, size, sparkline

Json = dict[str, Any]

_MARKS = {
    "healthy": ("✓", "green"),
    "degraded": ("▲", "yellow"),
    "critical": ("✖", "bold red"),
    "starting": ("▷", "cyan"),
    "ended": ("○", "bright_black"),
    "unknown": ("?", "bright_black"),
    "ok": ("✓", "green"),
    "slow": ("▲", "yellow"),
    "stuck": ("■", "bold red"),
    "diverged": ("≠", "bold red"),
    "dead": ("✖", "bold red"),
    "left": ("○", "bright_black"),
    "standby": ("◌", "cyan"),
    "exited": ("○", "bright_black"),
    "info": ("i", "cyan"),
    "warning": ("▲", "yellow"),
    "resolved": ("✓", "green"),
    "running": ("▶", "cyan"),
    "committed": ("✓", "green"),
    "rolled_back": ("↶", "yellow"),
    "failed": ("✖", "bold red"),
}
_LISTED = 4
"""Changes and resolved incidents shown; the page has all of them."""

_OTHER_LINES = 22
"""Lines of a frame that are not ranks."""


def frame(seen: Seen, *, width: int, height: int | None) -> RenderableType:
    """The whole frame. Without a height nothing is left out."""
    snapshot = seen.snapshot
    parts: list[RenderableType] = []
    if seen.problem is not None:
        parts.append(_stale(seen))
    parts += [_head(snapshot), Text()]
    if not snapshot["ranks"]:
        parts.append(Text("No rank seen yet. Start a job with: ntp-sidecar run -- torchrun ..."))
        return Group(*parts)
    most = None if height is None else max(4, height - _OTHER_LINES)
    parts += [
        *_incidents(snapshot),
        _ranks(snapshot["ranks"], width, most),
        *_left_out(snapshot["ranks"], most),
        Text(),
        _step_times(snapshot["job"], width),
        Text(),
        *_changes(snapshot["changes"]),
        _checks(snapshot["checks"], snapshot["job"]["status"]),
    ]
    return Group(*parts)


def _mark(word: str) -> Text:
    """Sign and word in colour; the word alone would do."""
    sign, style = _MARKS.get(word, ("?", "bright_black"))
    return Text(f"{sign} {word.replace('_', ' ')}", style=style)


def _stale(seen: Seen) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at_unix_s))
    old = age(time.time() - seen.at_unix_s)
    text = f" STALE since {clock} ({old}): {seen.problem}. Values below are from then. "
    return Text(text, style="bold white on red")


def _head(snapshot: Json) -> Text:
    job = snapshot["job"]
    first = "" if job["loss_first"] is None else f" (from {number(job['loss_first'])})"
    world = "" if job["world_size"] is None else f" of {job['world_size']}"
    dead = f", {job['ranks_dead']} dead" if job["ranks_dead"] else ""
    dead += f", {job['ranks_left']} left" if job["ranks_left"] else ""
    digest = f" ({job['plan_digest'][:8]})" if job["plan_digest"] else ""
    compared = job["replicas_checked_steps"]
    same = f"{job['replicas_identical_steps']} of {compared} steps" if compared else "not compared"
    head = Text(job["job_id"], style="bold").append("  ")
    head.append_text(_mark(job["status"]))
    if job["status"] == "ended" and job["exit_status"] is not None:
        head.append(f", exit status {job['exit_status']}")
    head.append(f"  step {number(job['step'], 0)}  {duration(job['step_time_s'])}")
    loss = "not finite" if job["loss_is_finite"] is False else number(job["loss"])
    head.append(f"  loss {loss}{first}\n")
    head.append(f"ranks {job['ranks_alive']}{world}{dead}")
    head.append(f"  plan epoch {number(job['plan_epoch'], 0)}{digest}  replicas identical {same}")
    return head


def _ranks(ranks: list[Json], width: int, most: int | None) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black")
    for name in ("rank", "place", "share", "", "units", "slow", "busy", "wait", "health"):
        table.add_column(
            name, justify="left" if name in ("share", "health") else "right", no_wrap=True
        )
    bar_width = max(8, min(40, width - 68))
    largest = max((r["share"] or 0.0 for r in ranks), default=0.0) or 1.0
    for rank in _chosen(ranks, most):
        table.add_row(*_rank_cells(rank, bar_width, largest))
    return table


def _rank_cells(rank: Json, bar_width: int, largest: float) -> list[Text]:
    share, slow, units = rank["share"], rank["slowness"], rank["units"]
    place = UNKNOWN if rank["replica"] is None else f"{rank['replica']}.{rank['tp_rank']}"
    mark = _mark(rank["health"])
    texts = [
        str(rank["rank"]),
        place,
        bar((share or 0.0) / largest, bar_width),
        UNKNOWN if share is None else f"{100 * share:.0f} %",
        UNKNOWN if units is None else "/".join(str(n) for n in units.values()),
        UNKNOWN if slow is None else f"{slow:.2f}x",
        duration(rank["busy_s"]),
        duration(rank["wait_s"]),
    ]
    style = "" if rank["health"] == "ok" else str(mark.style)
    return [*(Text(t, style=style) for t in texts), mark]


def _chosen(ranks: list[Json], most: int | None) -> list[Json]:
    """The ranks to show, by number: those in trouble first, then the slowest."""
    if most is None or len(ranks) <= most:
        return ranks
    worst = sorted(ranks, key=lambda r: (r["health"] == "ok", -(r["slowness"] or 0.0)))
    return sorted(worst[:most], key=lambda r: r["rank"])


def _left_out(ranks: list[Json], most: int | None) -> list[RenderableType]:
    count = len(ranks) - len(_chosen(ranks, most))
    text = f"and {count} more ranks; a taller window shows them"
    return [Text(text, style="bright_black")] if count else []


def _step_times(job: Json, width: int) -> Text:
    times = job["step_times_s"]
    text = Text("step time ", style="bright_black")
    if not times:
        return text.append("no step committed yet", style="")
    recent = sorted(times[-20:])
    text.append(sparkline(times, max(10, width - 46)), style="cyan")
    median = duration(recent[len(recent) // 2])
    return text.append(f" {duration(times[-1])}, median {median}", style="")


def _incidents(snapshot: Json) -> list[RenderableType]:
    incidents = snapshot["incidents"]
    open_ = [i for i in incidents if i["state"] != "resolved"]
    resolved = [i for i in incidents if i["state"] == "resolved"][:_LISTED]
    lines: list[RenderableType] = []
    for i in open_:
        lines.append(_incident(i))
        lines += _evidence(i)
    if not open_:
        lines.append(Text("No open incident.", style="bright_black"))
    lines += [_resolved(i) for i in resolved]
    return [*lines, Text()]


def _incident(incident: Json) -> Text:
    text = _mark(incident["severity"])
    pending = " (pending)" if incident["state"] == "pending" else ""
    since = age(max(0.0, time.time() - incident["opened_unix_s"]))
    return Text().append_text(text).append(f" for {since}{pending}: ").append(incident["summary"])


def _evidence(incident: Json) -> list[RenderableType]:
    """The signals that agree, and where it says what to do."""
    signals = "; ".join(f"{name} {value}" for name, value in incident["signals"].items())
    runbook = incident["runbook"] and f"runbook {incident['runbook']}"
    indent = (0, 0, 0, 2)
    return [Padding(Text(t, style="bright_black"), indent) for t in (signals, runbook) if t]


def _resolved(incident: Json) -> Text:
    lasted = age(incident["resolved_unix_s"] - incident["opened_unix_s"])
    text = Text().append_text(_mark("resolved"))
    return text.append(f" after {lasted}: {incident['summary']}", style="bright_black")


def _changes(changes: list[Json]) -> list[RenderableType]:
    if not changes:
        return [Text("No allocation change yet.", style="bright_black"), Text()]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black")
    for name in ("epoch", "status", "reason", "step", "took", "moved", "step time"):
        table.add_column(
            name,
            justify="right" if name in ("epoch", "step", "took", "moved") else "left",
            no_wrap=True,
        )
    for c in changes[:_LISTED]:
        table.add_row(
            str(c["epoch"]),
            _mark(c["status"]),
            c["reason"].replace("_", " "),
            str(c["step"]),
            duration(c["seconds"]),
            size(c["bytes_moved"]),
            _judged(c),
        )
    return [table, Text()]


def _judged(change: Json) -> str:
    before, after = change["step_time_before_s"], change["step_time_after_s"]
    if before is None or after is None:
        return change["judged"] or UNKNOWN
    verdict = f" {change['judged']}" if change["judged"] else ""
    return f"{duration(before)} → {duration(after)}{verdict}"


def _checks(checks: list[Json], status: str) -> Text:
    silent = [c for c in checks if not c["ready"]]
    text = f"checks: {len(checks) - len(silent)} of {len(checks)} can judge"
    waiting = [c["name"] for c in silent if c["applies"]]
    useless = [c["name"] for c in silent if not c["applies"]]
    if waiting and status != "ended":  # then no more data will come
        text += f"; waiting for data: {', '.join(waiting)}"
    if useless:
        text += f"; not applicable: {', '.join(useless)}"
    return Text(text, style="bright_black")
