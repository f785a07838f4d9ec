"""Series of one rank, as pure functions of its state. What is unknown gives no series."""

from __future__ import annotations

from enum import IntEnum

from ntp_core.observe import Op, Phase
from sidecar.export.continuity import Counter
from sidecar.export.families import Series
from sidecar.ingest.state import RankState


def rank_gauges(job: str, rank: RankState, slow: float | None, now_ns: int) -> list[Series]:
    """Gauges and the info of one rank. `slow` is its slowness, None where that is not known."""
    labels = (job, str(rank.rank))
    values: dict[str, float | None] = {
        "nutp_rank_up": None if rank.alive is None else float(rank.alive),
        "nutp_rank_progress_age_seconds": _age_s(rank.last_progress_ns, now_ns),
        "nutp_rank_slowness_ratio": slow,
        "nutp_rank_share_ratio": rank.work,
        "nutp_probe_event_seconds": _cost_s(rank),
    }
    series: list[Series] = [(n, labels, v) for n, v in values.items() if v is not None]
    if rank.replica is not None and rank.tp_rank is not None:
        series.append(("nutp_rank", (*labels, str(rank.replica), str(rank.tp_rank)), 1.0))
    return series


def rank_counters(rank: RankState) -> dict[Counter, float]:
    """Counters of the rank's present process."""
    counters: dict[Counter, float] = {
        ("nutp_rank_steps", ()): rank.steps_total,
        ("nutp_rank_busy_seconds", ()): rank.busy_ns_total / 1e9,
        ("nutp_rank_wait_seconds", ()): max(0, rank.step_ns_total - rank.busy_ns_total) / 1e9,
        ("nutp_rank_gc_pause_seconds", ()): rank.gc_ns_total / 1e9,
        ("nutp_probe_events", ()): rank.events_total,
        ("nutp_probe_events_lost", ()): rank.events_lost,
    }
    for phase, duration_ns in rank.phase_ns_total.items():
        _count(counters, "nutp_rank_phase_seconds", _word(Phase, phase), duration_ns / 1e9)
    for op, totals in rank.ops.items():
        word = _word(Op, op)
        _count(counters, "nutp_collectives", word, totals.count)
        _count(counters, "nutp_collective_bytes", word, totals.num_bytes)
        _count(counters, "nutp_collective_seconds", word, totals.duration_ns / 1e9)
    return counters


def _age_s(seen_ns: int, now_ns: int) -> float | None:
    return max(0, now_ns - seen_ns) / 1e9 if seen_ns else None


def _cost_s(rank: RankState) -> float | None:
    if not rank.probe_cost_events:
        return None
    return rank.probe_cost_ns / rank.probe_cost_events / 1e9


def _count(counters: dict[Counter, float], name: str, word: str, value: float) -> None:
    """Add, not set: all numbers without a name of their own share the word "other"."""
    counters[name, (word,)] = counters.get((name, (word,)), 0.0) + value


def _word(names: type[IntEnum], number: int) -> str:
    try:
        return names(number).name.lower()
    except ValueError:
        return "other"
