"""What the job refused: proposals that it set aside in its run directory, each with its reason.

Written by `ntp_core.inbound.letter`: `proposal.refused.json`, `proposal.1.refused.json`, ... and a
`.txt` beside each. All of it may come from somebody else: sizes are bounded, nothing waits, and
what is no proposal is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ntp_core.errors import InvalidInput
from ntp_core.inbound.letter import MAX_ASIDE, MAX_REASON_CHARS
from ntp_core.inbound.regular_file import read_regular
from ntp_core.proposal import FILE_NAME, MAX_BYTES, Proposal

SHOWN_CHARS = 300
"""Of a reason, in one line; the file has all of it."""


LOOK_NS = 1_000_000_000
_File = tuple[str, int, int]  # name, inode, time of writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One proposal that the job did not take. `reason` is "" where none is left (yet)."""

    proposal: Proposal
    reason: str


def refusals(run_dir: Path) -> Iterator[Refusal]:
    """All that lie in a run directory, at most `MAX_ASIDE`."""
    for number in range(MAX_ASIDE):
        path = _aside(run_dir, number)
        try:
            text = read_regular(path, MAX_BYTES).decode()
            yield Refusal(proposal=Proposal.from_json(text), reason=_reason(path))
        except (OSError, UnicodeDecodeError, InvalidInput):
            continue


@dataclass(slots=True)
class RefusedCount:
    """How much the job has set aside, whatever it was and whoever left it. Looks once a second: of
    several under one name within it the last counts.

    Attributes:
        count: what has been seen.
        newest: the reason of the newest; "" before any, or without one.
    """

    run_dir: Path
    count: int = 0
    newest: str = ""
    _seen: frozenset[_File] = frozenset()
    _next_ns: int = 0

    def look(self, now_ns: int) -> None:
        """Count what is new."""
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + LOOK_NS
        found = {}
        for number in range(MAX_ASIDE):
            path = _aside(self.run_dir, number)
            try:
                info = path.lstat()
            except OSError:
                continue
            found[path.name, info.st_ino, info.st_mtime_ns] = path, info.st_ctime_ns
        fresh = [found[f] for f in found.keys() - self._seen]
        if fresh:
            self.count += len(fresh)
            self.newest = _reason(max(fresh, key=lambda f: f[1])[0])
        self._seen = frozenset(found)


def _aside(run_dir: Path, number: int) -> Path:
    mark = f".{number}" if number else ""
    return (run_dir / FILE_NAME).with_suffix(f"{mark}.refused.json")


def _reason(path: Path) -> str:
    """The reason beside a refused file, in one line that can be shown."""
    beside = path.with_suffix(".txt")
    try:
        # The file gets its name before its reason: an older text may be of an older proposal.
        if beside.lstat().st_mtime_ns < path.lstat().st_ctime_ns:
            return ""
        raw = read_regular(beside, 4 * MAX_REASON_CHARS + 1)
    except OSError:
        return ""
    text = " ".join(raw.decode("utf-8", "replace").split())
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]} ..."
