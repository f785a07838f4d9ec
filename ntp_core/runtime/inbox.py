"""What reaches a running job from outside: a proposal, or the wish to stop.

The leader looks into the run directory once a step (one `lstat` each) and puts what it found into
the control word that all ranks share anyway. A proposal that does not fit is set aside with the
reason, counted, and the job goes on; whatever else lies under these names never raises and never
waits.
"""

from __future__ import annotations

from pathlib import Path

from ntp_core.errors import InvalidInput
from ntp_core.inbound.letter import Letter
from ntp_core.plan import Plan
from ntp_core.proposal import FILE_NAME, MAX_BYTES, Proposal, check_proposal
from ntp_core.runtime.comm import Comm
from ntp_core.units import ModelUnits

STOP = 1
PROPOSAL = 2
NEWCOMERS = 4
STOP_FILE = "stop"


class Inbox:
    """The job's side of the run directory; `folder` None hears nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._stop = None if folder is None else Letter(folder / STOP_FILE, 0)
        self._proposal = None if folder is None else Letter(folder / FILE_NAME, MAX_BYTES)
        self._unfit = 0
        self._unreadable = ""

    @property
    def refused(self) -> int:
        """Proposals that did not fit, and things under these names that are no files."""
        letters = [x for x in (self._stop, self._proposal) if x is not None]
        return self._unfit + sum(x.strange for x in letters)

    def control(self) -> int:
        """The control word of this step, on the leader."""
        if self._stop is None or self._proposal is None:
            return 0
        word = STOP if self._stop.is_there() else 0
        return word | (PROPOSAL if self._proposal.is_there() else 0)

    def take(
        self, control: int, comm: Comm, present: Plan, model: ModelUnits | None = None
    ) -> Proposal | None:
        """The proposal behind `control`, checked, or None. Every rank takes part."""
        if not control & PROPOSAL:
            return None
        text = comm.broadcast_bytes(self._read() if comm.is_leader else None, comm.world[0])
        try:
            proposal = Proposal.from_json(text.decode())
            check_proposal(proposal, present, model)
        except (InvalidInput, UnicodeDecodeError) as error:
            self._unfit += 1
            if self._proposal is not None and comm.is_leader:
                self._proposal.set_aside(self._unreadable or str(error))
            return None
        if self._proposal is not None and comm.is_leader:
            self._proposal.clear()
        return proposal

    def _read(self) -> bytes:
        self._unreadable = ""
        try:
            return b"" if self._proposal is None else self._proposal.read()
        except OSError as error:
            self._unreadable = str(error)
            return b""
