"""Proposals as files: read back equal, refused when they do not fit, never a surprise."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.errors import InvalidInput, StaleEpoch
from ntp_core.observe import Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.proposal import MAX_BYTES, Proposal, check_proposal
from tests.support.random_plans import A, M, random_model, random_plan

PLAN = Plan.build(
    {A: 4},
    [ReplicaPlan(ranks=(0, 1), layouts={A: Layout.contiguous((2, 2))}, batch=3)],
    epoch=5,
)
NEW = Plan.build(
    {A: 4},
    [ReplicaPlan(ranks=(0, 1), layouts={A: Layout.contiguous((3, 1))}, batch=3)],
    epoch=6,
)
GOOD = Proposal(
    base_digest=PLAN.digest,
    plan=NEW,
    reason=Reason.RANK_SLOW,
    incident="inc-1",
    detected_unix_ns=10,
    decided_unix_ns=20,
    promised_step_s=0.5,
    ideal_step_s=0.4,
    speeds={0: 1.0, 1: 0.5},
)
FIELDS = tuple(json.loads(GOOD.to_json()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def test_proposal_round_trip() -> None:
    """What was written is read back equal, for the full form and for random plans."""
    assert Proposal.from_json(GOOD.to_json()) == GOOD
    for seed in range(20):
        draw = random.Random(seed)
        proposal = Proposal(
            base_digest="x", plan=random_plan(draw, random_model(draw)), reason=Reason.OPERATOR
        )
        assert proposal == Proposal.from_json(proposal.to_json())


def test_proposal_that_fits_is_accepted() -> None:
    """The good one, with and without speeds."""
    check_proposal(GOOD, PLAN)
    check_proposal(replace(GOOD, speeds={}), PLAN)


@pytest.mark.parametrize(
    "present",
    [PLAN.with_epoch(4), PLAN.with_epoch(6), NEW.with_epoch(5)],
    ids=["epoch before", "epoch after", "other content"],
)
def test_proposal_for_another_plan_is_stale(present: Plan) -> None:
    """Epoch and digest must both be those in force; both sides are named."""
    with pytest.raises(StaleEpoch, match=f"in force is epoch {present.epoch}"):
        check_proposal(GOOD, present)


def test_proposal_for_other_ranks_units_or_batch_is_refused() -> None:
    """A change may deal the same things anew, not bring in or lose any."""
    one = NEW.replicas[0]
    other_ranks = replace(one, ranks=(0, 2))
    more_units = replace(one, layouts={A: Layout.contiguous((3, 2))})
    more_kinds = replace(one, layouts=one.layouts | {M: Layout.contiguous((1, 1))})
    cases = {
        "names ranks": Plan.build({A: 4}, [other_ranks], epoch=6),
        "counts units": Plan.build({A: 5}, [more_units], epoch=6),
        "the job ": Plan.build({A: 4, M: 2}, [more_kinds], epoch=6),
        "global batch from 3 to 4": Plan.build({A: 4}, [replace(one, batch=4)], epoch=6),
    }
    for message, plan in cases.items():
        with pytest.raises(InvalidInput, match=message):
            check_proposal(replace(GOOD, plan=plan), PLAN)


@pytest.mark.parametrize(
    "speeds",
    [{0: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 0.0}, {0: 1.0, 1: -1.0}]
    + [{0: 1.0, 1: float(x)} for x in ("nan", "inf")],
)
def test_proposal_with_speeds_that_cannot_be_is_refused(speeds: dict[int, float]) -> None:
    """One positive finite speed for each rank, or none at all."""
    with pytest.raises(InvalidInput, match="speed"):
        check_proposal(replace(GOOD, speeds=speeds), PLAN)


@pytest.mark.parametrize(
    "text",
    ["", "null", "3", "[]", "{}", "[" * 100_000, '{"a":' * 100_000, GOOD.to_json()[:-20]],
    ids=lambda text: text[:10],
)
def test_proposal_from_other_text_is_refused(text: str) -> None:
    """Half a file, no object, or a tower of brackets."""
    with pytest.raises(InvalidInput, match="not a proposal"):
        Proposal.from_json(text)


def test_proposal_too_large_is_refused_before_it_is_read() -> None:
    """The bound is on the text, whatever is in it."""
    with pytest.raises(InvalidInput, match="at most"):
        Proposal.from_json(" " * (MAX_BYTES + 1))


def test_proposal_incident_is_cut() -> None:
    """An incident's name has a bound of its own."""
    proposal = replace(GOOD, incident="x" * 1000)
    assert len(Proposal.from_json(proposal.to_json()).incident) == 128


@given(field=st.sampled_from(FIELDS), value=JSON)
@settings(deadline=None)
def test_proposal_any_value_in_any_field_is_refused_or_checked(field: str, value: Any) -> None:
    """Hostile JSON gives InvalidInput, or a proposal that can be checked: nothing else."""
    body = json.loads(GOOD.to_json())
    body[field] = value
    try:
        check_proposal(Proposal.from_json(json.dumps(body)), PLAN)
    except InvalidInput:
        return
