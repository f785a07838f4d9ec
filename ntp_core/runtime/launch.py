"""Local launcher: one process per rank, the rendezvous store outside the ranks.

    python -m ntp_core.runtime.launch --ranks 8 --elastic --respawn 3 -- python train.py

torchrun kills every survivor when one rank dies; this launcher leaves them alone and only reports.
With --respawn it starts dead ranks again, a while later each time; an elastic job lets them in.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from ntp_core.runtime.launchers.course import Course, Rules
from ntp_core.runtime.launchers.exit_signals import ExitSignals
from ntp_core.runtime.launchers.local import LOOK_S, LocalRanks

__all__ = ["ExitSignals", "LocalRanks", "follow", "main"]

NOT_FOUND, NOT_RUNNABLE = 127, 126


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments; ends the program in one line when they cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m ntp_core.runtime.launch",
        description="Start one process per rank and leave survivors alone when one ends.",
    )
    add_rules(parser)
    parser.add_argument("command", nargs="+", help="-- then the command of each rank")
    args = parser.parse_args(argv)
    check_rules(parser, args)
    return args


def add_rules(parser: argparse.ArgumentParser) -> None:
    """What all launchers take."""
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--elastic", action="store_true", help="the job is well when any rank has ended well"
    )
    parser.add_argument(
        "--respawn", type=int, default=0, metavar="K", help="start dead ranks again, K times in all"
    )


def check_rules(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense."""
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: give at least 1")
    if args.respawn < 0:
        parser.error(f"--respawn {args.respawn}: give 0 or more")


def tell(line: str) -> None:
    """One line to whoever started the launcher."""
    sys.stderr.write(f"launch: {line}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ntp_core.runtime.launch --ranks N -- CMD`: 0 when the job ended well."""
    args = parse(argv)
    signals = ExitSignals()
    course = Course(args.ranks, Rules(is_elastic=args.elastic, respawns=args.respawn), tell)
    try:
        with LocalRanks(args.command, args.ranks) as ranks:
            follow(ranks, course, signals.leave)
    except OSError as error:
        tell(f"cannot start {args.command[0]!r}: {error.strerror}")
        return _status_of(error)
    return course.status()


def follow(ranks: LocalRanks, course: Course, look: Callable[[], None]) -> None:
    """Tell what happens to the ranks and start again those that are due, until all is over.

    Args:
        look: called all the time; what it raises ends the wait.
    """
    while True:
        look()
        for rank, code in enumerate(ranks.poll()):
            if code is not None and course.runs(rank):
                course.ended(rank, code)
        if course.is_over():
            return
        for rank in course.due():
            _start_again(ranks, course, rank)
        time.sleep(LOOK_S)


def _start_again(ranks: LocalRanks, course: Course, rank: int) -> None:
    try:
        ranks.respawn(rank)
    except OSError as error:  # the program is gone; those that run do not need it
        course.ended(rank, _status_of(error), f"cannot be started again: {error.strerror}")
    else:
        course.started(rank)


def _status_of(error: OSError) -> int:
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE


if __name__ == "__main__":
    sys.exit(main())
