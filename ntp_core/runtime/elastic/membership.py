"""Who is a member: rounds of meeting on a store outside the ranks.

Generation g of the groups ends when anybody calls for g + 1. Then each survivor says hello, the
dead are found dead, and one survivor closes the round: it writes down members and plan with a
compare-and-set, so that there is one outcome whatever the others think. A rank that is not in it
is fenced: its groups are of an old generation, nobody listens there, and what it holds is old.

    ntp/current        the newest generation whose round is closed
    ntp/G/call         somebody wants generation G
    ntp/G/hello/R      rank R is there for it
    ntp/G/close        the outcome
    ntp/knocks         how often newcomers have knocked; ntp/knock/N is the rank that did, N is
                       drawn from ntp/tickets
    ntp/dead/PID@HOST  a process of which somebody saw the end
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from ntp_core.errors import Fenced, InvalidInput, StateLost
from ntp_core.runtime.elastic.identity import Identity, Life

LOOK_S = 0.01
MAX_WAITING = 4096
"""Newcomers that are kept in mind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a member that lives but does not come, in seconds.

    Attributes:
        silent_s: for one that runs, or of which nothing can be seen (another host).
        stopped_s: for one that is seen standing still all that time.
        newcomer_s: a newcomer gives up when nobody lets it in for so long.
    """

    silent_s: float = 30.0
    stopped_s: float = 2.0
    newcomer_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank that is there, and where it stands.

    Attributes:
        is_new: it holds nothing of the job's state.
        decided: decisions it has carried out.
        is_pending: it has put its part into the next one.
        step: the last committed one.
        stage: how far it is with what follows that step.
        epoch: of its plan.
        tried: the newest epoch that it has begun to change to.
        is_torn: it was stopped while it went back to a checkpoint; what it holds is of no use.
    """

    rank: int
    identity: Identity
    is_new: bool
    decided: int = 0
    is_pending: bool = False
    step: int = 0
    stage: int = 0
    epoch: int = 0
    tried: int = 0
    is_torn: bool = False

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Hello:
        """Inverse of `to_json`."""
        body = json.loads(text)
        return cls(**{**body, "identity": Identity(**body["identity"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The outcome of a meeting.

    Attributes:
        hellos: of everybody who was there, by rank.
        outcome: what the closing survivor decided, as plain data.
    """

    generation: int
    hellos: dict[int, Hello]
    outcome: dict[str, Any]

    @property
    def survivors(self) -> list[Hello]:
        """Those who hold state, by rank."""
        return [h for _, h in sorted(self.hellos.items()) if not h.is_new]

    @property
    def newest(self) -> int:
        """Decisions that the job has made: the most that a survivor has carried out."""
        return max((h.decided for h in self.survivors), default=0)


Decide = Callable[[Round], dict[str, Any]]


@dataclass(slots=True)
class Membership:
    """One rank's part in the rounds.

    Args:
        store: a client of its own: one that another thread waits in would hold this one up.
        rank: global.
        sleep, clock: seconds.
    """

    store: Store
    rank: int
    patience: Patience = field(default_factory=Patience)
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    identity: Identity = field(default_factory=Identity.of_this_process)
    _knocks: int = 0
    _waiting: set[int] = field(default_factory=set)  # newcomers without a place

    def current(self) -> int | None:
        """The newest generation; None before the job began."""
        return int(self.store.get("ntp/current")) if self.store.check(["ntp/current"]) else None

    def begin(self) -> None:
        """Generation 0 stands: all ranks of the first plan have met."""
        self.store.set("ntp/current", "0")

    def end(self) -> None:
        """The job is over; nobody is let in any more."""
        self.store.set("ntp/over", "1")

    def is_called(self, generation: int) -> bool:
        """Whether anybody wants that generation: those before it are over."""
        return bool(self.store.check([f"ntp/{generation}/call"]))

    def has_newcomers(self) -> bool:
        """Whether someone has knocked since the last round."""
        return self.store.add("ntp/knocks", 0) > self._knocks

    def meet(self, generation: int, hello: Hello, expected: Iterable[int], decide: Decide) -> Round:
        """Take part in the round of a generation as a survivor.

        Args:
            expected: members of the generation before.
            decide: what comes of it; called on one survivor that has seen all decisions, or on
                several, of which one is heeded.

        Raises:
            Fenced: the round was closed without this rank.
            StateLost: nobody is left who could close it.
        """
        deadline = self.clock() + self.patience.newcomer_s
        self.store.set(f"ntp/{generation}/call", "1")
        self.store.set(f"ntp/{generation}/hello/{self.rank}", hello.to_json())
        watch = _Watch(self, generation, tuple(expected))
        while (text := self._read(f"ntp/{generation}/close")) is None:
            hellos = watch.look()
            if hellos is not None:
                found = Round(generation=generation, hellos=hellos, outcome={})
                if not hello.is_new and hello.decided == found.newest:
                    self._close(found, decide)
                    continue
            if self.clock() > deadline:
                raise StateLost("no rank is left that holds anything of the job's state")
            self.sleep(LOOK_S)
        return self._heed(generation, text)

    def knock(self) -> Round:
        """Ask to be let in, as a rank without state, and wait until it is so.

        Raises:
            Fenced: nobody let it in for `Patience.newcomer_s`.
        """
        deadline = self.clock() + self.patience.newcomer_s
        hello = Hello(rank=self.rank, identity=self.identity, is_new=True)
        asked, closed = self.rank in self._waiting, 0
        while self.clock() < deadline:
            generation = max(closed, self.current() or 0) + 1
            self._refuse_double(generation - 1)
            self._say(f"ntp/{generation}/hello/{self.rank}", hello)
            if not asked:
                number = self.store.add("ntp/tickets", 1)
                self.store.set(f"ntp/knock/{number}", str(self.rank))
                self.store.add("ntp/knocks", 1)  # heard only now, when all is said
            key = f"ntp/{generation}/close"
            while (text := self._read(key)) is None and self.clock() < deadline:
                if self.store.check(["ntp/over"]):
                    raise Fenced(f"the job ended before rank {self.rank} was let in")
                self.sleep(LOOK_S)
            if text is None:
                break
            found, body = _round(generation, text), json.loads(text)
            told = found.hellos.get(self.rank)
            is_me = told is not None and told.identity == self.identity
            if is_me and self.rank in found.outcome.get("members", ()):
                return self._heed(generation, text)
            asked = is_me and self.rank in body["waiting"]  # known, without a place yet
            closed = generation
        raise Fenced(
            f"rank {self.rank} was not let into the job within {self.patience.newcomer_s:g} s"
        )

    def _refuse_double(self, generation: int) -> None:
        holder = self.who(generation, self.rank)
        if holder not in (None, self.identity) and holder.life() in (Life.RUNS, Life.STOPPED):
            raise InvalidInput(
                f"rank {self.rank} is process {holder.pid} and lives; start this one under another "
                "rank, or end that one first"
            )

    def _say(self, key: str, hello: Hello) -> None:
        """Say hello as a newcomer; a rank that another process has is not free."""
        held = self.store.compare_set(key, "", hello.to_json())
        other = Hello.from_json(held.decode())
        if other.identity != self.identity:
            if other.identity.life() is not Life.DEAD:
                raise InvalidInput(
                    f"rank {self.rank} is process {other.identity.pid} of another start already; "
                    "start this one under a rank that is free"
                )
            self.store.set(key, hello.to_json())

    def _close(self, found: Round, decide: Decide) -> None:
        outcome = decide(found)
        members = outcome.get("members", ())
        waiting = sorted(r for r in found.hellos if r not in members)[:MAX_WAITING]
        body = {
            "hellos": [h.to_json() for h in found.hellos.values()],
            "outcome": outcome,
            "knocks": self.store.add("ntp/knocks", 0),
            "waiting": waiting,
        }
        text = json.dumps(body)
        key = f"ntp/{found.generation}/close"
        if self.store.compare_set(key, "", text).decode() == text:
            self.store.set("ntp/current", str(found.generation))

    def _heed(self, generation: int, text: str) -> Round:
        body, found = json.loads(text), _round(generation, text)
        self._knocks, self._waiting = body["knocks"], set(body["waiting"])
        if self.rank not in found.hellos or found.hellos[self.rank].identity != self.identity:
            raise Fenced(f"generation {generation} was formed without rank {self.rank}")
        return found

    def newcomers(self) -> set[int]:
        """Ranks that have knocked or wait for a place."""
        last = min(self.store.add("ntp/knocks", 0), self._knocks + MAX_WAITING)
        keys = [f"ntp/knock/{n}" for n in range(self._knocks + 1, last + 1)]
        return self._waiting | {int(self.store.get(k)) for k in keys if self.store.check([k])}

    def read_hello(self, generation: int, rank: int) -> Hello | None:
        """What a rank has said for a generation."""
        text = self._read(f"ntp/{generation}/hello/{rank}")
        return None if text is None else Hello.from_json(text)

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def introduce(self, generation: int) -> None:
        """Leave word which process this rank is, for those who will look for it."""
        text = json.dumps(asdict(self.identity))
        self.store.set(f"ntp/{generation}/who/{self.rank}", text)

    def who(self, generation: int, rank: int) -> Identity | None:
        """Which process a rank of a generation is."""
        text = self._read(f"ntp/{generation}/who/{rank}")
        return None if text is None else Identity(**json.loads(text))

    def life(self, identity: Identity) -> Life:
        """What is known of a process: by its host, or because somebody saw its end."""
        seen = identity.life()
        key = dead_key(identity)
        if seen is Life.DEAD and not self.store.check([key]):
            self.store.set(key, "1")  # for those on other hosts
        if seen is Life.UNKNOWN and self.store.check([key]):
            return Life.DEAD
        return seen


def dead_key(identity: Identity) -> str:
    """Where the end of a process is told."""
    return f"ntp/dead/{identity.pid}.{identity.start}@{identity.host}"


def _round(generation: int, text: str) -> Round:
    body = json.loads(text)
    hellos = [Hello.from_json(h) for h in body["hellos"]]
    return Round(generation=generation, hellos={h.rank: h for h in hellos}, outcome=body["outcome"])


class _Watch:
    """Waits for the others in a round, as long as it makes sense."""

    def __init__(self, membership: Membership, generation: int, expected: Sequence[int]) -> None:
        self._m = membership
        self._generation = generation
        self._expected = expected
        self._since = membership.clock()
        self._moving = dict.fromkeys(expected, self._since)  # when each was last seen not stopped

    def look(self) -> dict[int, Hello] | None:
        """Everybody who is there, once nobody else need be waited for; None before."""
        hellos: dict[int, Hello] = {}
        is_complete = True
        for rank in sorted({*self._expected, *self._m.newcomers()}):
            hello = self._m.read_hello(self._generation, rank)
            if hello is not None:
                if self._m.life(hello.identity) is not Life.DEAD:
                    hellos[rank] = hello
            elif rank in self._expected:
                is_complete = self._is_given_up(rank) and is_complete
        return hellos if is_complete else None

    def _is_given_up(self, rank: int) -> bool:
        identity = self._m.who(self._generation - 1, rank)
        life = Life.UNKNOWN if identity is None else self._m.life(identity)
        now, patience = self._m.clock(), self._m.patience
        if life is not Life.STOPPED:
            self._moving[rank] = now
        return (
            life is Life.DEAD
            or now - self._moving[rank] >= patience.stopped_s
            or now - self._since >= patience.silent_s
        )
