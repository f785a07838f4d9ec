"""In CI a skipped test fails the session; elsewhere it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
SKIPS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="no server here")
def test_skips():
    pass
"""
FILE_SKIPS = "import pytest\npytest.skip('not on this machine', allow_module_level=True)\n"
EXPECTED_FAILURE = """
import pytest

@pytest.mark.xfail(reason="known")
def test_fails():
    assert False
"""


@pytest.mark.parametrize(
    ("content", "ci", "code", "named"),
    [
        (SKIPS, "true", 1, "test_some.py::test_skips"),
        (SKIPS, "", 0, ""),
        (FILE_SKIPS + SKIPS, "true", 1, "test_some.py"),
        (EXPECTED_FAILURE, "true", 0, ""),
    ],
    ids=["skip in CI", "skip elsewhere", "file skipped in CI", "expected failure in CI"],
)
def test_skip_watch_fails_the_session_only_in_ci(
    tmp_path: Path, content: str, ci: str, code: int, named: str
) -> None:
    """The exit code and the summary say which test was skipped."""
    (tmp_path / "test_some.py").write_text(content)
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert code == done.returncode, done.stdout
    assert named in done.stdout
    assert (code == 1) == ("skipped tests fail the session in CI" in done.stdout)
