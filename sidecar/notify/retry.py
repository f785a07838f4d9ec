"""When to try again after a failed delivery. Pure; the random source is an argument."""

from __future__ import annotations

import math
import random
from datetime import UTC
from email.utils import parsedate_to_datetime

MINUTE_S, HOUR_S = 60.0, 3600.0

SCHEDULE_S = (
    0.0,
    5.0,
    30.0,
    5 * MINUTE_S,
    30 * MINUTE_S,
    2 * HOUR_S,
    5 * HOUR_S,
    10 * HOUR_S,
    14 * HOUR_S,
    20 * HOUR_S,
    24 * HOUR_S,
)
"""Wait before each attempt, the first included; about three days in all (Standard Webhooks,
"Deliverability and reliability", with one step more at the start)."""

MAX_RETRY_AFTER_S = 24 * HOUR_S
"""A longer Retry-After is cut to this."""

JITTER = 0.2
"""Waits grow by up to this part, so that many senders do not come back at once."""


def delay_s(
    failures: int,
    rng: random.Random,
    *,
    retry_after_s: float | None = None,
    schedule_s: tuple[float, ...] = SCHEDULE_S,
) -> float | None:
    """Seconds to wait after the given number of failed attempts; None when no attempt is left.

    Never less than the endpoint asked for.
    """
    if failures >= len(schedule_s):
        return None
    wait_s = schedule_s[failures] * (1 + JITTER * rng.random())
    return max(wait_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def retry_after_s(value: str | None, now_s: float) -> float | None:
    """Seconds asked for by a Retry-After header, a number or a date; None when it has neither.

    >>> retry_after_s("120", 0.0)
    120.0
    >>> retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 20.0)
    40.0
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _until_date(value, now_s)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until_date(value: str, now_s: float) -> float | None:
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, at.timestamp() - now_s)
