"""The span tree of a change: shape, times, bytes, ids."""

from __future__ import annotations

import pytest

from ntp_core.observe import ChangePhase, ChangeStatus
from sidecar.catalog import SPAN_PHASES
from sidecar.ingest.spans import (
    is_verified,
    phase_spans,
    root_span_id,
    span_id_of,
    span_tree,
    start_ns,
    stop_ns,
    trace_id_of,
)
from sidecar.ingest.state import Change, PhaseSpan
from tests.support import filled
from tests.support.filled import MS


def span(rank: int, phase: ChangePhase, begin_ms: int, end_ms: int, num_bytes: int = 0):
    base = filled.change().begin_ns
    return PhaseSpan(
        rank=rank,
        phase=phase,
        begin_ns=base + begin_ms * MS,
        end_ns=base + end_ms * MS,
        num_bytes=num_bytes,
    )


def change_of(*spans: PhaseSpan, driver: int = 0) -> Change:
    change = filled.change()
    change.spans, change.driver = list(spans), driver
    return change


def test_catalog_names_the_phases_in_the_order_of_the_engine() -> None:
    """The name of a phase is that of its enumeration."""
    assert [f"nutp.{p.name.lower()}" for p in ChangePhase] == list(SPAN_PHASES)


def test_tree_has_the_drivers_phases_and_a_child_for_each_transfer() -> None:
    """Top level by the driver's clock from the earliest phase on; bytes are those of all ranks."""
    tree = span_tree(filled.change())
    assert [n["name"] for n in tree] == list(SPAN_PHASES[:7])
    starts = [round(n["start_s"], 6) for n in tree]
    assert starts == [0.0, 0.05, 0.06, 0.11, 0.15, 0.35, 0.44]
    assert [round(n["seconds"], 6) for n in tree] == [0.05, 0.01, 0.05, 0.04, 0.2, 0.09, 0.01]
    transfer = tree[4]
    assert (transfer["bytes"], transfer["rank"]) == (1000, None)
    assert [(c["name"], c["rank"], c["bytes"]) for c in transfer["children"]] == [
        ("nutp.transfer.rank", 0, 600),
        ("nutp.transfer.rank", 1, 300),
        ("nutp.transfer.rank", 2, 100),
    ]
    assert [round(c["start_s"], 6) for c in transfer["children"]] == [0.15, 0.151, 0.152]
    assert not [n for n in tree if n is not transfer and n["children"]]


def test_phase_without_the_driver_lasts_as_long_as_on_any_rank() -> None:
    """The driver died before it could tell: the others' earliest begin and latest end count."""
    change = change_of(
        span(0, ChangePhase.QUIESCE, 0, 10),
        span(2, ChangePhase.TRANSFER, 30, 90, 5),
        span(1, ChangePhase.TRANSFER, 20, 50, 7),
    )
    quiesce, transfer = span_tree(change)
    assert quiesce["name"] == "nutp.quiesce"
    assert (transfer["start_s"], transfer["seconds"]) == (0.02, 0.07)
    assert transfer["bytes"] == 12
    assert [c["rank"] for c in transfer["children"]] == [1, 2]


def test_phase_run_twice_is_one_node_over_both() -> None:
    """A rank that transferred, and again for the rollback, has one span with all its bytes."""
    change = change_of(
        span(0, ChangePhase.TRANSFER, 0, 10, 5),
        span(0, ChangePhase.ROLLBACK, 10, 20),
        span(0, ChangePhase.TRANSFER, 12, 18, 5),
    )
    transfer, rollback = span_tree(change)
    assert (transfer["seconds"], transfer["children"][0]["bytes"]) == (0.018, 10)
    assert rollback["name"] == "nutp.rollback"


def test_change_without_phases_has_an_empty_tree_and_its_own_times() -> None:
    """Nothing is invented where nothing was reported."""
    change = change_of()
    assert span_tree(change) == []
    assert (start_ns(change), stop_ns(change)) == (change.begin_ns, change.end_ns)
    change.end_ns = None
    assert stop_ns(change) == change.begin_ns


def test_change_without_end_lasts_until_it_was_last_heard_of() -> None:
    """The newest phase bounds a change whose driver died."""
    change = filled.change(status=None)
    assert stop_ns(change) == max(s.end_ns for s in change.spans)
    assert start_ns(change) == change.begin_ns - 50 * MS


def test_span_whose_end_precedes_its_begin_has_no_negative_time() -> None:
    """A torn pair of times gives a span of no length."""
    (node,) = phase_spans(change_of(span(0, ChangePhase.VERIFY, 20, 10)))
    assert node.end_ns == node.begin_ns


@pytest.mark.parametrize("status", [None, *ChangeStatus])
def test_only_a_committed_change_is_verified(status) -> None:
    """Units compared before a rollback do not make the plan in force verified."""
    change = filled.change(status=status)
    assert is_verified(change) is (status is ChangeStatus.COMMITTED)
    change.units_verified = 0
    assert not is_verified(change)


def test_ids_are_stable_valid_and_distinct() -> None:
    """Ids depend on job, epoch and time only, and no two spans of a trace share one."""
    change, later, other = filled.change(), filled.change(), filled.change(epoch=3)
    later.begin_ns += 1
    trace_id = trace_id_of("j", change)
    assert trace_id == trace_id_of("j", filled.change(status=None))
    ids = {trace_id, trace_id_of("k", change), trace_id_of("j", later), trace_id_of("j", other)}
    assert len(ids) == 4
    assert all(len(i) == 32 and int(i, 16) for i in ids)
    spans = [root_span_id(trace_id)]
    spans += [span_id_of(trace_id, name) for name in SPAN_PHASES]
    spans += [span_id_of(trace_id, "nutp.transfer.rank", rank) for rank in range(512)]
    assert len(set(spans)) == len(spans)
    assert all(len(i) == 16 and int(i, 16) for i in spans)
