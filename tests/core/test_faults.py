"""Faults as data: left for a rank and read back the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ntp_core.errors import InvalidInput
from ntp_core.faults import (
    Fault,
    FaultKind,
    When,
    fault_file,
    flip_bit,
    kill_at,
    leave_fault,
    parse_fault,
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": 9}, "kind = 9"),
        ({"kind": True}, "kind = True"),
        ({"when": "1"}, "when = '1'"),
        ({"rank": -1}, "rank = -1"),
        ({"step": 1.5}, "step = 1.5"),
        ({"element": float("nan")}, "element = nan"),
        ({"bit": 32}, "bit = 32"),
        ({"tensor": 3}, "tensor"),
    ],
)
def test_fault_file_with_an_odd_value_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    """The field and its value stand in the message."""
    body = {"kind": 1, "when": 1, "rank": 0, "step": 0, "tensor": "w", "element": 0, "bit": 0}
    with pytest.raises(InvalidInput, match=message):
        parse_fault(json.dumps(body | change).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"[" * 99_999, b"\xff", b"9" * 9999])
def test_fault_file_of_something_else_is_refused(data: bytes) -> None:
    """Whatever a file holds, the answer is one kind of refusal."""
    with pytest.raises(InvalidInput):
        parse_fault(data)
