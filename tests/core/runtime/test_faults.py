"""Faults left for a running rank: carried out, or refused with a line; the job goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ntp_core.faults import When, fault_file, flip_bit, leave_fault, slow
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.faults import MAX_LEFT, Faults
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama
from ntp_core.runtime.shards import Shards
from tests.support.recording_observer import RecordingObserver
from tests.support.tiny_job import GROUPED, even


@pytest.fixture
def shards() -> Shards:
    """The parameters of a lone rank."""
    group = TensorParallelGroup(Comm(0, 1), (0,))
    return Llama(GROUPED, group, even(GROUPED, (1,), (1,)), 0, 0).shards


BAD: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "not JSON": lambda p: p.write_text("{"),
    "nested": lambda p: p.write_text("[" * 60_000),
    "too large": lambda p: p.write_text(" " * 99_999),
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda p: p.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("plant", BAD.values(), ids=BAD)
def test_faults_malformed_file_is_refused_and_the_next_one_obeyed(
    tmp_path: Path, shards: Shards, plant: Callable[[Path], object]
) -> None:
    """Nothing is raised, nothing waits, and the name is free again."""
    plant(fault_file(tmp_path, 0))
    observer = RecordingObserver()
    faults = Faults(0, observer, folder=tmp_path)
    faults.at(1, When.STEP_BEGIN, shards)
    assert not os.path.lexists(fault_file(tmp_path, 0))
    leave_fault(tmp_path, slow(0))
    faults.at(2, When.STEP_BEGIN, shards)
    assert [c[0] for c in observer.of("fault_injected")] == [2]


def test_faults_that_cannot_be_carried_out_here_are_refused_with_a_line(
    tmp_path: Path, shards: Shards, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown tensor, an element beyond the shard, and another rank's fault."""
    faults = Faults(0, RecordingObserver(), folder=tmp_path)
    for bad in (flip_bit(0, "nowhere", 0, 1), flip_bit(0, "norm.weight", 10**9, 1)):
        leave_fault(tmp_path, bad)
        faults.at(1, When.STEP_BEGIN, shards)
    leave_fault(tmp_path, slow(1))
    fault_file(tmp_path, 1).rename(fault_file(tmp_path, 0))
    faults.at(2, When.STEP_BEGIN, shards)
    lines = capsys.readouterr().err.splitlines()
    assert [faults.refused, faults.fired, len(lines)] == [3, 0, 3]
    assert "nowhere" in lines[0]
    assert "norm.weight" in lines[1]
    assert "rank 1" in lines[2]


def test_faults_that_wait_for_their_step_are_bounded(tmp_path: Path, shards: Shards) -> None:
    """One more than there is room for is refused."""
    faults = Faults(0, RecordingObserver(), folder=tmp_path)
    for _ in range(MAX_LEFT + 1):
        leave_fault(tmp_path, slow(0, step=10**6))
        faults.at(1, When.STEP_BEGIN, shards)
    assert [faults.refused, faults.fired] == [1, 0]
