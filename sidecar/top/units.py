"""Numbers with units, and bars of characters. Unknown is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"
_SPARKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def duration(seconds: float | None) -> str:
    """Three significant digits.

    >>> duration(0.41), duration(12.3), duration(125), duration(None)
    ('410 ms', '12.3 s', '2 min 5 s', '-')
    """
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0 ms"
    if seconds < 0.0009995:
        return f"{_digits(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_digits(seconds)} s"
    return age(seconds)


def age(seconds: float | None) -> str:
    """Whole units, the two largest.

    >>> age(0.3), age(65), age(7300)
    ('<1 s', '1 min 5 s', '2 h 1 min')
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return "<1 s"
    whole = round(seconds)
    sizes = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    first = next(i for i, (size, _) in enumerate(sizes) if whole >= size)
    texts = []
    for size, unit in sizes[first : first + 2]:
        count, whole = divmod(whole, size)
        if count:
            texts.append(f"{count} {unit}")
    return " ".join(texts)


def size(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> size(2253619), size(12)
    ('2.15 MiB', '12 B')
    """
    index = 0
    while num_bytes >= 1024 and index < len(_BYTES) - 1:
        num_bytes /= 1024
        index += 1
    return f"{_digits(num_bytes) if index else int(num_bytes)} {_BYTES[index]}"


def number(value: float | None, places: int = 3) -> str:
    """A loss or a count.

    >>> number(2.4272), number(41, 0)
    ('2.427', '41')
    """
    return UNKNOWN if value is None else f"{value:,.{places}f}"


def _digits(value: float) -> str:
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def bar(part: float, width: int) -> str:
    """A bar of `part` (0 to 1) of `width` characters, exact to an eighth of one.

    >>> bar(0.5, 4), bar(0.01, 4)
    ('██  ', '▏   ')
    """
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    if part > 0:
        eighths = max(1, eighths)  # little is not nothing
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, from 0 to their maximum.

    >>> sparkline([1, 2, 8, 4], 3)
    '▂█▄'
    """
    shown = values[-width:] if width > 0 else []
    top = max(shown, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(shown)
    return "".join(_SPARKS[max(0, min(7, round(8 * v / top) - 1))] for v in shown)
