"""How the demo tells its story: one line at a time, with a bar that shows that it is alive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

LABEL_WIDTH = 10


class Teller:
    """Writes to a console. Times count from its making."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begin = time.monotonic()

    def line(self, label: str, text: str, style: str = "") -> None:
        """One line of the story, with the time and a label."""
        passed = int(time.monotonic() - self._begin)
        head = f"[dim]{passed // 60}:{passed % 60:02d}[/dim]  "
        name = f"[bold {style}]{label:<{LABEL_WIDTH}}[/]" if style else f"{label:<{LABEL_WIDTH}}"
        table = Table.grid(padding=0)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(head + name, _plain(text))
        self.console.print(table)

    def more(self, text: str) -> None:
        """A line that belongs to the one before."""
        self.line_without_time(text)

    def line_without_time(self, text: str) -> None:
        """An indented line."""
        table = Table.grid(padding=0)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(" " * (6 + LABEL_WIDTH), f"[dim]{_plain(text)}[/dim]")
        self.console.print(table)

    @contextmanager
    def waiting(self, text: str, total: float | None = None) -> Iterator[Bar]:
        """A bar at the bottom while something is awaited; it vanishes afterwards."""
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            refresh_per_second=4,
        ) as progress:
            task = progress.add_task(_plain(text), total=total, note="")
            yield Bar(progress, task)


class Bar:
    """The bar of `Teller.waiting`."""

    def __init__(self, progress: Progress, task: object) -> None:
        self._progress = progress
        self._task = task

    def show(self, done: float, note: str) -> None:
        """Move the bar and say what is going on."""
        self._progress.update(self._task, completed=done, note=_plain(note))  # type: ignore[arg-type]


def _plain(text: str) -> str:
    """Text that rich must not take for markup."""
    return text.replace("[", r"\[")
