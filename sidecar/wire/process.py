"""Which process wrote a ring: a pid together with its start time, so that a reused pid is noticed.

Source: proc(5), /proc/<pid>/stat fields 3 (state) and 22 (start time in clock ticks since boot).
Where there is no /proc the start time is 0, "unknown", and the pid alone has to do.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")  # a zombie runs no code: for a watcher it is dead


def _stat_fields(pid: int, proc: Path) -> list[str]:
    """Fields 3 and later of /proc/<pid>/stat; empty when it cannot be read."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # field 2 is the command in parentheses and may itself hold spaces and parentheses
    return text.rpartition(")")[2].split()


def process_start_ticks(pid: int, proc: Path = PROC) -> int:
    """Start time of a process in clock ticks since boot; 0 when it is not known."""
    fields = _stat_fields(pid, proc)
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else 0


def is_running(pid: int, start_ticks: int, proc: Path = PROC) -> bool:
    """Whether this very process still runs; a zombie or another process with its pid does not.

    Args:
        pid: process id in this pid namespace.
        start_ticks: its start time as `process_start_ticks` gave it; 0 when not known.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, under another user
    except OverflowError:
        return False
    fields = _stat_fields(pid, proc)
    if len(fields) <= 19:
        return not proc.is_dir() or start_ticks == 0
    if fields[0] in _DEAD_STATES:
        return False
    return start_ticks in (0, int(fields[19]))
