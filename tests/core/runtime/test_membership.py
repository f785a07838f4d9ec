"""Rounds of meeting on a real store, ranks as threads: one outcome, whoever comes late or dies."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from ntp_core.errors import Fenced, InvalidInput, StateLost
from ntp_core.runtime.elastic.identity import Identity, Life
from ntp_core.runtime.elastic.membership import Hello, Membership, Patience, Round, dead_key

PATIENCE = Patience(silent_s=0.3, stopped_s=0.1, newcomer_s=20.0)
HERE = Identity.of_this_process()


def identity(rank: int) -> Identity:
    """Of a process on another host, of which nothing can be seen from here."""
    return Identity("elsewhere", rank, "1")


def member(store: HashStore, rank: int, patience: Patience = PATIENCE) -> Membership:
    """A rank that lives elsewhere."""
    return Membership(store, rank, patience, identity=identity(rank))


def hello(m: Membership, decided: int = 0, *, is_new: bool = False, pending: bool = False) -> Hello:
    """What a rank says."""
    return Hello(
        rank=m.rank, identity=m.identity, is_new=is_new, decided=decided, is_pending=pending
    )


def everybody(found: Round) -> dict[str, Any]:
    """All go on."""
    return {"members": sorted(found.hellos)}


def outcome(future: Future[Round]) -> tuple[int, ...] | str:
    """Members that a rank believes in, or that it is fenced."""
    try:
        return tuple(future.result(30).outcome["members"])
    except Fenced:
        return "fenced"


@pytest.mark.parametrize("seed", range(8))
def test_meet_has_one_outcome_whoever_closes(seed: int) -> None:
    """Six ranks come in any order; one or two never do."""
    draw, store = random.Random(seed), HashStore()
    ranks = list(range(6))
    missing = set(draw.sample(ranks, draw.randint(0, 2)))
    there = [g for g in ranks if g not in missing]
    draw.shuffle(there)
    with ThreadPoolExecutor(6) as pool:
        made = []
        for g in there:
            m = member(store, g)
            made.append(pool.submit(m.meet, 1, hello(m), ranks, everybody))
        assert {outcome(f) for f in made} == {tuple(sorted(there))}
    assert member(store, 0).current() == 1


def test_meet_late_rank_is_fenced() -> None:
    """It comes when the round is closed, and learns that it is not in it."""
    store = HashStore()
    first = member(store, 0)
    assert first.meet(1, hello(first), [0, 1], everybody).outcome == {"members": [0]}
    late = member(store, 1)
    with pytest.raises(Fenced, match="generation 1 was formed without rank 1"):
        late.meet(1, hello(late), [0, 1], everybody)


def test_meet_is_closed_only_by_one_that_has_seen_all_decisions() -> None:
    """The rank behind does not know the plan in force."""
    store = HashStore()
    closed_by: list[int] = []
    with ThreadPoolExecutor(2) as pool:

        def enter(rank: int, decided: int) -> Round:
            m = member(store, rank)

            def decide(found: Round) -> dict[str, Any]:
                closed_by.append(rank)
                return everybody(found)

            return m.meet(1, hello(m, decided, pending=decided == 4), [0, 1], decide)

        made = [pool.submit(enter, 0, 4), pool.submit(enter, 1, 5)]
        rounds = [f.result(30) for f in made]
    assert set(closed_by) == {1}
    assert [r.newest for r in rounds] == [5, 5]


def test_meet_does_not_wait_for_a_process_whose_end_was_seen() -> None:
    """By its host, which tells the others."""
    store = HashStore()
    gone = member(store, 1)
    gone.introduce(0)
    store.set(dead_key(gone.identity), "1")
    first = member(store, 0, replace(PATIENCE, silent_s=60.0))
    assert first.meet(1, hello(first), [0, 1], everybody).outcome == {"members": [0]}


def test_life_of_a_process_of_this_host() -> None:
    """It runs, then it is dead; its number alone would not tell."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    theirs = Identity(HERE.host, process.pid, fields[19])
    assert theirs.life() is Life.RUNS
    assert Identity(HERE.host, process.pid, "1").life() is Life.DEAD
    assert Identity("elsewhere", process.pid, "1").life() is Life.UNKNOWN
    process.kill()
    process.communicate()
    assert theirs.life() is Life.DEAD


def test_knock_is_heard_and_let_in() -> None:
    """A newcomer waits; the members meet for it and take it in."""
    store = HashStore()
    old = [member(store, g) for g in (0, 1)]
    old[0].begin()
    with ThreadPoolExecutor(3) as pool:
        new = pool.submit(member(store, 5).knock)
        while not old[0].has_newcomers():
            pass
        made = [pool.submit(m.meet, 1, hello(m), [0, 1], everybody) for m in old]
        rounds = [f.result(30) for f in (*made, new)]
    assert {tuple(r.outcome["members"]) for r in rounds} == {(0, 1, 5)}
    assert not old[0].has_newcomers()


def test_knock_without_a_place_waits_without_knocking_again() -> None:
    """It is let in by a later round that has a place, and causes none itself."""
    store = HashStore()
    old = member(store, 0)
    old.begin()
    with ThreadPoolExecutor(2) as pool:
        new = pool.submit(member(store, 5).knock)
        while not old.has_newcomers():
            pass
        found = old.meet(1, hello(old), [0], lambda r: {"members": [0]})
        assert set(found.hellos) == {0, 5}
        while old.read_hello(2, 5) is None:
            assert not old.has_newcomers()
        old.meet(2, hello(old), [0], everybody)
        assert new.result(30).generation == 2


def test_knock_under_a_rank_that_lives_is_refused() -> None:
    """Two processes cannot be one rank."""
    store = HashStore()
    holder = Membership(store, 0, PATIENCE, identity=HERE)
    holder.introduce(0)
    holder.begin()
    with pytest.raises(InvalidInput, match=f"rank 0 is process {HERE.pid} and lives"):
        member(store, 0).knock()


def test_knock_after_the_end_is_told_so() -> None:
    """Nobody would ever let it in."""
    store = HashStore()
    old = member(store, 0)
    old.begin()
    old.end()
    with pytest.raises(Fenced, match="the job ended before rank 5 was let in"):
        member(store, 5).knock()


def test_meet_of_newcomers_only_ends_in_words() -> None:
    """All who held anything are gone."""
    store = HashStore()
    m = member(store, 3, replace(PATIENCE, newcomer_s=0.5))
    with pytest.raises(StateLost, match="no rank is left"):
        m.meet(2, hello(m, is_new=True), [0, 3], everybody)
