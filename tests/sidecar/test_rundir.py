"""The run directory: private, named safely, cleared away only when nobody is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.wire import holders, rundir
from sidecar.wire.process import process_start_ticks
from sidecar.wire.ring import BadJobId, RingWriter
from tests.support.rings import small_header


def _ring_of(run_dir: Path, pid: int, ticks: int) -> None:
    header = replace(small_header(), pid=pid, pid_start_ticks=ticks)
    RingWriter.create(run_dir / rundir.ring_name(0, pid), header)


@pytest.fixture
def gone() -> tuple[int, int]:
    """pid and start time of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_start_ticks(child.pid)
    child.communicate(b"\n", timeout=30)
    return child.pid, ticks


def test_ring_name_round_trip_refuses_other_names():
    """Only exact names are rings."""
    assert rundir.parse_ring_name(rundir.ring_name(12, 3456)) == (12, 3456)
    for name in ("rank-1.ring", "rank--1-2.ring", ".rank-1-2.ring.draft", "rank-1-2.ringx", "x"):
        assert rundir.parse_ring_name(name) is None


def test_run_dir_is_private_and_used_again(tmp_path: Path):
    """Mode 0700 on both levels, also when someone widened it."""
    path = rundir.create_run_dir("job", tmp_path)
    assert path == tmp_path / f"nutp-{os.getuid()}" / "job"
    path.chmod(0o755)
    assert rundir.create_run_dir("job", tmp_path) == path
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent)] == [0o700, 0o700]


def test_unsafe_place_is_refused(tmp_path: Path):
    """A link or a file under our name is not used, a bad job id makes nothing."""
    with pytest.raises(BadJobId):
        rundir.create_run_dir("../x", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    parent = tmp_path / f"nutp-{os.getuid()}"
    parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(rundir.RunDirRefused, match="not a directory"):
        rundir.create_run_dir("job", tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_shared_memory_temporary_files_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """One line says so."""
    base = rundir.default_base(tmp_path / "no-such-place")
    assert base.is_dir()
    assert capsys.readouterr().err.count("\n") == 1
    assert rundir.default_base(tmp_path) == tmp_path
    assert capsys.readouterr().err == ""


def test_plan_is_written_once_and_read_back(tmp_path: Path):
    """The name is the content's digest, so a second writer changes nothing."""
    digest = "00112233aabbccdd"
    path = rundir.write_plan(tmp_path, digest, '{"plan": 1}')
    inode = path.stat().st_ino
    assert rundir.write_plan(tmp_path, digest, '{"plan": 1}').stat().st_ino == inode
    assert rundir.read_plan(tmp_path, digest) == '{"plan": 1}'
    assert [p.name for p in tmp_path.iterdir()] == [f"plan-{digest}.json"]
    with pytest.raises(ValueError, match="digest"):
        rundir.write_plan(tmp_path, "../../etc/pass", "x")


def test_dead_job_is_cleared_away_and_living_ones_are_not(tmp_path: Path, gone: tuple[int, int]):
    """One living writer or one living owner keeps a directory; so does a pid's old number not."""
    me = (os.getpid(), process_start_ticks(os.getpid()))
    dirs = {n: rundir.create_run_dir(n, tmp_path) for n in ("dead", "live", "mixed", "watched")}
    _ring_of(dirs["dead"], *gone)
    _ring_of(dirs["live"], *me)
    _ring_of(dirs["mixed"], *gone)
    _ring_of(dirs["mixed"], *me)
    _ring_of(dirs["watched"], *gone)
    holders.claim(dirs["watched"])
    reused = rundir.create_run_dir("reused", tmp_path)
    _ring_of(reused, me[0], me[1] + 1)
    assert holders.remove_stale(tmp_path) == [dirs["dead"], reused]
    assert rundir.list_run_dirs(tmp_path) == [dirs["live"], dirs["mixed"], dirs["watched"]]


def test_directory_without_rings_is_kept_while_it_is_young(tmp_path: Path):
    """Its job may be starting."""
    path = rundir.create_run_dir("new", tmp_path)
    assert holders.remove_stale(tmp_path) == []
    assert holders.remove_stale(tmp_path, now_unix_s=time.time() + 7200) == [path]


def test_damaged_ring_does_not_keep_a_directory(tmp_path: Path):
    """Nobody can tell who wrote it, and nobody can read it."""
    path = rundir.create_run_dir("broken", tmp_path)
    (path / rundir.ring_name(0, os.getpid())).write_bytes(b"junk")
    assert holders.remove_stale(tmp_path) == [path]
    holders.remove_run_dir(path)  # gone already is fine


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process that lives until the end of the test."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.communicate(b"\n", timeout=30)


def _plain_dir(base: Path) -> Path:
    return base / "precious"


def _wrong_parent(base: Path) -> Path:
    return base / "nutp-other" / "job"


def _bad_name(base: Path) -> Path:
    return rundir.user_dir(base) / ".job"


@pytest.mark.parametrize("place", [_plain_dir, _wrong_parent, _bad_name])
def test_remove_refuses_every_directory_that_is_no_run_directory(
    tmp_path: Path, place: Callable[[Path], Path]
):
    """Whatever the caller says: not a file in it is touched, even under names that we know."""
    path = place(tmp_path)
    path.mkdir(parents=True)
    (path / "stop").touch()
    for remove in (holders.remove_run_dir, lambda p: holders.release_run_dir(p, 0.0)):
        with pytest.raises(rundir.RunDirRefused, match="stays"):
            remove(path)
    assert [p.name for p in path.iterdir()] == ["stop"]


@pytest.mark.parametrize("level", ["job", "user"])
def test_remove_follows_no_link(tmp_path: Path, level: str):
    """A link in the place of either level leads to somebody else's files."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "job").mkdir(parents=True)
    (elsewhere / "job" / "stop").touch()
    if level == "user":
        rundir.user_dir(tmp_path).symlink_to(elsewhere)
    else:
        rundir.user_dir(tmp_path).mkdir()
        (rundir.user_dir(tmp_path) / "job").symlink_to(elsewhere / "job")
    with pytest.raises(rundir.RunDirRefused):
        holders.remove_run_dir(rundir.run_dir_path("job", tmp_path))
    assert holders.remove_stale(tmp_path, now_unix_s=time.time() + 7200) == []
    assert (elsewhere / "job" / "stop").exists()


def test_remove_leaves_and_names_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Our files go, a stranger's file, folder and link target stay; said in one line, once."""
    path = rundir.create_run_dir("job", tmp_path)
    _ring_of(path, 1, 1)
    for name in ("stop", "proposal.json", "proposal.2.refused.txt", "fault-3.json", "facts.draft"):
        (path / name).touch()
    (tmp_path / "theirs").write_text("x")
    (path / "facts.json").symlink_to(tmp_path / "theirs")
    (path / "checkpoints").mkdir()
    (path / "notes.txt").touch()
    (path / "demo").mkdir()
    (path / "demo" / "job.log").touch()
    (path / "demo" / "thesis").touch()
    assert holders.remove_run_dir(path) is False
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for name in ("checkpoints", "notes.txt", "demo/thesis", str(path)):
        assert name in err
    assert sorted(p.name for p in path.iterdir()) == ["checkpoints", "demo", "notes.txt"]
    assert (tmp_path / "theirs").read_text() == "x"
    assert holders.remove_stale(tmp_path, now_unix_s=time.time() + 7200) == []
    assert capsys.readouterr().err == ""


def test_remove_takes_the_folder_of_a_demo_with_it(tmp_path: Path):
    """All names that a demo leaves are known."""
    path = rundir.create_run_dir("demo-1", tmp_path)
    (path / "demo").mkdir()
    outbox = ("outbox-0123456789ab.sqlite", "outbox-0123456789ab.sqlite-wal")
    logs = ("job.log", "sidecar.log", "reference.log")
    files = ("job.json", "losses.json", "reference.json", "reference-losses.json", "webhook-secret")
    for name in (*outbox, *logs, *files):
        (path / "demo" / name).touch()
    assert holders.remove_run_dir(path) is True
    assert not path.exists()


def test_open_clears_what_a_dead_job_left(tmp_path: Path, gone: tuple[int, int]):
    """Its wish to stop, its proposals and faults are not for the next job of that name."""
    path = rundir.create_run_dir("job", tmp_path)
    _ring_of(path, *gone)
    for name in ("stop", "proposal.json", "fault-0.json", "facts.json", f"owner-{gone[0]}-1"):
        (path / name).touch()
    assert holders.open_run_dir("job", [tmp_path]) == path
    (mark,) = path.iterdir()
    assert mark.name == f"owner-{os.getpid()}-{process_start_ticks(os.getpid())}"


@pytest.mark.parametrize("has_ring", [True, False], ids=["rank", "owner"])
def test_open_refuses_a_living_job(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], has_ring: bool
):
    """One living rank or owner; the message names the id, the process and the fix."""
    path = rundir.create_run_dir("job", tmp_path)
    if has_ring:
        _ring_of(path, sleeper.pid, process_start_ticks(sleeper.pid))
    else:
        holders.claim(path, sleeper.pid)
    (path / "stop").touch()
    with pytest.raises(holders.RunDirInUse, match=f"'job' is in use by process {sleeper.pid}"):
        holders.open_run_dir("job", [tmp_path])
    assert (path / "stop").exists()


def test_release_leaves_what_another_process_still_uses(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
):
    """Only the own mark goes; when the other has ended, a later start clears the rest."""
    path = holders.open_run_dir("job", [tmp_path])
    other = holders.claim(path, sleeper.pid)
    assert holders.release_run_dir(path, 0.0) is False
    assert list(path.iterdir()) == [other]
    sleeper.kill()
    sleeper.wait()
    assert holders.remove_stale(tmp_path) == [path]


def _file_there(base: Path) -> None:
    rundir.user_dir(base).touch()


def _link_there(base: Path) -> None:
    rundir.user_dir(base).symlink_to(base)


def _base_is_file(base: Path) -> None:
    base.rmdir()
    base.touch()


@pytest.mark.parametrize("spoil", [_file_there, _link_there, _base_is_file, Path.rmdir])
def test_open_passes_over_a_base_that_will_not_do(
    tmp_path: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
):
    """The next base serves, one line says why, and nothing is left in the first."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    spoil(first)
    assert holders.open_run_dir("job", [first, second]) == rundir.run_dir_path("job", second)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(first) in err and f"rings go to {second}" in err
    with pytest.raises(rundir.RunDirRefused, match=str(first)):
        holders.open_run_dir("job", [first])
    assert not first.is_dir() or [p.is_dir() and not p.is_symlink() for p in first.iterdir()] in (
        [],
        [False],
    )


@pytest.mark.parametrize(
    ("free_blocks", "free_files", "said"), [(10, 99, "full"), (9999, 3, "more files")]
)
def test_base_without_room_is_refused(tmp_path: Path, free_blocks: int, free_files: int, said: str):
    """Blocks or files: what is missing is named."""
    room = os.statvfs_result((4096, 4096, 9999, 9999, free_blocks, 99, 99, free_files, 0, 255))
    with pytest.raises(OSError, match=said):
        rundir.check_base(tmp_path, lambda _: room)
    rundir.check_base(tmp_path)


def test_probed_directories_of_a_failed_start_are_taken_back(tmp_path: Path):
    """A base in which the job's own directory cannot be made keeps no empty parent."""
    blocked, good = tmp_path / "blocked", tmp_path / "good"
    for base in (blocked, good):
        base.mkdir()
    rundir.user_dir(blocked).mkdir()
    (rundir.user_dir(blocked) / "job").touch()
    assert holders.open_run_dir("job", [blocked, good]).is_relative_to(good)
    assert [p.name for p in rundir.user_dir(blocked).iterdir()] == ["job"]


def test_pipe_named_like_a_ring_or_a_plan_holds_nothing_up(tmp_path: Path):
    """Whoever looks for dead jobs waits for no writer of a pipe, and the directory goes."""
    path = rundir.create_run_dir("pipes", tmp_path)
    os.mkfifo(path / rundir.ring_name(0, os.getpid()))
    os.mkfifo(path / rundir.plan_name("0" * 16))
    with pytest.raises(OSError, match="not a regular file"):
        rundir.read_plan(path, "0" * 16)
    assert not holders.is_in_use(path)
    assert holders.remove_stale(tmp_path) == [path]
