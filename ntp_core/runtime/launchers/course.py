"""The course of a job's ranks as its launcher sees it: who has ended, who starts again, what it
all comes to. Knows no processes: what happened is told to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
FINISH_S = 60.0
"""How long ranks may go on once one has finished an elastic job: one that stands still would keep
the launcher for ever."""
LOST_WITH_NODE = 255
"""Status of a rank of which nobody saw the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a launcher does about ranks that die.

    Attributes:
        is_elastic: the job is well when any rank has ended well.
        respawns: how many times ranks are started again, all together.
    """

    is_elastic: bool = False
    respawns: int = 0


class Course:
    """Follows the ranks of one job.

    Args:
        tell: takes one line for each death.
        clock: seconds.

    Attributes:
        respawns_left: of `Rules.respawns`.
    """

    def __init__(
        self,
        num_ranks: int,
        rules: Rules,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.respawns_left = rules.respawns
        self._rules, self._tell, self._clock = rules, tell, clock
        self._codes: dict[int, int | None] = dict.fromkeys(range(num_ranks))
        self._deaths = dict.fromkeys(range(num_ranks), 0)
        self._due: dict[int, float] = {}
        self._finished_at: float | None = None

    def runs(self, rank: int) -> bool:
        """Whether it has not ended, as far as is known here."""
        return self._codes[rank] is None

    def ended(self, rank: int, code: int, how: str = "") -> None:
        """A rank has ended: its exit code, minus n for signal n; tells of it when it died.

        Args:
            how: in words, where the code does not tell.
        """
        self._codes[rank] = code
        if code == 0:
            self._finished_at = self._finished_at or self._clock()
            return
        self._deaths[rank] += 1
        running = sum(self.runs(r) for r in self._codes)
        line = f"rank {rank} {how or _end_of(code)}; {running} run"
        if self.respawns_left and running and not self._is_finished:
            rest_s = min(FIRST_REST_S * 2 ** (self._deaths[rank] - 1), LONGEST_REST_S)
            self.respawns_left -= 1
            self._due[rank] = self._clock() + rest_s
            number = self._rules.respawns - self.respawns_left
            line += f"; started again in {rest_s:g} s ({number} of {self._rules.respawns})"
        self._tell(line)

    def due(self) -> list[int]:
        """Ranks that are to be started now; each is named once."""
        if self._is_finished:
            self._due = {}
        now = self._clock()
        ranks = sorted(rank for rank, at in self._due.items() if at <= now)
        for rank in ranks:
            del self._due[rank]
        return ranks

    def started(self, rank: int) -> None:
        """A rank that was due runs."""
        self._codes[rank] = None

    def is_over(self) -> bool:
        """Whether nobody runs, or nobody need be waited for.

        A rank that waits to be started again does not keep a job: when all are dead, so is the
        state that it would have been given.
        """
        if not any(self.runs(r) for r in self._codes):
            return True
        finished_at = self._finished_at if self._is_finished else None
        return finished_at is not None and self._clock() - finished_at >= FINISH_S

    def status(self) -> int:
        """Exit status for the launcher: 0, or the first bad one by rank, as a shell says it."""
        if self._is_finished:
            return 0
        return next((c if c > 0 else 128 - c for c in self._codes.values() if c), 0)

    @property
    def _is_finished(self) -> bool:
        return self._rules.is_elastic and self._finished_at is not None


def _end_of(code: int) -> str:
    if code > 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"
