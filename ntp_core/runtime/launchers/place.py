"""Which rank of how many this process is, whoever started it.

NTP_RANK, NTP_WORLD_SIZE   set by hand; they override all others: one torchrun agent per rank tells
                           each that it is rank 0 of 1
RANK, WORLD_SIZE           set by torchrun and by our launchers
SLURM_PROCID, SLURM_NTASKS set by srun
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ntp_core.errors import InvalidInput
from ntp_core.job import MAX_RANKS

RANK_NAMES = ("NTP_RANK", "RANK", "SLURM_PROCID")
WORLD_SIZE_NAMES = ("NTP_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS")
OWN_NAMES = ("NTP_RANK", "NTP_WORLD_SIZE", "NTP_STORE")
"""They would override the place and the store that a launcher gives; an outer one may have set
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's number, and how many ranks the job was started with.

    The number may lie beyond: a newcomer to an elastic job takes one that is free.
    """

    rank: int
    world_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """The place that the environment names; rank 0 of 1 when it names none.

        Raises:
            InvalidInput: a variable that is not a number, or too small or too large.
        """
        return cls(
            rank=_first(environ, RANK_NAMES, 0, MAX_RANKS - 1, default=0),
            world_size=_first(environ, WORLD_SIZE_NAMES, 1, MAX_RANKS, default=1),
        )

    def variables(self) -> dict[str, str]:
        """The same place under the names that every library looks for."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}


def _first(
    environ: Mapping[str, str], names: Sequence[str], least: int, most: int, *, default: int
) -> int:
    for name in names:
        text = environ.get(name, "")
        if not text:
            continue
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise InvalidInput(f"{name}={text!r}: give a whole number from {least} to {most}")
        return int(text)
    return default
