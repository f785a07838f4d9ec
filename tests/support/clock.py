"""A clock that moves only when told to."""

from __future__ import annotations

UNIX_OFFSET_NS = 1_760_000_000_000_000_000


class FakeClock:
    """Monotonic and unix time, both in nanoseconds, moving together."""

    def __init__(self, now_ns: int = 1_000_000_000_000) -> None:
        self.now_ns = now_ns

    @property
    def unix_ns(self) -> int:
        """Unix time of now."""
        return self.now_ns + UNIX_OFFSET_NS

    def advance(self, seconds: float) -> int:
        """Move on; returns the new monotonic time."""
        self.now_ns += round(seconds * 1e9)
        return self.now_ns
