"""How a rank learns its number, from whichever launcher."""

from __future__ import annotations

import pytest

from ntp_core.errors import InvalidInput
from ntp_core.runtime.launchers.place import Place

SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1"}
OWN = {"NTP_RANK": "3", "NTP_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size"),
    [
        ({}, 0, 1),
        (SLURM, 5, 8),
        (SLURM | TORCHRUN, 0, 1),
        (SLURM | TORCHRUN | OWN, 3, 4),
        (TORCHRUN | {"NTP_RANK": ""}, 0, 1),
        ({"NTP_RANK": "9", "NTP_WORLD_SIZE": "4"}, 9, 4),  # a newcomer
        ({"RANK": "007", "WORLD_SIZE": "1048576"}, 7, 1 << 20),
    ],
)
def test_place_the_nearest_name_counts(environ: dict[str, str], rank: int, world_size: int) -> None:
    """Ours, then torchrun's, then Slurm's; an empty variable is none."""
    place = Place.of(environ)
    assert (place.rank, place.world_size) == (rank, world_size)
    assert place.variables() == {"RANK": str(rank), "WORLD_SIZE": str(world_size)}


@pytest.mark.parametrize("text", ["x", "-1", "1.0", " 1", "1048576", "9" * 5000, "\u00b2", "0x1"])
@pytest.mark.parametrize("name", ["NTP_RANK", "RANK", "SLURM_PROCID"])
def test_place_bad_number_is_named(name: str, text: str) -> None:
    """The variable, its value and what to give, in one line."""
    with pytest.raises(InvalidInput, match=f"^{name}=.*: give a whole number from 0 to 1048575$"):
        Place.of({name: text})


def test_place_world_of_nobody_is_refused() -> None:
    """There is at least this rank."""
    with pytest.raises(InvalidInput, match=r"^WORLD_SIZE=.0.: give a whole number from 1 to"):
        Place.of({"RANK": "0", "WORLD_SIZE": "0"})
