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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One proposal that the job did not take. `reason` is "" where none is left (yet)."""

    proposal: Proposal
    reason: str


def refusals(run_dir: Path) -> Iterator[Refusal]:
    """All that lie in a run directory, at most `MAX_ASIDE`."""
    for number in range(MAX_ASIDE):
        mark = f".{number}" if number else ""
        path = (run_dir / FILE_NAME).with_suffix(f"{mark}.refused.json")
        try:
            text = read_regular(path, MAX_BYTES).decode()
            yield Refusal(proposal=Proposal.from_json(text), reason=_reason(path))
        except (OSError, UnicodeDecodeError, InvalidInput):
            continue


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
