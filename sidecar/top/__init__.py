"""`ntp-sidecar top`: the page in a terminal, from the same event stream."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.live import Live

from sidecar.top.follow import Seen, Unreachable, follow
from sidecar.top.frame import frame

__all__ = ["run_top"]


def run_top(url: str, *, once: bool, as_json: bool, token: str | None) -> int:
    """Show the job of a running sidecar until interrupted.

    Args:
        url: address of the sidecar, as `http://127.0.0.1:9440`.
        once: print one frame and return; also done when the output is no terminal.
        as_json: print the snapshot as JSON and return.
        token: sent as bearer token.

    Returns:
        Exit code: 0, or 2 with one line on stderr if the sidecar cannot be reached at the start.
    """
    news = follow(url, token)
    try:
        first = next(news)
        if as_json:
            json.dump(first.snapshot, sys.stdout, indent=2)
            sys.stdout.write("\n")
            return 0
        console = Console()
        if once or not console.is_terminal:
            console.print(frame(first, width=console.width, height=None))
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            _show(live, console, first)
            for seen in news:
                _show(live, console, seen)
    except Unreachable as error:
        sys.stderr.write(f"ntp-sidecar top: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _show(live: Live, console: Console, seen: Seen) -> None:
    live.update(frame(seen, width=console.width, height=console.height), refresh=True)
