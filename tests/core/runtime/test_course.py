"""What a launcher makes of the ends of its ranks, with a clock of the test's own."""

from __future__ import annotations

import signal

import pytest

from ntp_core.runtime.launchers.course import FINISH_S, LONGEST_REST_S, Course, Rules


class Watched:
    """A course, its clock, and what it has told."""

    def __init__(self, num_ranks: int, **rules: object) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        made = Rules(**rules)  # type: ignore[arg-type]
        self.course = Course(num_ranks, made, self.said.append, lambda: self.now_s)

    def due_at(self, now_s: float) -> list[int]:
        """Whom to start at that time."""
        self.now_s = now_s
        return self.course.due()


def test_course_rests_grow_with_each_death_of_a_rank_and_have_a_bound() -> None:
    """1, 2, 4 ... seconds, a minute at most; another rank begins at 1 again."""
    w = Watched(3, is_elastic=True, respawns=9)
    for death in range(8):
        rest_s, begin_s = min(2.0**death, LONGEST_REST_S), w.now_s
        w.course.ended(1, -signal.SIGKILL)
        assert w.due_at(begin_s + rest_s - 0.001) == []
        assert w.due_at(begin_s + rest_s) == [1]
        assert w.due_at(begin_s + rest_s) == [], "named once"
        w.course.started(1)
    w.course.ended(2, 7)
    assert w.said[-1] == "rank 2 ended with status 7; 2 run; started again in 1 s (9 of 9)"
    w.course.ended(1, -signal.SIGKILL)
    assert w.said[-1] == "rank 1 was ended by SIGKILL; 1 run", "none is left"
    assert w.course.respawns_left == 0


def test_course_is_over_when_all_are_dead_though_one_is_due() -> None:
    """What it would return to is gone; the status is the first bad one by rank."""
    w = Watched(2, is_elastic=True, respawns=5)
    w.course.ended(1, -signal.SIGTERM)
    assert not w.course.is_over()
    w.course.ended(0, 3)
    assert w.course.is_over()
    assert w.course.status() == 3
    assert w.said[-1] == "rank 0 ended with status 3; 0 run"


def test_course_nobody_is_started_again_once_the_job_is_finished() -> None:
    """A rank that ended well has finished an elastic job."""
    w = Watched(3, is_elastic=True, respawns=5)
    w.course.ended(1, 1)
    w.course.ended(0, 0)
    assert w.due_at(100.0) == []
    w.course.ended(2, 1)
    assert w.said[-1] == "rank 2 ended with status 1; 0 run"
    assert w.course.is_over()
    assert w.course.status() == 0


def test_course_rank_that_stands_still_does_not_keep_a_finished_job() -> None:
    """An elastic one only: in others each rank counts."""
    for is_elastic in (True, False):
        w = Watched(2, is_elastic=is_elastic)
        w.course.ended(0, 0)
        assert not w.course.is_over()
        w.now_s = FINISH_S
        assert w.course.is_over() is is_elastic


@pytest.mark.parametrize(
    ("codes", "status", "elastic_status"),
    [
        ((0, 0), 0, 0),
        ((0, 5), 5, 0),
        ((-9, 0), 137, 0),
        ((-9, 5), 137, 137),
        ((2, -15), 2, 2),
    ],
)
def test_course_status(codes: tuple[int, ...], status: int, elastic_status: int) -> None:
    """As a shell says it: 128 and the signal's number."""
    for is_elastic, expected in ((False, status), (True, elastic_status)):
        w = Watched(2, is_elastic=is_elastic)
        for rank, code in enumerate(codes):
            w.course.ended(rank, code)
        assert w.course.status() == expected


def test_course_names_an_end_that_has_no_name() -> None:
    """A real-time signal has only a number; a launcher may know better than the code."""
    w = Watched(3)
    w.course.ended(0, -40)
    w.course.ended(1, 255, "was lost with its node")
    assert w.said == [
        "rank 0 was ended by signal 40; 2 run",
        "rank 1 was lost with its node; 1 run",
    ]
