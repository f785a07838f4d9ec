"""The pool of ranks itself: answers, failures, deaths, hangs, reuse."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support import bodies_pool
from tests.support.rank_pool import RankDied, RankFailed, RankPool, RankTimeout


def test_pool_body_returns_by_rank_and_processes_are_reused(rank_pool: RankPool) -> None:
    """Results come back by rank, and a second run uses the same processes."""
    first = rank_pool.run(bodies_pool.add_ranks, 3, start=10)
    second = rank_pool.run(bodies_pool.add_ranks, 2, start=20)
    assert [total for _, total in first] == [13, 13, 13]
    assert [total for _, total in second] == [21, 21]
    assert [pid for pid, _ in first][:2] == [pid for pid, _ in second]


def test_pool_body_raises_names_rank_and_frees_the_others(rank_pool: RankPool) -> None:
    """A failing rank's traceback comes back, the ranks that waited for it serve the next run."""
    before = rank_pool.run(bodies_pool.add_ranks, 3, start=0)
    with pytest.raises(RankFailed, match=r"rank 1 failed first(.|\n)*rank 1 fails as told"):
        rank_pool.run(bodies_pool.fail_on, 3, rank=1)
    assert before == rank_pool.run(bodies_pool.add_ranks, 3, start=0)


def test_pool_failure_while_others_wait_in_the_store_is_clear(rank_pool: RankPool) -> None:
    """Ranks that nothing frees are ended, and the first failure is what the test sees."""
    with pytest.raises(RankFailed, match="rank 2 fails as told"):
        rank_pool.run(bodies_pool.fail_while_others_make_a_group, 3, rank=2)
    assert [t for _, t in rank_pool.run(bodies_pool.add_ranks, 3, start=0)] == [3, 3, 3]


def test_pool_hung_rank_times_out_with_its_stack_and_is_replaced(rank_pool: RankPool) -> None:
    """A rank that does not return is named with the line it stands at; the pool works on."""
    before = rank_pool.run(bodies_pool.add_ranks, 2, start=0)
    with pytest.raises(RankTimeout, match=r"ranks \[1\] did not return(.|\n)*wait_for_nobody"):
        rank_pool.run(bodies_pool.wait_for_nobody, 2, timeout_s=0.5, rank=1)
    after = rank_pool.run(bodies_pool.add_ranks, 2, start=0)
    assert before[0] == after[0]
    assert before[1][0] != after[1][0]


def test_pool_expected_death_gives_the_survivors_answers(rank_pool: RankPool) -> None:
    """A body may kill its own process; the survivors see their group fail and answer."""
    assert rank_pool.run(bodies_pool.die_on, 2, expect_death={1}, rank=1) == [
        "PeerLost",
        None,
    ], "the survivor's collective says that a peer is lost"
    assert [t for _, t in rank_pool.run(bodies_pool.add_ranks, 2, start=0)] == [1, 1]


def test_pool_unexpected_death_fails_the_run(rank_pool: RankPool) -> None:
    """A rank that dies by surprise fails the test with its exit code."""
    with pytest.raises(RankDied, match="rank 0 ended with -9"):
        rank_pool.run(bodies_pool.die_on, 2, rank=0)


def test_pool_missing_death_fails_the_run(rank_pool: RankPool) -> None:
    """A rank that was to die but lives fails the test: the fault did not fire."""
    with pytest.raises(RankDied, match=r"ranks \[1\] were to die, but returned"):
        rank_pool.run(bodies_pool.add_ranks, 2, expect_death={1}, start=0)


def test_pool_ranks_leave_together(rank_pool: RankPool) -> None:
    """No rank leaves its group while another still reads from it."""
    assert rank_pool.run(bodies_pool.leave_early, 3) == [0, 1, 2]


def test_pool_leaving_it_ends_its_processes(tmp_path: Path) -> None:
    """No process outlives its pool."""
    with RankPool(tmp_path) as pool:
        pool.run(bodies_pool.add_ranks, 1, start=0)
        pids = pool.pids
        assert [psutil.pid_exists(pid) for pid in pids] == [True]
    assert [psutil.pid_exists(pid) for pid in pids] == [False]
