"""How the demo tells its story: one line at a time, with a bar that shows that it is alive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

TIME_WIDTH = 6
LABEL_WIDTH = 11


class Teller:
    """Writes to a console. Times count from its making."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begin = time.monotonic()

    def line(self, label: str, text: str, style: str = "") -> None:
        """One line of the story, with the time and a label."""
        passed = int(time.monotonic() - self._begin)
        stamp = f"{passed // 60}:{passed % 60:02d}"
        self._row(Text(stamp, "dim"), Text(label, f"bold {style}".strip()), Text(text))

    def more(self, text: str) -> None:
        """A line that belongs to the one before."""
        self._row(Text(), Text(), Text(text, "dim"))

    @contextmanager
    def waiting(self, text: str, total: float | None = None) -> Iterator[Bar]:
        """A bar at the bottom while something is awaited; it leaves nothing behind.

        Where the output is no terminal there is no bar.
        """
        if not self.console.is_terminal:
            yield Bar(None, None)
            return
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="dim"),
            BarColumn(24),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            refresh_per_second=4,
        )
        with progress:
            yield Bar(progress, progress.add_task(text, total=total, note=""))

    def _row(self, stamp: Text, label: Text, text: Text) -> None:
        table = Table.grid(padding=0)
        table.add_column(width=TIME_WIDTH)
        table.add_column(width=LABEL_WIDTH + 1)
        table.add_column(overflow="fold")
        table.add_row(stamp, label, text)
        self.console.print(table)


class Bar:
    """The bar of `Teller.waiting`."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def show(self, done: float, note: str) -> None:
        """Move the bar and say what is going on."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)
