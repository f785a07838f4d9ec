"""Did it all happen? Reads the report only, as anybody else could."""

from __future__ import annotations

from typing import Any

from sidecar.demo.scenario import Scenario

MAX_PARITY = 2e-4
"""Adam amplifies fp32 rounding: over some 75 steps two *even* splits of this job differ from one
process by 1e-5 to 2e-5. A gradient that is wrong in one place differs by 1e-2."""


def missing(report: dict[str, Any], scenario: Scenario) -> list[str]:
    """What should have happened and did not, one line each; empty when all of it did."""
    slow = _incident(report, "slow_rank")
    flipped = _incident(report, "replica_divergence")
    moved = _change(report, "rank_slow")
    repaired = _change(report, "repair")
    parity = report["parity"]["max_rel_loss_diff_vs_single_process"]
    checks = {
        f"{scenario.num_ranks} ranks in {len(scenario.degrees)} replicas trained": (
            report["ranks"] == scenario.num_ranks
            and [r["tp_degree"] for r in report["replicas"]] == list(scenario.degrees)
        ),
        "the loss fell": _fell(report["loss"]),
        "the slow rank was named within 5 steps": (
            slow.get("rank") == scenario.slow_rank and _within(slow, 5)
        ),
        "the slow rank's incident resolved": slow.get("resolved") is True,
        "new shares were verified and moved no byte too many": _exact(moved),
        "a step became faster": (moved.get("step_time_after_s") or 9e9)
        < (moved.get("step_time_before_s") or 0.0),
        "the flipped bit was named by replica, rank and tensor at the next check": (
            flipped.get("rank") == scenario.flip.rank
            and flipped.get("replica") == 1
            and flipped.get("tensor") == scenario.flip.tensor
            and _within(flipped, 1)
        ),
        "the divergence resolved": flipped.get("resolved") is True,
        "the repair was verified and moved no byte too many": _exact(repaired),
        "every webhook arrived with a right signature": (
            report["webhooks"]["signature_verified"] is True
            and report["webhooks"]["sent"] == report["webhooks"]["delivered"] > 0
        ),
        f"the loss is that of one process (within {MAX_PARITY:g})": (
            parity is not None and parity <= MAX_PARITY
        ),
        "no record was lost": report["probe"]["events_lost"] == 0,
    }
    return [text for text, happened in checks.items() if not happened]


def _fell(loss: dict[str, float | None]) -> bool:
    first, last = loss["first"], loss["last"]
    return first is not None and last is not None and last < first


def _incident(report: dict[str, Any], check: str) -> dict[str, Any]:
    return next((i for i in report["incidents"] if i["check"] == check), {})


def _change(report: dict[str, Any], reason: str) -> dict[str, Any]:
    return next((c for c in report["changes"] if c["reason"] == reason), {})


def _within(incident: dict[str, Any], steps: int) -> bool:
    after = incident.get("detected_after_steps")
    return after is not None and after <= steps


def _exact(change: dict[str, Any]) -> bool:
    return bool(change.get("verified")) and change["bytes_moved"] == change["bytes_lower_bound"] > 0
