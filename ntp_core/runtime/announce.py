"""Tells the observer which plan is in force, with all it needs to read later records."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ntp_core.cost import Work
from ntp_core.observe import Observer
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits


def announce_plan(
    observer: Observer,
    plan: Plan,
    model: ModelUnits,
    work: Work,
    rank: int,
    speeds: Mapping[int, float],
) -> None:
    """One call for a plan in force on this rank; `speeds` are those the plan was made for."""
    shares = work.expected_shares(plan, speeds)
    body = {
        "plan": plan.to_json(),
        "model": model.to_json(),
        "work": work.to_json(),
    }
    observer.plan(plan.epoch, plan.digest, json.dumps(body, sort_keys=True), shares[rank])
