"""The checks that run, in the order of the catalog. A new check is listed here and there."""

from __future__ import annotations

from sidecar.checks.dead_rank import DeadRank
from sidecar.checks.finding import Check
from sidecar.checks.no_progress import NoProgress, ProgressLimits
from sidecar.checks.replica_divergence import ReplicaDivergence
from sidecar.checks.slow_rank import SlowRank, SlowRankLimits


def build_checks(
    slow_rank: SlowRankLimits | None = None, progress: ProgressLimits | None = None
) -> tuple[Check, ...]:
    """All checks, fresh, with the given limits."""
    return (
        SlowRank(slow_rank or SlowRankLimits()),
        NoProgress(progress or ProgressLimits()),
        ReplicaDivergence(),
        DeadRank(),
    )
