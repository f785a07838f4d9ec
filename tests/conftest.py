"""What all tests share: a pool of real ranks, and the rule that in CI nothing is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Real rank processes that run test bodies; they start at the first use."""
    # Imports torch, which tests of the sidecar alone need not wait for.
    from tests.support.rank_pool import RankPool

    with RankPool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


class SkipWatch:
    """Notes what was skipped; where a skip is a failure, fails the session and names each."""

    def __init__(self, is_ci: bool) -> None:
        self.is_ci = is_ci
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or a fixture it needs, was skipped; an expected failure is no skip."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A whole file was skipped while it was read."""
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn a passing session into a failing one."""
        if self.is_ci and self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why."""
        if self.is_ci and self.skipped:
            terminalreporter.section("skipped tests fail the session in CI", red=True)
            for name in self.skipped:
                terminalreporter.line(name)


def pytest_configure(config: pytest.Config) -> None:
    """Watch for skips."""
    config.pluginmanager.register(SkipWatch(bool(os.environ.get("CI"))), "skip-watch")
