"""Which exposition format a scraper asks for (HTTP `Accept`, RFC 9110 section 12.5.1)."""

from __future__ import annotations

_OPENMETRICS = "application/openmetrics-text"
_TEXT = ("text/plain", "text/*", "*/*")


def wants_openmetrics(accept_header: str | None) -> bool:
    """Whether OpenMetrics 1.0 is accepted, and liked no less than the text format.

    >>> wants_openmetrics("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    True
    >>> wants_openmetrics("text/html,*/*;q=0.8")
    False
    """
    best = {True: 0.0, False: 0.0}
    for media_range in (accept_header or "").split(","):
        name, *parameters = (part.strip().lower() for part in media_range.split(";"))
        values = dict(p.split("=", 1) for p in parameters if "=" in p)
        # Version 0.0.1 was a draft; whoever asks only for it gets the text format.
        if name == _OPENMETRICS and values.get("version") != "0.0.1":
            best[True] = max(best[True], _quality(values.get("q", "1")))
        elif name in _TEXT:
            best[False] = max(best[False], _quality(values.get("q", "1")))
    return best[True] > 0 and best[True] >= best[False]


def _quality(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0
