"""What reaches a running job from outside: a proposal, or the wish to stop.

Rank 0 looks into the run directory once a step (one `stat` each) and puts what it found into the
control word that all ranks share anyway. A proposal that does not fit is set aside with the reason,
counted, and the job goes on.
"""

from __future__ import annotations

from pathlib import Path

from ntp_core.errors import InvalidInput
from ntp_core.plan import Plan
from ntp_core.proposal import FILE_NAME, MAX_BYTES, Proposal, check_proposal
from ntp_core.runtime.comm import Comm

STOP = 1
PROPOSAL = 2
STOP_FILE = "stop"
MAX_REASON_CHARS = 2000


class Inbox:
    """The job's side of the run directory; `folder` None hears nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder = folder if rank == 0 else None
        self.refused = 0

    def control(self) -> int:
        """The control word of this step (rank 0)."""
        if self._folder is None:
            return 0
        word = STOP if (self._folder / STOP_FILE).exists() else 0
        return word | (PROPOSAL if (self._folder / FILE_NAME).exists() else 0)

    def take(self, control: int, comm: Comm, present: Plan) -> Proposal | None:
        """The proposal behind `control`, checked, or None. Every rank takes part."""
        if not control & PROPOSAL:
            return None
        text = comm.broadcast_bytes(self._read() if comm.rank == 0 else None, 0)
        try:
            proposal = Proposal.from_json(text.decode())
            check_proposal(proposal, present)
        except (InvalidInput, UnicodeDecodeError) as error:
            self._set_aside(str(error))
            return None
        if self._folder is not None:
            (self._folder / FILE_NAME).unlink(missing_ok=True)
        return proposal

    def _read(self) -> bytes:
        if self._folder is None:
            return b""
        try:
            with (self._folder / FILE_NAME).open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except OSError:
            return b""

    def _set_aside(self, why: str) -> None:
        self.refused += 1
        if self._folder is None:
            return
        path = self._folder / FILE_NAME
        try:
            path.replace(path.with_suffix(".refused.json"))
            # Parts of a hostile file may be in the reason: of any length, of any characters.
            reason = why[:MAX_REASON_CHARS] + "\n"
            path.with_suffix(".refused.txt").write_text(reason, "utf-8", "backslashreplace")
        except OSError:
            path.unlink(missing_ok=True)
