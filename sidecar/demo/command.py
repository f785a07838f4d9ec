"""`ntp-sidecar demo`: exit code 0 only if all of it happened."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidecar.demo.client import CannotStart, StoryBroken
from sidecar.demo.scenario import Scenario
from sidecar.demo.stage import Stage, build_stage
from sidecar.demo.story import Story, shortened
from sidecar.demo.teller import Teller
from sidecar.demo.verdict import missing
from sidecar.top.units import size

BROKEN, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns its exit code."""
    args = _parser().parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write(
            "ntp-sidecar: the demo trains a model and needs torch; install it with "
            "pip install 'ntp-sidecar[train]'\n"
        )
        return BAD_INPUT
    if args.json is not None and not _is_writable(args.json):
        sys.stderr.write(f"ntp-sidecar: --json {args.json} cannot be written; name another file\n")
        return BAD_INPUT
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    console = Console(highlight=False)
    try:
        return _play(args, console)
    except CannotStart as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    except StoryBroken as error:  # before there was a stage
        console.print(_broken(error))
        return BROKEN
    except OSError as error:
        sys.stderr.write(f"ntp-sidecar: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        console.print("\ninterrupted: all processes ended, shared memory freed")
        return INTERRUPTED


def _play(args: argparse.Namespace, console: Console) -> int:
    scenario = shortened(Scenario()) if args.quick else Scenario()
    teller = Teller(console)
    teller.line(
        "demo",
        f"{scenario.num_ranks} ranks train a byte-level Llama of 4.5 million "
        "weights on the source of Python's standard library: no GPU, no network",
    )
    with build_stage(scenario, args.port) as stage:
        teller.line("page", f"{stage.url}  (or: ntp-sidecar top --url {stage.url})", "cyan")
        teller.more(f"job {stage.job_id}, logs in {stage.work_dir}")
        code = tell(Story(scenario, stage, teller), scenario, stage, args.json, console)
        if args.keep:
            _keep(console, stage)
    return code


def tell(
    story: Story, scenario: Scenario, stage: Stage, report_file: Path | None, console: Console
) -> int:
    """Run the story and say how it ended: the summary, or what broke and what the logs say."""
    try:
        report = story.run()
    except StoryBroken as error:
        console.print(_broken(error))
        console.print(Text(stage.log_tail(), "dim"))
        return BROKEN
    if report_file is not None:
        _write(report_file, report)
    lacking = missing(report, scenario)
    console.print(_summary(report))
    for text in lacking:
        console.print(f"[bold red]missing[/]  {text}")
    if not lacking:
        console.print("[bold green]All of it happened.[/]")
    return BROKEN if lacking else 0


def _broken(error: StoryBroken) -> Text:
    # No markup: a log or an error may hold square brackets.
    return Text.assemble(("broken", "bold red"), "  ", str(error))


def _keep(console: Console, stage: Stage) -> None:
    url, logs = stage.url, stage.work_dir
    what = f"The page and the metrics stay: {url}  {url}/metrics" if stage.has_page else "No page"
    try:  # from before it says so: whoever reads it may be quick
        console.print(f"{what}; logs in {logs}   Ctrl-C ends.", markup=False)
        signal.pause()
    except KeyboardInterrupt:
        console.print("ended")


def _summary(report: dict[str, Any]) -> Table:
    table = Table(title=None, show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts_of(report):
        table.add_row(name, text)
    return table


def facts_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the summary: name and text. Values of a report may be null."""
    rows = [
        (
            "steps",
            f"{report['steps']}, loss {_decimal(report['loss']['first'])} -> "
            f"{_decimal(report['loss']['last'])}, replicas bit-identical in "
            f"{report['replicas_bit_identical_steps']}",
        ),
        (
            "parity",
            f"{_decimal(report['parity']['max_rel_loss_diff_vs_single_process'], '.1e')} largest "
            "relative loss difference to one process",
        ),
    ]
    for i in report["incidents"]:
        rows.append(
            (
                i["check"],
                _named(i) + ("; resolved" if i["resolved"] else "; still open"),
            )
        )
    for c in report["changes"]:
        rows.append(
            (
                c["reason"],
                f"{size(c['bytes_moved'])} moved, "
                f"{_over(c['bytes_moved'] - c['bytes_lower_bound'])} the least possible, "
                f"{'verified' if c['verified'] else 'not verified'}",
            )
        )
    hooks, probe, cost = report["webhooks"], report["probe"], report["sidecar"]
    rows += [
        ("webhooks", f"{hooks['delivered']} of {hooks['sent']} delivered"),
        (
            "probe",
            f"{probe['events']} records, {_decimal(probe['ns_per_event'], '.0f')} ns each, "
            f"{probe['events_lost']} lost",
        ),
        ("sidecar", f"{_percent(cost['cpu_ratio'])} of a core, {_size(cost['rss_bytes'])}"),
    ]
    return rows


def _named(incident: dict[str, Any]) -> str:
    if incident["detected_after_steps"] is None:
        return f"opened at step {incident['opened_step']}, no fault of the demo behind it"
    return (
        f"rank {incident['rank']} named {incident['detected_after_steps']} steps "
        f"({_seconds(incident['detected_after_s'])}) after the fault"
    )


def _decimal(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)


def _over(count: int) -> str:
    return f"{size(count)} more than" if count else "exactly"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _is_writable(path: Path) -> bool:
    folder = path.absolute().parent
    return folder.is_dir() and os.access(folder, os.W_OK) and not path.is_dir()


def _write(path: Path, report: dict[str, Any]) -> None:
    """All of it or nothing: a report that is there is one of a demo that came to its end."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(report, indent=2) + "\n")
    draft.replace(path)


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntp-sidecar demo",
        description="Train an uneven job on real text, hurt it twice, and watch it heal.",
        epilog="example: ntp-sidecar demo --json report.json --keep",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to a file")
    parser.add_argument("--keep", action="store_true", help="leave page and metrics up at the end")
    parser.add_argument("--quick", action="store_true", help="fewer quiet steps")
    parser.add_argument(
        "--port", type=int, help="port of the page (default 9440, or a free one if that is taken)"
    )
    return parser
