"""The run directory: private, named safely, cleared away only when nobody is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.wire import rundir
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
    rundir.claim(dirs["watched"])
    reused = rundir.create_run_dir("reused", tmp_path)
    _ring_of(reused, me[0], me[1] + 1)
    assert rundir.remove_stale(tmp_path) == [dirs["dead"], reused]
    assert rundir.list_run_dirs(tmp_path) == [dirs["live"], dirs["mixed"], dirs["watched"]]


def test_directory_without_rings_is_kept_while_it_is_young(tmp_path: Path):
    """Its job may be starting."""
    path = rundir.create_run_dir("new", tmp_path)
    assert rundir.remove_stale(tmp_path) == []
    assert rundir.remove_stale(tmp_path, now_unix_s=time.time() + 7200) == [path]


def test_damaged_ring_does_not_keep_a_directory(tmp_path: Path):
    """Nobody can tell who wrote it, and nobody can read it."""
    path = rundir.create_run_dir("broken", tmp_path)
    (path / rundir.ring_name(0, os.getpid())).write_bytes(b"junk")
    assert rundir.remove_stale(tmp_path) == [path]
    rundir.remove_run_dir(path)  # gone already is fine
