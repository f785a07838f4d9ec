"""A proposal that does not fit is set aside with the reason, and the job goes on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntp_core.inbound.letter import MAX_ASIDE
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import FILE_NAME, MAX_BYTES, Proposal
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.inbox import PROPOSAL, STOP, STOP_FILE, Inbox
from tests.support.bodies_train import Told, train
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of
from tests.support.tiny_job import GROUPED, WIDE, A, M, V, even, reshared, train_config

FIRST = even(GROUPED, (2, 1), (3, 3))
WHOLE = {A: (6,), M: (12,), V: (12,)}
NEW = reshared(FIRST, [{A: (5, 1), M: (4, 8), V: (9, 3)}, WHOLE]).with_epoch(2)
GOOD = Proposal(base_digest=FIRST.digest, plan=NEW, reason=Reason.OPERATOR)
REASON_FILE, REFUSED_FILE = "proposal.refused.txt", "proposal.refused.json"

Body = dict[str, Any]


def edited(edit: Callable[[Body], object]) -> bytes:
    """The good proposal's file after an edit of its JSON."""
    body = json.loads(GOOD.to_json())
    edit(body)
    return json.dumps(body).encode()


def of_plan(plan: Plan) -> bytes:
    """A proposal of another plan."""
    return replace(GOOD, plan=plan.with_epoch(2)).to_json().encode()


def set_counts(units: object) -> Callable[[Body], object]:
    """An edit of the number of attention units and of their owners."""

    def edit(body: Body) -> None:
        body["plan"]["counts"]["attention"] = units
        for r in body["plan"]["replicas"]:
            r["layouts"]["attention"] = [[[0, units]]] + [[]] * (len(r["ranks"]) - 1)

    return edit


OWN: Body = {"kind": "mlp", "runs": [[[0, 12]], []]}
"""An override, but for its layer."""

REFUSED: dict[str, tuple[bytes, str]] = {
    "stale epoch": (edited(lambda b: b["plan"].update(epoch=1)), "in force is epoch 1"),
    "future epoch": (edited(lambda b: b["plan"].update(epoch=3)), "in force is epoch 1"),
    "other base": (edited(lambda b: b.update(base_digest="0" * 16)), "in force is epoch 1"),
    "too few ranks": (of_plan(even(GROUPED, (2,), (6,))), "the job has [0, 1, 2]"),
    "too many ranks": (of_plan(even(GROUPED, (2, 2), (3, 3))), "the job has [0, 1, 2]"),
    "other units": (of_plan(even(WIDE, (2, 1), (3, 3))), "counts units"),
    "other batch": (of_plan(even(GROUPED, (2, 1), (3, 4))), "must stay"),
    "a unit without owner": (
        edited(lambda b: b["plan"]["replicas"][0]["layouts"].update(mlp=[[[0, 4]], [[5, 12]]])),
        "no owner",
    ),
    "override of an unknown kind": (
        edited(
            lambda b: b["plan"]["replicas"][0].update(
                overrides=[{"kind": "expert", "layer": 0, "runs": [[], []]}]
            )
        ),
        "expert",
    ),
    "override of an absurd layer": (
        edited(lambda b: b["plan"]["replicas"][0].update(overrides=[OWN | {"layer": 10**9}])),
        "layer = 1000000000",
    ),
    "override of a layer that the model lacks": (
        edited(lambda b: b["plan"]["replicas"][0].update(overrides=[OWN | {"layer": 7}])),
        "layer 7",
    ),
    "a rank of 0.9": (edited(lambda b: b["plan"]["replicas"][0].update(ranks=[0.9, 1])), "0.9"),
    "a batch as text": (edited(lambda b: b["plan"]["replicas"][0].update(batch="3")), "batch"),
    "empty": (b"", "not a proposal"),
    "half written": (GOOD.to_json().encode()[:100], "not a proposal"),
    "not UTF-8": (b'{"base_digest": "\xff"}', "utf-8"),
    "not an object": (b"[1, 2]", "not a proposal"),
    "a lone surrogate": (edited(lambda b: b.update(base_digest="\ud800")), "in force is epoch 1"),
    "oversized": (b" " * (MAX_BYTES + 1), "at most"),
    "deeply nested": (b"[" * 100_000, "not a proposal"),
    "unknown reason": (edited(lambda b: b.update(reason=99)), "99"),
    "infinite time": (edited(lambda b: b.update(detected_unix_ns=float("inf"))), "not a proposal"),
    "infinite epoch": (edited(lambda b: b["plan"].update(epoch=float("inf"))), "epoch = inf"),
    "infinite units": (edited(set_counts(float("inf"))), "end of a run = inf"),
    "units beyond memory": (edited(set_counts(10**15)), "counts units"),
    "negative units": (edited(set_counts(-1)), "end of a run = -1"),
    "wrong types": (edited(lambda b: b.update(plan={"replicas": 7})), "not a plan"),
    "no rank": (edited(lambda b: b["plan"]["replicas"][0].update(ranks=[])), "no rank"),
    "speeds of another job": (edited(lambda b: b.update(speeds={"0": 1.0})), "speeds"),
    "speeds of zero": (edited(lambda b: b.update(speeds={"0": 1, "1": 0, "2": 1})), "speeds"),
    "speed not a number": (
        edited(lambda b: b.update(speeds={"0": 1, "1": float("nan"), "2": 1})),
        "speeds",
    ),
}


def plant_socket(path: Path) -> None:
    """A socket, by a short relative name: its address has no room for a long path."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name)


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "full folder": lambda p: (p / "inside").mkdir(parents=True),
    "pipe": os.mkfifo,
    "socket": plant_socket,
    "link to a file": lambda p: p.symlink_to(__file__),
    "link to itself": lambda p: p.symlink_to(p),
    "link to a device": lambda p: p.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inbox_proposal_that_does_not_fit_is_set_aside(tmp_path: Path, case: str) -> None:
    """Stale, foreign, malformed or hostile: nothing is raised, the reason is beside the file."""
    content, reason = REFUSED[case]
    (tmp_path / FILE_NAME).write_bytes(content)
    inbox = Inbox(tmp_path)
    assert inbox.control() == PROPOSAL
    assert None is inbox.take(PROPOSAL, Comm(0, 1), FIRST, GROUPED.units())
    assert inbox.refused == 1
    assert inbox.control() == 0, "the file is out of the way"
    assert content == (tmp_path / REFUSED_FILE).read_bytes()
    assert reason in (tmp_path / REASON_FILE).read_text()


def test_inbox_good_proposal_is_taken_once(tmp_path: Path) -> None:
    """What fits comes back whole, and the file is gone."""
    (tmp_path / FILE_NAME).write_text(GOOD.to_json())
    inbox = Inbox(tmp_path)
    assert inbox.take(inbox.control(), Comm(0, 1), FIRST) == GOOD
    assert inbox.control() == 0
    assert list(tmp_path.iterdir()) == []


def test_inbox_hears_stop_and_proposal_together(tmp_path: Path) -> None:
    """Both wishes fit into one control word; without a folder, or on another rank, none."""
    (tmp_path / STOP_FILE).touch()
    (tmp_path / FILE_NAME).touch()
    assert Inbox(tmp_path).control() == STOP | PROPOSAL
    assert Inbox(None).control() == 0
    assert None is Inbox(tmp_path).take(STOP, Comm(0, 1), FIRST)


def test_inbox_file_that_vanished_is_refused(tmp_path: Path) -> None:
    """Between the look and the read the file may go; that is no reason to fall over."""
    inbox = Inbox(tmp_path)
    assert None is inbox.take(PROPOSAL, Comm(0, 1), FIRST)
    assert inbox.refused == 1


@pytest.mark.parametrize("name", [FILE_NAME, STOP_FILE])
@pytest.mark.parametrize("plant", STRANGE.values(), ids=STRANGE)
def test_inbox_what_is_no_file_is_set_aside_at_once(
    tmp_path: Path, name: str, plant: Callable[[Path], object]
) -> None:
    """A folder, a pipe, a socket or a link says nothing to the job, and holds no step up."""
    plant(tmp_path / name)
    inbox = Inbox(tmp_path)
    assert inbox.control() == 0
    assert inbox.refused == 1
    assert not os.path.lexists(tmp_path / name)
    assert inbox.control() == 0
    assert inbox.refused == 1


def test_inbox_what_cannot_be_moved_is_ignored_for_good(tmp_path: Path) -> None:
    """With every name for refused things taken by folders, one more folder is counted once."""
    for number in range(MAX_ASIDE):
        mark = f".{number}" if number else ""
        (tmp_path / f"proposal{mark}.refused.json" / "full").mkdir(parents=True)
    (tmp_path / FILE_NAME).mkdir()
    inbox = Inbox(tmp_path)
    assert [inbox.control(), inbox.control(), inbox.refused] == [0, 0, 1]
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / FILE_NAME).write_text(GOOD.to_json())
    assert inbox.take(inbox.control(), Comm(0, 1), FIRST) == GOOD


def test_inbox_file_swapped_for_a_pipe_is_refused(tmp_path: Path) -> None:
    """What was a file at the look and is a pipe at the read does not block rank 0."""
    (tmp_path / FILE_NAME).touch()
    inbox = Inbox(tmp_path)
    control = inbox.control()
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME)
    os.mkfifo(tmp_path / REASON_FILE)
    assert None is inbox.take(control, Comm(0, 1), FIRST)
    assert inbox.control() == 0


def test_inbox_running_job_refuses_all_and_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    """In a real job bad files are set aside by all ranks alike, then a good one is taken."""
    bad = [content for content, _ in REFUSED.values()][::3]
    steps = len(bad) + 2
    config = train_config(GROUPED, check_every=0)
    leave = tuple((i + 1, content) for i, content in enumerate(bad))
    told: list[Told] = rank_pool.run(
        train,
        3,
        config=config,
        plan=FIRST,
        steps=steps,
        leave=(*leave, (steps - 1, GOOD.to_json().encode())),
        folder=tmp_path,
    )
    plain: list[Told] = rank_pool.run(train, 3, config=config, plan=FIRST, steps=steps)
    for t in told:
        assert plain[0].losses[: steps - 1] == t.losses[: steps - 1]
        assert (NEW.digest, 2) == (t.digest, t.epoch)
        assert len(bad) == t.refused
        assert len(calls_of(t.calls, "change_begin")) == 1
