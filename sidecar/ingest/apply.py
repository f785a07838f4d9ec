"""Turns records into the state of one job.

High-rate kinds go through numpy in `sidecar.ingest.collectives`; all others are applied one by one.
A record that makes no sense (a kind or an enumeration value that does not exist, a number that
cannot be, a plan that cannot be read) is counted in `bad_records` and left out; it never stops the
others.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from ntp_core.observe import Blame, Phase, Value
from ntp_core.plan import Plan
from ntp_core.units import ModelUnits
from sidecar.ingest.bounds import fits, times_fit
from sidecar.ingest.changes import ChangeBook
from sidecar.ingest.collectives import OpenCollectives, apply_collectives
from sidecar.ingest.fingerprints import FingerprintBook
from sidecar.ingest.state import Divergence, Fault, JobState, RankState, StepSample
from sidecar.wire.reader import Batch, to_records
from sidecar.wire.ring import RingHeader
from sidecar.wire.rundir import plan_name, read_plan
from sidecar.wire.schema import QUEUED_UNIT_NS, Kind, Record, digest_from_int

MAX_PLANS = 64  # plans kept by digest, and unusable plan files remembered; the oldest goes
MAX_UNITS = 1 << 24  # of one kind; a plan of more is no plan of a model
MIN_SHARE = 1e-9  # less is nothing: no division by it
_NO_PLACE = 65535

_T = TypeVar("_T")
_File = tuple[int, int, int]
_Handler = Callable[["Applier", RankState, Record], None]


class Applier:
    """Applies drained batches to one `JobState`.

    Args:
        job: the state to keep up to date.
        run_dir: where `plan-<digest>.json` lies.
        clock_ns: the monotonic clock of the records.

    Attributes:
        first_error: traceback of the first record that failed in a way nobody foresaw.
    """

    def __init__(
        self, job: JobState, run_dir: Path, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.job = job
        self.run_dir = run_dir
        self.first_error = ""
        self._clock_ns = clock_ns
        self._unusable: dict[str, _File] = {}  # digest -> the file that was no plan
        self._changes = ChangeBook(job)
        self._fingerprints = FingerprintBook(job)
        self._under_way: dict[int, OpenCollectives] = {}
        self._started: dict[int, tuple[int, int]] = {}  # rank -> start of its ring, pid
        self._plan_ns = -1
        self._world = 0  # ranks that may exist: a job may let in more than it began with

    def apply(self, header: RingHeader, batch: Batch) -> bool:
        """Apply one batch of one ring.

        Returns:
            False if the rank has a newer ring: nothing was applied, this one may be closed.
        """
        state = self._rank(header)
        if state is None:
            return False
        under_way = self._under_way[header.global_rank]
        self.job.bad_records += batch.bad
        state.events_lost += batch.lost
        if batch.lost or batch.bad:
            under_way.clear()
            state.collective = None
        records = batch.records
        state.events_total += len(records)
        is_timely = times_fit(records, self._clock_ns())
        if not is_timely.all():
            self.job.bad_records += int(len(records) - np.count_nonzero(is_timely))
            records = records[is_timely]
        if not len(records):
            return True
        state.last_progress_ns = max(state.last_progress_ns, int(records["t_ns"][-1]))
        self.job.bad_records += apply_collectives(state, under_way, records)
        kinds = records["kind"]
        is_other = (kinds != Kind.COLLECTIVE_BEGIN) & (kinds != Kind.COLLECTIVE_END)
        if np.any(is_other):
            for record in to_records(records[is_other]):
                self._apply_one(state, record)
        return True

    def close_changes(self) -> None:
        """End the changes that no rank will end any more; call it when liveness is known."""
        self._changes.close_abandoned(self._clock_ns())

    def _rank(self, header: RingHeader) -> RankState | None:
        """State of the rank behind a ring; a restarted rank starts anew."""
        rank, this = header.global_rank, (header.start_ns, header.pid)
        known = self._started.get(rank)
        if known == this:
            return self.job.ranks[rank]
        if known is not None and known > this:
            return None
        self._started[rank] = this
        self._under_way[rank] = OpenCollectives()
        self._world = max(self._world, header.world_size, rank + 1)
        state = RankState(
            rank=rank,
            pid=header.pid,
            pid_start_ticks=header.pid_start_ticks,
            world_size=header.world_size,
            start_ns=header.start_ns,
            start_unix_ns=header.start_unix_ns,
            last_progress_ns=header.start_ns,
        )
        self.job.ranks[rank] = state
        return state

    def _apply_one(self, state: RankState, record: Record) -> None:
        handler = _HANDLERS.get(record.kind)
        if handler is None or not fits(record, self._world):
            self.job.bad_records += 1
            return
        try:
            handler(self, state, record)
        except ValueError:  # an enumeration value, a replica or a plan that does not exist
            self.job.bad_records += 1
        except Exception:
            # Part of the tick's border: what one record does must not cost the rest of its batch.
            self.job.bad_records += 1
            self.first_error = self.first_error or traceback.format_exc()

    # -- one method for each kind

    def _step_begin(self, state: RankState, r: Record) -> None:
        state.step_open = r.a
        if r.a <= state.step:  # the job went back to a checkpoint
            self._fingerprints.go_back(r.a, state.epoch)
            later = [d for d in self.job.divergences if d.step >= r.a and d.epoch < state.epoch]
            for divergence in later:
                self.job.divergences.remove(divergence)

    def _step_end(self, state: RankState, r: Record) -> None:
        state.step, state.step_open, state.is_saving = r.a, None, False
        state.loss = None if math.isnan(r.x) and state.loss is None else r.x
        state.steps_total += 1
        state.tokens_total += r.aux
        state.step_ns_total += r.b
        state.busy_ns_total += r.c
        state.steps.append(
            StepSample(
                step=r.a,
                end_ns=r.t_ns,
                duration_ns=r.b,
                busy_ns=r.c,
                tokens=r.aux,
                loss=r.x,
                epoch=state.epoch,
                work=state.work,
                queued_ns=r.code * QUEUED_UNIT_NS,
            )
        )

    def _phase(self, state: RankState, r: Record) -> None:
        phase = int(Phase(r.code))
        state.phase_ns_total[phase] = state.phase_ns_total.get(phase, 0) + r.b

    def _value(self, state: RankState, r: Record) -> None:
        name = Value(r.code)
        if name is Value.LOSS:
            state.loss = r.x
        elif name is Value.GRAD_NORM:
            state.grad_norm = r.x

    def _plan(self, state: RankState, r: Record) -> None:
        state.epoch, state.work = r.aux, r.x if r.x >= MIN_SHARE else 0.0
        has_place = r.code != _NO_PLACE and r.b >= 0
        state.replica, state.tp_rank = (r.b, r.code) if has_place else (None, None)
        plan = self._load_plan(digest_from_int(r.a))
        if plan is None:
            raise ValueError("no such plan file")
        self._fingerprints.expect(r.aux, len(plan.replicas))
        # the newest word counts, not the ring that happened to be drained last
        if r.t_ns >= self._plan_ns:
            self._plan_ns = r.t_ns
            self.job.plan = plan if plan.epoch == r.aux else plan.with_epoch(r.aux)

    def _load_plan(self, digest: str) -> Plan | None:
        known = self.job.plans.get(digest)
        if known is not None:
            return known
        file = self._plan_file(digest)
        if file is None or self._unusable.get(digest) == file:
            return None
        try:
            data = json.loads(read_plan(self.run_dir, digest))
            plan = Plan.from_json(data["plan"])
            model = data.get("model")
            units = None if model is None else ModelUnits.from_json(model)
            if max(plan.counts.values(), default=0) > MAX_UNITS:
                raise ValueError(f"more than {MAX_UNITS} units")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            _keep(self._unusable, digest, file)
            return None
        self.job.model = units or self.job.model
        _keep(self.job.plans, digest, plan)
        return plan

    def _plan_file(self, digest: str) -> _File | None:
        """Which file has a plan's name now; None while there is none."""
        try:
            info = (self.run_dir / plan_name(digest)).lstat()
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns, info.st_size

    def _fingerprint(self, state: RankState, r: Record) -> None:
        self._fingerprints.add(state.epoch, r.a, r.aux, r.b)

    def _divergence(self, state: RankState, r: Record) -> None:
        event = Divergence(
            step=r.a,
            t_ns=r.t_ns,
            blame=Blame(r.code),
            replica=int(r.x) if r.x >= 0 else None,
            rank=r.aux if r.aux >= 0 else None,
            tensor=self._tensor_name(r.b),
            unit=r.c,
            epoch=state.epoch,
        )
        said = (event.step, event.replica, event.rank, event.tensor, event.unit)
        for d in self.job.divergences:
            if (d.step, d.replica, d.rank, d.tensor, d.unit) == said:
                return  # every rank may report the same finding
        self.job.divergences.append(event)

    def _tensor_name(self, index: int) -> str:
        model = self.job.model
        if model is not None and 0 <= index < len(model.tensors):
            return model.tensors[index].name
        return f"tensor {index}"

    def _change_begin(self, state: RankState, r: Record) -> None:
        self._changes.begin(state.rank, r)
        # Also of a rank that is let in: it stands where the others stand.
        state.step = r.a
        under_way = self._under_way[state.rank]
        under_way.drop_before(r.t_ns)
        state.collective = under_way.oldest()

    def _change_phase(self, state: RankState, r: Record) -> None:
        self._changes.phase(state.rank, r)

    def _change_end(self, state: RankState, r: Record) -> None:
        self._changes.end(state.rank, r)

    def _gc_pause(self, state: RankState, r: Record) -> None:
        state.gc_ns_total += r.a

    def _save_begin(self, state: RankState, r: Record) -> None:
        state.is_saving = True

    def _save_end(self, state: RankState, r: Record) -> None:
        state.is_saving, state.saved_ns = False, r.t_ns

    def _exception(self, state: RankState, r: Record) -> None:
        state.exited, state.step_open = 1, None

    def _exit(self, state: RankState, r: Record) -> None:
        state.exited, state.step_open = r.aux, None

    def _fault(self, state: RankState, r: Record) -> None:
        self.job.faults.append(Fault(step=r.a, t_ns=r.t_ns, fault=r.code, rank=r.aux, detail=r.b))

    def _probe_cost(self, state: RankState, r: Record) -> None:
        state.probe_cost_events += r.a
        state.probe_cost_ns += r.b


def _keep(known: dict[str, _T], digest: str, value: _T) -> None:
    known[digest] = value
    while len(known) > MAX_PLANS:
        del known[next(iter(known))]


_HANDLERS: dict[int, _Handler] = {
    Kind.STEP_BEGIN: Applier._step_begin,
    Kind.STEP_END: Applier._step_end,
    Kind.PHASE: Applier._phase,
    Kind.PLAN: Applier._plan,
    Kind.FINGERPRINT: Applier._fingerprint,
    Kind.DIVERGENCE: Applier._divergence,
    Kind.CHANGE_BEGIN: Applier._change_begin,
    Kind.CHANGE_PHASE: Applier._change_phase,
    Kind.CHANGE_END: Applier._change_end,
    Kind.VALUE: Applier._value,
    Kind.GC_PAUSE: Applier._gc_pause,
    Kind.EXCEPTION: Applier._exception,
    Kind.EXIT: Applier._exit,
    Kind.FAULT_INJECTED: Applier._fault,
    Kind.PROBE_COST: Applier._probe_cost,
    Kind.SAVE_BEGIN: Applier._save_begin,
    Kind.SAVE_END: Applier._save_end,
}
