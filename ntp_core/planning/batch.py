"""Shares of the global batch over replicas, from measured step times.

Proportional is not equal in time: a reduced replica of an NVIDIA trace got the same tokens per GPU
and was late, because kernels of half the size take more than half the time. So a replica's time is
a line fitted to what was measured (fixed part and seconds per sequence), and the shares are the
exact min-max over these lines. The batch may be counted in sequences or in tokens.

Gradients are weighted by tokens, never by replicas: `gradient_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ntp_core.errors import InvalidInput, PlanError
from ntp_core.planner import CompletionTime, RankCost, min_max_shares


def batch_shares(
    global_batch: int,
    replicas: Sequence[CompletionTime],
    present: Sequence[int] | None = None,
    granule: int = 1,
) -> tuple[int, ...]:
    """How much of the global batch each replica takes; the sum stays, each takes some.

    Args:
        global_batch: sequences, or tokens.
        replicas: time of each replica over its granules.
        present: shares now; ties keep them.
        granule: smallest part that moves, e.g. 256 tokens; the last granule may be short, and
            stays with the replica that has the most.

    Raises:
        PlanError: when there is less than one granule for each replica.
    """
    if granule < 1:
        raise InvalidInput(f"granule = {granule}; give at least 1")
    granules = -(-global_batch // granule)
    if granules < len(replicas):
        raise PlanError(
            f"a global batch of {global_batch} in parts of {granule} is too small for "
            f"{len(replicas)} replicas; raise the batch, lower the granule or use fewer replicas"
        )
    have = None if present is None else [n // granule for n in present]
    shares = [n * granule for n in min_max_shares(granules, replicas, have, least=1)]
    shares[shares.index(max(shares))] -= granules * granule - global_batch
    return tuple(shares)


def fit_batch_cost(measured: Sequence[tuple[int, float]], granule: int = 1) -> RankCost:
    """A replica's step time as a line over its batch: least squares, both parts >= 0.

    With steps of one batch size only, the time is taken as proportional to it.

    Args:
        measured: (batch share, step time in seconds) of some steps, at least one, all > 0.
        granule: the returned cost counts in parts of this size.
    """
    if not measured or any(n <= 0 or not t > 0 for n, t in measured):
        raise InvalidInput(f"batch times {list(measured)!r}; give pairs of batch > 0 and time > 0")
    mean_n = sum(n for n, _ in measured) / len(measured)
    mean_s = sum(t for _, t in measured) / len(measured)
    spread = sum((n - mean_n) ** 2 for n, _ in measured)
    through_zero = sum(n * t for n, t in measured) / sum(n * n for n, _ in measured)
    slope = sum((n - mean_n) * (t - mean_s) for n, t in measured) / spread if spread else 0.0
    start_s = mean_s - slope * mean_n
    if slope <= 0 or start_s < 0:  # one size only, or noise above the trend
        slope, start_s = through_zero, 0.0
    return RankCost(unit_s=slope * granule, start_s=start_s)


def gradient_weights(tokens: Sequence[int]) -> tuple[float, ...]:
    """Weight of each replica's mean-loss gradient: its tokens over all tokens.

    Equal to the gradient of the loss summed over all tokens and divided by their number, for any
    batch shares.
    """
    total = sum(tokens)
    if total <= 0 or min(tokens) < 0:
        raise InvalidInput(f"tokens per replica {list(tokens)}; give counts >= 0, one of them > 0")
    return tuple(n / total for n in tokens)
