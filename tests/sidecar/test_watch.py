"""A slow rank from onset to relief: seen, told, proposed, changed, judged, resolved."""

from __future__ import annotations

from pathlib import Path

from ntp_core.observe import Reason
from ntp_core.proposal import FILE_NAME, Proposal, check_proposal
from sidecar.config import load
from sidecar.incidents.incident import IncidentState
from sidecar.incidents.tracker import Transition
from sidecar.ingest.state import JobState, RankState
from sidecar.watch import JobWatch, build_watch
from tests.support.jobs import DrivenJob, plan_of


class Story:
    """A driven job under watch, with a job side that takes proposals at step boundaries."""

    def __init__(self, run_dir: Path, **flags: object) -> None:
        self.run_dir = run_dir
        self.job = DrivenJob(plan_of(((8, 8, 8), (12, 12))), speed=0.5)
        config = load(
            {"autopilot": "act", "clear_s": 0.2, "proposal_cooldown_s": 0, **flags}
        ).config
        self.watch: JobWatch = build_watch(config, self.job.state, run_dir, None)
        self.told: list[Transition] = []

    def tick(self) -> None:
        """One look of the sidecar."""
        clock = self.job.clock
        self.told += self.watch.tick(now_ns=clock.now_ns, now_unix_ns=clock.unix_ns).transitions

    def steps(self, count: int, slow: dict[int, float], overhead: float = 1.0) -> None:
        """Steps, a look after each; a proposal is taken before the next."""
        for _ in range(count):
            self._take()
            self.job.commit({r: f * overhead for r, f in slow.items()})
            self.tick()

    def _take(self) -> None:
        path = self.run_dir / FILE_NAME
        if not path.exists():
            return
        proposal = Proposal.from_json(path.read_text())
        path.unlink()
        assert self.job.state.plan is not None
        check_proposal(proposal, self.job.state.plan)
        self.job.change(proposal.plan, proposal.reason)
        fastest = max(proposal.speeds.values(), default=1.0)
        self.job.expect({g: fastest / v for g, v in proposal.speeds.items()})

    def states(self, subject: str) -> list[IncidentState]:
        """What was told about a subject."""
        return [t.state for t in self.told if t.incident.finding.subject == subject]


def test_watch_slow_rank_is_relieved_judged_kept_and_resolved(tmp_path: Path) -> None:
    """The whole way, with every link in place at the end."""
    story = Story(tmp_path)
    story.steps(10, {})
    assert story.told == []
    story.steps(14, {1: 3.0})
    assert story.states("rank 1") == [IncidentState.FIRING, IncidentState.RESOLVED]
    (change,) = story.job.state.changes
    (incident,) = story.watch.incidents
    assert change.reason is Reason.RANK_SLOW
    assert change.judged == "kept"
    assert change.incident == incident.id
    assert (incident.change_epochs, incident.trace_ids) == ([2], [change.trace_id])
    assert incident.opened_step - 10 <= 5
    assert change.step_time_before_s is not None and change.step_time_after_s is not None
    assert change.step_time_after_s < 0.7 * change.step_time_before_s
    assert not (tmp_path / FILE_NAME).exists()


def test_watch_change_without_gain_is_undone_and_told(tmp_path: Path) -> None:
    """After the change all ranks get as slow: back to the old plan, and people hear of it."""
    story = Story(tmp_path)
    story.steps(10, {})
    story.steps(4, {1: 3.0})
    story.steps(12, dict.fromkeys(range(5), 3.0), overhead=3.0)
    first, back = story.job.state.changes
    assert first.judged == "undone"
    assert back.reason is Reason.NO_GAIN
    assert back.new_digest == first.old_digest
    assert IncidentState.FIRING in story.states("change 2")
    story.steps(60, {1: 3.0})
    assert len(story.job.state.changes) == 2, "not tried again at once"


def test_watch_advise_leaves_the_job_alone(tmp_path: Path) -> None:
    """The default shows the plan with the incident and writes nothing."""
    story = Story(tmp_path, autopilot="advise")
    story.steps(10, {})
    story.steps(20, {1: 3.0})
    assert story.job.state.changes == []
    assert list(tmp_path.iterdir()) == []
    (incident,) = story.watch.incidents
    assert "promises" in incident.finding.signals["proposal"]


def test_watch_rows_count_runs_and_failures(tmp_path: Path) -> None:
    """Counters of the checks: runs only where a check could judge."""
    story = Story(tmp_path)
    story.steps(10, {})
    rows = {r.name: r for r in story.watch.rows()}
    assert rows["slow_rank"].runs == 6
    assert rows["slow_rank"].failures == 0
    assert not rows["replica_divergence"].ready
    assert rows["replica_divergence"].runs == 0


def test_watch_first_loss_is_kept(tmp_path: Path) -> None:
    """The report's first loss is that of step 1, however long the run."""
    story = Story(tmp_path)
    story.steps(3, {})
    assert story.watch.job.loss_first == 5.0 * 0.99


def test_watch_rows_of_a_job_without_plan_say_what_can_never_apply(tmp_path: Path) -> None:
    """Unknown until the job could have had a plan; then what compares shares or replicas is out."""
    job = JobState(job_id="j")
    watch = build_watch(load({}).config, job, tmp_path)
    for rank in range(4):
        job.ranks[rank] = RankState(rank=rank, pid=1, alive=True)
    assert all(row.applies for row in watch.rows())
    for state in job.ranks.values():
        state.steps_total = 1
    applies = {row.name: row.applies for row in watch.rows()}
    assert applies == {
        "slow_rank": False,
        "no_progress": True,
        "replica_divergence": False,
        "dead_rank": True,
    }
    job.plan = plan_of(((2, 2), (2, 2)))
    assert all(row.applies for row in watch.rows())
    job.plan = plan_of(((2, 2),))
    applies = {row.name: row.applies for row in watch.rows()}
    assert (applies["slow_rank"], applies["replica_divergence"]) == (False, False)
