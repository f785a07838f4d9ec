"""Faults as data: left for a rank and read back the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntp_core.faults import (
    Fault,
    FaultKind,
    When,
    fault_file,
    flip_bit,
    kill_at,
    leave_fault,
    read_fault,
    slow,
)


@pytest.mark.parametrize(
    "fault",
    [
        flip_bit(2, "w", 5, 31, step=3, when=When.AFTER_BACKWARD),
        kill_at(1, 9, When.STEP_BEGIN),
        slow(0),
        Fault(kind=FaultKind.FLIP_BIT, rank=4),
    ],
)
def test_fault_left_in_a_folder_is_read_back_equal(tmp_path: Path, fault: Fault) -> None:
    """The file has the rank's name, the fault in full, and no draft stays beside it."""
    leave_fault(tmp_path, fault)
    assert fault == read_fault(fault_file(tmp_path, fault.rank))
    assert [fault_file(tmp_path, fault.rank)] == list(tmp_path.iterdir())
