"""An allocation change as a tree of spans: pure functions of `Change`.

The trace exporter, the page and the API all take the tree from here, so that they agree. Ids are
derived from the change, not drawn: whoever first sees a change knows its trace id and the id of
every span before anything is exported, and seeing it twice gives the same trace.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypedDict

from ntp_core.observe import ChangePhase, ChangeStatus
from sidecar.catalog import SPAN_CHANGE, SPAN_PHASES, SPAN_RANK_TRANSFER
from sidecar.ingest.state import Change, PhaseSpan


class SpanDict(TypedDict):
    """One span as in docs/api.md; `start_s` counts from the start of the change."""

    name: str
    rank: int | None
    start_s: float
    seconds: float
    bytes: int
    children: list[SpanDict]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNode:
    """One span in monotonic time. `num_bytes` were received in it, by `rank` or by all ranks."""

    name: str
    begin_ns: int
    end_ns: int
    num_bytes: int
    rank: int | None = None
    children: tuple[SpanNode, ...] = ()


def trace_id_of(job_id: str, change: Change) -> str:
    """Trace id of a change, 32 hex digits, uniform over changes and the same whenever it is asked.

    The time of the begin is part of it: a job that starts again under the same name counts its
    epochs from 1 again.
    """
    return _hex_digest(32, "trace", job_id, change.epoch, change.begin_ns)


def span_id_of(trace_id: str, name: str, rank: int | None = None) -> str:
    """Id of one span of a trace, 16 hex digits."""
    return _hex_digest(16, "span", trace_id, name, "" if rank is None else rank)


def root_span_id(trace_id: str) -> str:
    """Id of the span of the whole change: the one that exemplars point to."""
    return span_id_of(trace_id, SPAN_CHANGE)


def _hex_digest(digits: int, *parts: object) -> str:
    text = "\x00".join(str(p) for p in parts)
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:digits]
    return digest if int(digest, 16) else digest[:-1] + "1"  # all zero means "no id"


def start_ns(change: Change) -> int:
    """When the change started: detecting and deciding come before its own begin."""
    return min([change.begin_ns, *(s.begin_ns for s in change.spans)])


def stop_ns(change: Change) -> int:
    """When it ended; for a change without end, when it was last heard of."""
    known = [s.end_ns for s in change.spans]
    known.append(change.end_ns if change.end_ns is not None else change.begin_ns)
    return max(known)


def is_verified(change: Change) -> bool:
    """Whether the change is in force and its units were compared before and after."""
    return change.status is ChangeStatus.COMMITTED and change.units_verified > 0


def phase_spans(change: Change) -> tuple[SpanNode, ...]:
    """The phases of a change in the order in which they began, transfers with a child per rank."""
    by_phase: dict[ChangePhase, list[PhaseSpan]] = {}
    for span in change.spans:
        by_phase.setdefault(span.phase, []).append(span)
    nodes = [_phase_node(phase, spans, change.driver) for phase, spans in by_phase.items()]
    return tuple(sorted(nodes, key=lambda n: (n.begin_ns, SPAN_PHASES.index(n.name))))


def _phase_node(phase: ChangePhase, spans: list[PhaseSpan], driver: int) -> SpanNode:
    # The driver's clock cuts the change into phases that follow each other. Where it has none
    # (it died, or its record was lost) the phase lasts as long as on any rank.
    timed = [s for s in spans if s.rank == driver] or spans
    begin_ns, end_ns = _extent(timed)
    return SpanNode(
        name=SPAN_PHASES[phase - 1],
        begin_ns=begin_ns,
        end_ns=end_ns,
        num_bytes=sum(s.num_bytes for s in spans),
        children=_rank_nodes(spans) if phase is ChangePhase.TRANSFER else (),
    )


def _rank_nodes(spans: list[PhaseSpan]) -> tuple[SpanNode, ...]:
    """One node a rank; a rank that transferred twice has one node over both."""
    nodes = []
    for rank in sorted({s.rank for s in spans}):
        own = [s for s in spans if s.rank == rank]
        begin_ns, end_ns = _extent(own)
        nodes.append(
            SpanNode(
                name=SPAN_RANK_TRANSFER,
                rank=rank,
                begin_ns=begin_ns,
                end_ns=end_ns,
                num_bytes=sum(s.num_bytes for s in own),
            )
        )
    return tuple(nodes)


def _extent(spans: list[PhaseSpan]) -> tuple[int, int]:
    begin_ns = min(s.begin_ns for s in spans)
    return begin_ns, max(begin_ns, *(s.end_ns for s in spans))


def span_tree(change: Change) -> list[SpanDict]:
    """The tree as plain nested dicts, as `spans` in docs/api.md."""
    origin_ns = start_ns(change)
    return [_as_dict(node, origin_ns) for node in phase_spans(change)]


def _as_dict(node: SpanNode, origin_ns: int) -> SpanDict:
    return {
        "name": node.name,
        "rank": node.rank,
        "start_s": (node.begin_ns - origin_ns) / 1e9,
        "seconds": (node.end_ns - node.begin_ns) / 1e9,
        "bytes": node.num_bytes,
        "children": [_as_dict(child, origin_ns) for child in node.children],
    }
