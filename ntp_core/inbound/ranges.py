"""Checks of single values that come from outside; each refusal names field, value and remedy.

A bool is no number here, a float no whole number, and text neither: JSON keeps them apart.
"""

from __future__ import annotations

import math
import reprlib

from ntp_core.errors import InvalidInput

Refusal = type[InvalidInput]


def check_whole(
    name: str, value: object, least: int, most: int, refusal: Refusal = InvalidInput
) -> int:
    """The value if it is a whole number in [least, most].

    >>> check_whole("steps", 4, 0, 10)
    4
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refusal(f"{name} = {_shown(value)}; give a whole number from {least} to {most}")
    return value


def check_number(
    name: str,
    value: object,
    least: float,
    most: float,
    *,
    above: bool = False,
    below: bool = False,
    refusal: Refusal = InvalidInput,
) -> float:
    """The value if it is a finite number in [least, most].

    Args:
        above, below: leave out `least`, `most` itself.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or not math.isfinite(value)
        or (above and value == least)
        or (below and value == most)
    ):
        low = f"above {least:g}" if above else f"from {least:g}"
        high = f"below {most:g}" if below else f"to {most:g}"
        raise refusal(f"{name} = {_shown(value)}; give a finite number {low} {high}")
    return value


def check_flag(name: str, value: object, refusal: Refusal = InvalidInput) -> bool:
    """The value if it is true or false."""
    if not isinstance(value, bool):
        raise refusal(f"{name} = {_shown(value)}; give true or false")
    return value


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an int with more digits than Python writes out
        return "a number of too many digits"
