"""The training program under our launcher and under torchrun; bad input ends it in one line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ntp_core.faults import FaultKind, fault_file, flip_bit, leave_fault
from ntp_core.job import JobConfig, SaveConfig
from ntp_core.llama import LlamaConfig
from ntp_core.observe import Reason
from ntp_core.proposal import FILE_NAME, Proposal
from ntp_core.runtime import train
from ntp_core.runtime.inbox import STOP_FILE
from ntp_core.runtime.launch import LocalRanks
from tests.support.rank_pool import ROOT
from tests.support.tiny_job import A, M, V, even, reshared, train_config

TIMEOUT_S = 60.0
# Bytes are the tokens here, so the vocabulary is whole.
MODEL = LlamaConfig(width=48, heads=12, kv_heads=6, ffn=48, mlp_block=4, vocab_block=24)
JOB = JobConfig(train=train_config(MODEL), plan=even(MODEL, (2, 1), (2, 1)), steps=3)
OTHER_MODEL = replace(MODEL, kv_heads=12)
MISFIT = replace(JOB, train=train_config(OTHER_MODEL))
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
ENV = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def write(folder: Path, text: str) -> Path:
    """A config file."""
    path = folder / "job.json"
    path.write_text(text)
    return path


def launched(folder: Path, config: Path, *more: str) -> list[str]:
    """Command of one rank whose stderr goes to a file of its own."""
    command = [sys.executable, "-m", "ntp_core.runtime.train", "--config", str(config), *more]
    return ["sh", "-c", f'exec "$@" 2> "{folder}/stderr-$RANK"', "rank", *command]


def errors(folder: Path, world_size: int) -> list[str]:
    """What each rank wrote to stderr."""
    return [(folder / f"stderr-{rank}").read_text() for rank in range(world_size)]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Look until it holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)


def torchrun(
    world_size: int, config: Path, folder: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """The program under torchrun on this machine; each rank's stderr below `folder`."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "--log-dir", str(folder), "--redirects", "2"),
            *("-m", "ntp_core.runtime.train", "--config", str(config), *more),
        ],
        env={**os.environ, **ENV, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_train_program_same_losses_under_both_launchers(tmp_path: Path) -> None:
    """The program runs unchanged under LocalRanks and torchrun, to the same bits."""
    config = write(tmp_path, JOB.to_json())
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    with LocalRanks(launched(tmp_path, config, "--losses", str(ours)), 3, ENV) as ranks:
        assert ranks.wait(TIMEOUT_S) == [0, 0, 0], errors(tmp_path, 3)
    done = torchrun(3, config, tmp_path / "logs", "--losses", str(theirs))
    assert done.returncode == 0, done.stderr
    losses = json.loads(ours.read_text())
    assert JOB.steps == len(losses)
    assert losses == json.loads(theirs.read_text())
    assert errors(tmp_path, 3) == ["", "", ""]


def test_train_program_goes_on_at_another_layout_or_says_why_not(tmp_path: Path) -> None:
    """Three ranks save, two go on; once a byte is missing every rank says where, in one line."""
    saved, told = tmp_path / "saved", tmp_path / "losses.json"
    first = replace(JOB, save=SaveConfig(folder=str(saved)))
    then = replace(first, steps=5, plan=even(MODEL, (2,), (3,)))

    def end(job: JobConfig) -> tuple[set[int], list[str]]:
        command = launched(tmp_path, write(tmp_path, job.to_json()), "--losses", str(told))
        size = len(job.plan.ranks)
        with LocalRanks(command, size, ENV) as ranks:
            return set(ranks.wait(TIMEOUT_S)), errors(tmp_path, size)

    assert end(first) == ({0}, [""] * 3)
    assert end(then) == ({0}, [""] * 2)
    assert len(json.loads(told.read_text())) == 2, "steps 4 and 5"
    assert {p.name for p in saved.iterdir()} == {"latest", "step-00000003", "step-00000005"}
    part = max((saved / "step-00000005").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    codes, said = end(replace(first, steps=6))
    assert codes == {1}
    assert said == [said[0]] * 3
    assert said[0].startswith("train: CheckpointError: rank ")
    assert part.name in said[0]
    assert said[0].count("\n") == 1


def test_train_program_obeys_its_inbox(tmp_path: Path) -> None:
    """A running job takes a fault, a proposal and the wish to stop from its run directory."""
    config = write(tmp_path, replace(JOB, steps=10**9, obey_faults=True).to_json())
    losses, inbox = tmp_path / "losses.json", tmp_path / "inbox"
    inbox.mkdir()
    command = launched(tmp_path, config, "--losses", str(losses))
    shares = [{A: (4, 2), M: (8, 4), V: (5, 6)}, {A: (6,), M: (12,), V: (11,)}]
    new = reshared(JOB.plan, shares).with_epoch(3)  # the repair took epoch 2
    proposal = Proposal(base_digest=JOB.plan.digest, plan=new, reason=Reason.OPERATOR)
    with LocalRanks(command, 3, {**ENV, "NTP_INBOX": str(inbox)}) as ranks:
        fault = flip_bit(1, "layers.0.q.weight", 0, 3)
        assert fault.kind == FaultKind.FLIP_BIT
        leave_fault(inbox, fault)
        wait_for(lambda: not fault_file(inbox, 1).exists(), "the fault is obeyed")
        # Taken away only at the end of the step that repaired the fault, or later.
        (inbox / FILE_NAME).write_text(proposal.to_json())
        wait_for(lambda: not (inbox / FILE_NAME).exists(), "the proposal is taken")
        (inbox / STOP_FILE).touch()
        assert ranks.wait(TIMEOUT_S) == [0, 0, 0], errors(tmp_path, 3)
    assert not (inbox / "proposal.refused.txt").exists()
    kept = json.loads(losses.read_text())
    assert all(0 < loss < 10 for loss in kept)


@pytest.mark.parametrize(
    ("job", "ranks", "message"),
    [
        (JOB, 2, "the plan places ranks [0, 1, 2], WORLD_SIZE is 2"),
        (MISFIT, 3, "the plan is made for units"),
    ],
    ids=["wrong world size", "plan of another model"],
)
def test_train_program_bad_job_ends_every_rank_with_one_line(
    tmp_path: Path, job: JobConfig, ranks: int, message: str
) -> None:
    """Each rank says what is wrong in one line and exits with code 2; none waits for the others."""
    config = write(tmp_path, job.to_json())
    with LocalRanks(launched(tmp_path, config), ranks, ENV) as started:
        assert [2] * ranks == started.wait(TIMEOUT_S), errors(tmp_path, ranks)
    for text in errors(tmp_path, ranks):
        assert text.startswith("train: ")
        assert message in text
        assert text.count("\n") == 1, text


def test_train_program_loss_that_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    """A learning rate that blows the weights up is no error, and the file is JSON all the same."""
    train_it = replace(JOB.train, lr=1e30, warmup=0)
    job = JobConfig(train=train_it, plan=even(MODEL, (1,), (1,)), steps=6)
    losses = tmp_path / "losses.json"
    command = launched(tmp_path, write(tmp_path, job.to_json()), "--losses", str(losses))
    with LocalRanks(command, 1, ENV) as ranks:
        assert ranks.wait(TIMEOUT_S) == [0]
    kept = json.loads(losses.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert len(kept) == 6
    assert kept[0] > 0
    assert None is kept[-1]


def test_train_program_bad_job_under_torchrun(tmp_path: Path) -> None:
    """torchrun reports exit code 2, and the failing rank's own words are one line."""
    done = torchrun(2, write(tmp_path, JOB.to_json()), tmp_path / "logs")
    assert done.returncode != 0
    assert "exitcode  : 2" in done.stderr
    said = [p.read_text() for p in (tmp_path / "logs").rglob("stderr.log")]
    assert any("WORLD_SIZE is 2" in text and text.count("\n") == 1 for text in said), said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a job config"),
        (b"[]", "not a job config"),
        (b'{"train": 3}', "not a job config"),
        (b"\xff\xfe", "utf-8"),
        (b"[" * 100_000, "not a job config"),
        (JOB.to_json().replace('"steps": 3', '"steps": Infinity').encode(), "steps = inf"),
        (JOB.to_json().replace('"layers": 2', '"layers": "two"').encode(), "layers"),
        (JOB.to_json().replace('"heads": 12', '"heads": 0').encode(), "heads"),
        (JOB.to_json().replace('"heads": 12', '"hats": 12').encode(), "hats"),
        (JOB.to_json().replace('"vocab": 256', '"vocab": 250').encode(), "vocab"),
        (JOB.to_json().replace('"seq": 16', '"seq": 0').encode(), "seq"),
        (JOB.to_json().replace('"lr": 0.003', '"lr": NaN').encode(), "lr"),
        (JOB.to_json().replace('"batch": 2', '"batch": 0').encode(), "batch = 0"),
    ],
    ids=lambda value: repr(value[:16]) if isinstance(value, bytes) else None,
)
def test_train_program_malformed_config_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    """Whatever the file holds, the answer is one line on stderr and exit code 2."""
    path = tmp_path / "job.json"
    path.write_bytes(content)
    assert train.main(["--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train: ")
    assert message in said
    assert said.count("\n") == 1


def test_train_program_missing_config_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path without a file is named."""
    assert train.main(["--config", str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr().err
    assert "none.json" in said
    assert said.count("\n") == 1


def test_launch_stop_ends_a_stopped_rank_too() -> None:
    """A rank that SIGSTOP holds cannot hear SIGTERM; it is continued first, then all end."""
    with LocalRanks(SLEEPER, 3) as ranks:
        pids = ranks.pids
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED, "it stops")
        assert ranks.poll() == [None, None, None]
    assert ranks.poll() == [-signal.SIGTERM] * 3
    assert [psutil.pid_exists(pid) for pid in pids] == [False] * 3


def test_launch_death_of_one_rank_leaves_the_others(tmp_path: Path) -> None:
    """Survivors are left alone, and only the dead rank has an exit code."""
    with LocalRanks(SLEEPER, 3) as ranks:
        os.kill(ranks.pids[2], signal.SIGKILL)
        wait_for(lambda: ranks.poll()[2] is not None, "the dead rank is seen")
        assert ranks.poll() == [None, None, -signal.SIGKILL]


def test_launch_as_a_program_passes_on_the_worst_code(tmp_path: Path) -> None:
    """`python -m ntp_core.runtime.launch` ends with the first bad exit code of its ranks."""
    leave = "import os, sys; sys.exit(3 * (os.environ['RANK'] == '1'))"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ntp_core.runtime.launch", "--ranks", "2"),
            *("--", sys.executable, "-c", leave),
        ],
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 3


LAUNCHER = [sys.executable, "-m", "ntp_core.runtime.launch", "--ranks", "2", "--", *SLEEPER]


def started_ranks(launcher: subprocess.Popen[bytes], number: int) -> list[psutil.Process]:
    """The children of a launcher, once there are so many."""
    found: list[psutil.Process] = []

    def look() -> bool:
        assert launcher.poll() is None
        found[:] = psutil.Process(launcher.pid).children()
        return len(found) == number

    wait_for(look, f"{number} ranks")
    return found


def runs(process: psutil.Process) -> bool:
    """Whether a process still does something; whoever inherits a zombie may reap it late."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize(
    ("command", "num_ranks"),
    [(LAUNCHER, 2), ([sys.executable, "examples/uneven_job.py", "--steps", "100000"], 5)],
    ids=["launcher", "example"],
)
def test_launch_no_rank_outlives_its_launcher(
    command: list[str], num_ranks: int, number: signal.Signals
) -> None:
    """However the launcher, or a user's script, is ended: its ranks end too."""
    launcher = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENV})
    ranks: list[psutil.Process] = []
    try:
        ranks = started_ranks(launcher, num_ranks)
        launcher.send_signal(number)
        code = launcher.wait(TIMEOUT_S)
        wait_for(lambda: not any(map(runs, ranks)), "no rank is left")
    finally:
        for process in (launcher, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()
    assert code == (-number if number is signal.SIGKILL else 128 + number)


def test_launch_stopped_rank_is_killed_with_its_launcher() -> None:
    """A rank that SIGSTOP holds hears no other signal than this one."""
    launcher = subprocess.Popen(LAUNCHER, cwd=ROOT)
    ranks = started_ranks(launcher, 2)
    wait_for(lambda: ranks[1].cmdline() == SLEEPER, "the rank is its program")
    ranks[1].suspend()
    wait_for(lambda: ranks[1].status() == psutil.STATUS_STOPPED, "it stops")
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(runs, ranks)), "no rank is left")


def test_launch_ranks_made_in_a_thread_outlive_the_thread() -> None:
    """The kernel ties a child to a thread; a thread that ends must not take the ranks along."""
    made: list[LocalRanks] = []
    thread = threading.Thread(target=lambda: made.append(LocalRanks(SLEEPER, 2)))
    thread.start()
    thread.join()
    with made[0] as ranks:
        assert ranks.poll() == [None, None]
    assert ranks.poll() == [-signal.SIGTERM] * 2


def test_launch_hang_up_is_ignored_under_nohup() -> None:
    """What was ignored from the start stays so: the launcher goes on, and so do its ranks."""
    launcher = subprocess.Popen(["nohup", *LAUNCHER], cwd=ROOT, stdout=subprocess.DEVNULL)
    ranks = started_ranks(launcher, 2)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    wait_for(lambda: not any(map(runs, ranks)), "no rank is left")


def test_launch_unknown_command_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """As a shell says it."""
    launch = [sys.executable, "-m", "ntp_core.runtime.launch", "--ranks", "2"]
    done = subprocess.run([*launch, "--", "no-such-program-here"], cwd=ROOT, timeout=TIMEOUT_S)
    assert done.returncode == 127
    assert [x for x in capfd.readouterr().err.splitlines() if "no-such-program" in x]
