"""How slow each rank is for the share the plan gives it.

Uneven shares must never look like a slow rank, nor hide one. So a rank's own busy time is divided
by the share of time that the plan expects of it before ranks are compared. Own time is not step
time, in which it may wait for others, nor what it waited for a processor of its host. The check for
slow ranks, the exporter and the page all take the number from here.
"""

from __future__ import annotations

import math
from statistics import fmean, median, median_low

from sidecar.ingest.state import JobState, RankState

MIN_SHARE_OF_MEAN = 0.01
"""Below this fraction of the mean share fixed costs dominate, and the ratio says nothing."""


def slowness(job: JobState, window: int = 5) -> dict[int, float]:
    """Busy time per unit of work of each rank, over that of its peers; 1 is normal.

    Each rank stands for itself with the median of its newest `window` steps, so that one odd step
    names nobody. The norm is the lower median over ranks: with an even number of ranks the middle
    lies on a measured, faster rank, and one slow rank of two is still seen.

    Args:
        job: the state; only steps of a rank's present epoch count, as older ones had other shares.
        window: number of newest steps of each rank.

    Returns:
        rank -> ratio. Ranks that are dead or have no place in the plan, whose share is unknown,
        zero or below `MIN_SHARE_OF_MEAN` of the mean, or that have no step in their epoch are left
        out.
    """
    costs = {r.rank: c for r in _comparable(job) if (c := _cost_ns(r, window)) is not None}
    norm = median_low(costs.values()) if costs else 0.0
    if norm <= 0:
        return {}
    return {rank: cost / norm for rank, cost in costs.items()}


def _comparable(job: JobState) -> list[RankState]:
    """Living ranks with a share large enough to judge."""
    living = [r for r in job.members if r.alive is not False and _is_known(r.work)]
    if not living:
        return []
    floor = MIN_SHARE_OF_MEAN * fmean(r.work or 0.0 for r in living)
    return [r for r in living if r.work is not None and r.work > 0 and r.work >= floor]


def _is_known(share: float | None) -> bool:
    return share is not None and math.isfinite(share)


def _cost_ns(rank: RankState, window: int) -> float | None:
    """Median busy time per unit of work over the newest steps of the present epoch."""
    costs: list[float] = []
    for sample in reversed(rank.steps):
        if sample.epoch != rank.epoch or len(costs) == window:
            break
        if sample.work and _is_known(sample.work):
            costs.append(sample.own_ns / sample.work)
    return median(costs) if costs else None
