"""JSON for readers that are not Python: null for a number that is not finite, ASCII only.

Everything that leaves as JSON (API, event stream, report, files for other programs) goes through
`to_json`, so that no NaN and no broken text can turn an answer into an error.
"""

from __future__ import annotations

import json
import math


def finite_or_none(value: float | None) -> float | None:
    """The number, or None for NaN and the infinities: JSON has none of them.

    >>> finite_or_none(2.5), finite_or_none(float("nan"))
    (2.5, None)
    """
    return value if value is not None and math.isfinite(value) else None


def to_json(body: object) -> str:
    """Compact JSON of plain data; every number that is not finite becomes null.

    >>> to_json({"loss": [1.5, float("inf")]})
    '{"loss":[1.5,null]}'
    """
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False)
    except ValueError:  # rare, so only now is every number looked at
        return json.dumps(_finite(body), separators=(",", ":"), allow_nan=False)


def _finite(body: object) -> object:
    if isinstance(body, dict):
        return {key: _finite(value) for key, value in body.items()}
    if isinstance(body, list | tuple):
        return [_finite(value) for value in body]
    return finite_or_none(body) if isinstance(body, float) else body
