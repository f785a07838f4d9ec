"""The sidecar of one job on one node: puts all parts together and keeps them ticking.

A tick drains the rings, updates the state, checks it, follows incidents and publishes. It never
waits for the job or for the network. A tick that fails is counted, its first traceback is kept, and
the next one runs. The job does not notice whether this process lives.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from sidecar.advice import Planner
from sidecar.announce import Webhooks, make_alertmanager_feed, make_tracer
from sidecar.checks.finding import Check
from sidecar.config import Config
from sidecar.export.prometheus import Exporter
from sidecar.export.selfstats import JobView, SidecarStats
from sidecar.incidents.incident import Incident
from sidecar.ingest.job import JobIngest
from sidecar.ingest.state import JobState
from sidecar.proposals import ProposalDesk
from sidecar.published import LOCK_WAIT_S, Published
from sidecar.report import RunFacts, build_report, read_outside_facts
from sidecar.usage import Usage, raise_file_limit
from sidecar.view import snapshot_view
from sidecar.watch import Ticked, build_watch
from sidecar.web.app import create_app
from sidecar.web.server import WebServer
from sidecar.wire.holders import claim, holders, release_run_dir
from sidecar.wire.rundir import is_run_dir

log = logging.getLogger(__name__)

ADDRESS_FILE = "daemon.json"
METRICS_KEEP_S = 0.2
"""Metrics at most this old are given out again."""
LOOK_AROUND_S = 0.5
ORPHAN_S = 2.0
"""How long nobody must be left before the sidecar of a killed `run` ends."""
OUTLETS = ("webhook", "alertmanager", "traces")
FOLLOW_S = 1.0
"""Longest time between two looks at all new steps; the state keeps 512 of them."""


class Daemon:
    """One job's sidecar. `start` and `stop` from any thread; ticks run in a thread of its own.

    Args:
        config: settings in force.
        run_dir: the job's run directory; it need not exist yet.
        job_id: default: the directory's name.
        planner: works out new plans; default: the same ranks at measured speeds.
        checks: what is checked; default: all of the registry.

    Raises:
        ServeError: the page's address cannot be taken.
        ConfigError, InvalidInput: a setting turned out to be unusable.

    Attributes:
        tick_errors: ticks that failed and were survived.
        outlet_errors: errors of each outlet that were survived.
        first_error: traceback of the first of all these.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        job_id: str | None = None,
        planner: Planner | None = None,
        checks: Sequence[Check] | None = None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.tick_errors = 0
        self.outlet_errors = Counter(dict.fromkeys(OUTLETS, 0))
        self.first_error = ""
        self.last_tick_unix_s: float | None = None
        self._tick_s: float | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = Usage.now()
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self._ingest = JobIngest(run_dir, job_id)
        self._watch = build_watch(config, self._ingest.job, run_dir, planner, checks)
        self._exporter = Exporter(max_ranks=config.max_ranks)
        self._metrics_s = self._followed_s = float("-inf")
        self._published = Published(self._lock, self._snapshot, self._watching)
        self._tracer = make_tracer(config)
        app = create_app(
            self._published,
            token=config.token or None,
            metrics=self._metrics,
            report=self.report,
        )
        self._web = WebServer(app, token=config.token or None, host=config.host, port=config.port)
        link = self._web.link
        self._webhooks: Webhooks | None = None
        with ExitStack() as undo:  # whatever setting is refused, nothing stays open
            undo.callback(self._web.stop)
            if config.webhook_url:
                self._webhooks = Webhooks(config, self.job.job_id, link)
                undo.callback(self._webhooks.stop)
            self._alertmanager = make_alertmanager_feed(config, link)
            undo.pop_all()

    @property
    def job(self) -> JobState:
        """The state; changed by ticks."""
        return self._ingest.job

    @property
    def incidents(self) -> list[Incident]:
        """All incidents that are kept, oldest first."""
        return self._watch.incidents

    @property
    def url(self) -> str:
        """Address of the page."""
        return self._web.url

    @property
    def desk(self) -> ProposalDesk:
        """What was proposed to the job."""
        return self._watch.desk

    def start(self) -> None:
        """Serve the page and begin to tick. Writes the address into the run directory."""
        self._web.start()
        if self._webhooks is not None:
            self._webhooks.start()
        if self._alertmanager is not None:
            self._alertmanager.start()
        self._claim()
        self._thread = threading.Thread(target=self._run, name="tick", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """One last tick for what the ranks left, then end all threads. Safe to call twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(LOCK_WAIT_S)
            self._thread = None
            self.tick()
            self._tracer.finish(self.job, self._unix_offset_ns)
        self._web.stop()
        if self._webhooks is not None:
            self._webhooks.stop()
        if self._alertmanager is not None:
            self._alertmanager.stop()
        self._tracer.shutdown()
        self._ingest.close()

    def tick(self) -> None:
        """One tick; survives what goes wrong in it."""
        begin_s = time.perf_counter()
        try:
            with self._lock:
                applied, ticked = self._tick_locked()
            self._announce(ticked)
            self._published.ticked(bool(applied or ticked.transitions) or self._is_second_over())
        except Exception:
            # A fault in one tick must not blind the sidecar.
            self.tick_errors += 1
            self._note_error("a tick")
        self._tick_s = time.perf_counter() - begin_s
        self.last_tick_unix_s = time.time()

    def report(self) -> dict[str, Any]:
        """The run report. What only others can measure is read from the run directory."""
        facts = replace(self._facts(), **read_outside_facts(self.run_dir))
        with self._lock:
            return build_report(self.job, self.incidents, facts)

    def _run(self) -> None:
        poll_s = self.config.poll_ms / 1000
        while not self._stopping.is_set():
            self.tick()
            self._stopping.wait(max(poll_s / 10, poll_s - (self._tick_s or 0.0)))

    def _tick_locked(self) -> tuple[int, Ticked]:
        applied = self._ingest.tick()
        now_ns = time.monotonic_ns()
        ticked = self._watch.tick(now_ns=now_ns, now_unix_ns=now_ns + self._unix_offset_ns)
        if time.monotonic() - self._followed_s > FOLLOW_S:
            self._followed_s = time.monotonic()
            self._exporter.follow(self.job)
        with self._outlet("traces"):
            self._tracer.follow(self.job, now_ns, self._unix_offset_ns)
        return applied, ticked

    def _announce(self, ticked: Ticked) -> None:
        """Each outlet and each message by itself: what is wrong with one must cost no other."""
        if self._webhooks is not None:
            for transition in ticked.transitions:
                with self._outlet("webhook"):
                    self._webhooks.incidents([transition])
            for change in ticked.ended:
                with self._outlet("webhook"):
                    self._webhooks.changes([change], self._unix_offset_ns)
        with self._outlet("alertmanager"):
            if self._alertmanager is not None:
                self._alertmanager.update(self.job.job_id, self.incidents)

    @contextmanager
    def _outlet(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.outlet_errors[name] += 1
            self._note_error(f"the outlet '{name}'")

    def _note_error(self, what: str) -> None:
        if not self.first_error:
            self.first_error = traceback.format_exc()
            log.error("%s failed and was survived:\n%s", what, self.first_error)

    def _is_second_over(self) -> bool:
        """Ages grow even if nothing happens: readers get a new view once a second."""
        return int(time.time()) != int(self.last_tick_unix_s or 0)

    def _snapshot(self) -> dict[str, Any]:
        return snapshot_view(
            self.job,
            self.incidents,
            self._watch.rows(),
            now_ns=time.monotonic_ns(),
            unix_offset_ns=self._unix_offset_ns,
        )

    def _metrics(self, accept: str | None) -> tuple[bytes, str]:
        is_old = time.monotonic() - self._metrics_s > METRICS_KEEP_S
        stats = self._stats() if is_old else None  # asks the outbox: not under the tick's lock
        if stats is not None and self._lock.acquire(timeout=LOCK_WAIT_S):
            try:
                self._exporter.follow(self.job)
                view = JobView(job=self.job, incidents=self.incidents, checks=self._watch.rows())
                self._exporter.publish([view], stats, time.monotonic_ns())
                self._metrics_s = time.monotonic()
            finally:
                self._lock.release()
        return self._exporter.render(accept)

    def _stats(self) -> SidecarStats:
        usage = Usage.now()
        hooks = self._webhooks.counts() if self._webhooks is not None else None
        return SidecarStats(
            tick_s=self._tick_s,
            last_tick_unix_s=self.last_tick_unix_s,
            tick_errors=self.tick_errors,
            cpu_s=usage.cpu_s,
            resident_memory_bytes=usage.resident_bytes,
            bad_rings=self.job.bad_rings,
            bad_records=self.job.bad_records,
            webhooks_delivered=hooks.delivered if hooks else 0,
            webhooks_retried=hooks.retried if hooks else 0,
            webhooks_dead=hooks.dead if hooks else 0,
            webhooks_dropped=self._webhooks.dropped if self._webhooks else 0,
            outlet_errors=dict(self.outlet_errors),
            webhooks_queued=hooks.queued if hooks else None,
        )

    def _facts(self) -> RunFacts:
        usage = Usage.now()
        wall_s = usage.at_s - self._started.at_s
        return RunFacts(
            unix_offset_ns=self._unix_offset_ns,
            loss_first=self.job.loss_first,
            webhooks_sent=self._webhooks.sent if self._webhooks else 0,
            webhooks_delivered=self._webhooks.counts().delivered if self._webhooks else 0,
            cpu_ratio=(usage.cpu_s - self._started.cpu_s) / wall_s if wall_s > 0 else None,
            resident_memory_bytes=usage.resident_bytes,
        )

    def _watching(self) -> tuple[bool, str]:
        if not self.run_dir.is_dir():
            return False, f"the run directory {self.run_dir} is gone or not made yet"
        if not self.job.ranks:
            return False, f"no rank has appeared in {self.run_dir} yet"
        return True, f"watching {len(self.job.ranks)} ranks"

    def _claim(self) -> None:
        """Mark the run directory as in use and leave the address there for other commands."""
        try:
            claim(self.run_dir)
            draft = self.run_dir / f".{ADDRESS_FILE}.{os.getpid()}"
            draft.write_text(json.dumps({"pid": os.getpid(), "url": self.url}), encoding="utf-8")
            draft.replace(self.run_dir / ADDRESS_FILE)
        except OSError as error:
            log.warning("run directory %s: %s; waiting for it", self.run_dir, error.strerror)


def read_address(run_dir: Path) -> tuple[int, str] | None:
    """(pid, address) of the sidecar that watches a run directory; None before it is up."""
    try:
        body = json.loads((run_dir / ADDRESS_FILE).read_text(encoding="utf-8"))
        return int(body["pid"]), str(body["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_until_signal(
    daemon: Daemon, ready: Callable[[Daemon], None], parent_pid: int | None = None
) -> None:
    """Start, call `ready`, wait for SIGTERM or SIGINT, stop. Main thread only.

    Args:
        parent_pid: the process that runs the job; when it is gone and no process of the job is
            left, nobody can end this process, so it ends by itself.
    """
    asked = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    raise_file_limit()
    daemon.start()
    is_left = False
    try:
        ready(daemon)
        was_there = False
        since_s = time.monotonic()
        while not asked.wait(LOOK_AROUND_S) and not is_left:
            is_there = daemon.run_dir.is_dir()
            if was_there and not is_there:
                log.warning("the run directory %s has gone; the job is over", daemon.run_dir)
            was_there = is_there
            if not _is_orphan(daemon, parent_pid):
                since_s = time.monotonic()
            is_left = time.monotonic() - since_s > ORPHAN_S
    finally:
        daemon.stop()
        if is_left and is_run_dir(daemon.run_dir):
            release_run_dir(daemon.run_dir, 0.0)  # its maker can no longer do so


def _is_orphan(daemon: Daemon, parent_pid: int | None) -> bool:
    """Whether our parent has gone, and no process of its job is left: neither a rank nor the
    command, which may be far from its first rank."""
    if parent_pid is None or os.getppid() == parent_pid:
        return False
    if any(r.alive for r in list(daemon.job.ranks.values())):
        return False
    return not holders(daemon.run_dir)
