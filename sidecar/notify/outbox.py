"""Outbox: messages that must arrive, kept in SQLite until they have.

A message is in the file, synced, before `enqueue` returns; killing the process at any point loses
none. It leaves the pending state only when a delivery is recorded, so that a kill between a
delivery and its record repeats the message under the same id: at least once.

The clock is an argument. All times are unix seconds.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MAX_MESSAGES = 10_000
"""Messages kept. Beyond it the oldest delivered go first, then the oldest dead, then the oldest
pending: a newer incident matters more than one that could not be told for days."""

BUSY_S = 1.0
"""How long one call waits for another process that holds the file; then it is `sqlite3.Error`."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    created_s REAL NOT NULL,
    due_s REAL NOT NULL,
    attempts INTEGER NOT NULL,
    state TEXT NOT NULL,
    body BLOB NOT NULL,
    error TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS messages_due ON messages (state, due_s);
"""

_TRIM = """
DELETE FROM messages WHERE number IN (
    SELECT number FROM messages
    ORDER BY CASE state WHEN 'delivered' THEN 0 WHEN 'dead' THEN 1 ELSE 2 END, number
    LIMIT max(0, (SELECT count(*) FROM messages) - ?))
"""


class MessageState(StrEnum):
    """Life of a message."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `attempts` were made so far; `error` is why the newest one failed."""

    id: str
    body: bytes
    created_s: float
    due_s: float
    attempts: int
    state: MessageState
    error: str


class Outbox:
    """A durable queue of messages for one endpoint. Safe for several threads and processes.

    Every call may raise `sqlite3.Error` and can be repeated later. A file that is locked, or a disk
    that is full, when this is made is such an error of later calls; a file that can never serve is
    one here.

    Args:
        path: SQLite file; made when missing, its directory too.
        clock: unix time in seconds.
        max_messages: see `MAX_MESSAGES`.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float], max_messages: int = MAX_MESSAGES
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._clock = clock
        self._max_messages = max_messages
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None
        self._is_closed = False
        with self._lock:
            try:
                self._db()
            except sqlite3.OperationalError as error:
                if not _is_passing(error):
                    raise

    def _db(self) -> sqlite3.Connection:
        """The connection, made at the first call that succeeds. Under the lock."""
        if self._is_closed:
            raise sqlite3.ProgrammingError("the outbox is closed")
        if self._opened is None:
            db = sqlite3.connect(
                self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                db.executescript(_SCHEMA)
            except BaseException:
                db.close()
                raise
            self._opened = db
        return self._opened

    def enqueue(self, message_id: str, body: bytes) -> bool:
        """Keep a message, due now. False when this id is known already; then nothing changes."""
        now_s = self._clock()
        with self._lock, self._db() as db:
            db.execute("BEGIN IMMEDIATE")
            added = db.execute(
                "INSERT OR IGNORE INTO messages"
                " (id, created_s, due_s, attempts, state, body, error)"
                " VALUES (?, ?, ?, 0, 'pending', ?, '')",
                (message_id, now_s, now_s, body),
            ).rowcount
            db.execute(_TRIM, (self._max_messages,))
        return added == 1

    def due(self) -> Message | None:
        """The pending message that is due for longest, if any is due."""
        rows = self._rows("state = 'pending' AND due_s <= ?", (self._clock(),), limit=1)
        return rows[0] if rows else None

    def next_due_s(self) -> float | None:
        """When the next pending message is due; None when none is pending."""
        with self._lock:
            row = (
                self._db()
                .execute("SELECT min(due_s) FROM messages WHERE state = 'pending'")
                .fetchone()
            )
        value: float | None = row[0]
        return value

    def mark_delivered(self, message_id: str) -> None:
        """The endpoint has taken the message. Its body stays until it is trimmed."""
        self._attempted(message_id, MessageState.DELIVERED, self._clock(), "")

    def mark_retry(self, message_id: str, due_s: float, error: str) -> None:
        """The attempt failed; the next one is due at `due_s`."""
        self._attempted(message_id, MessageState.PENDING, due_s, error)

    def mark_dead(self, message_id: str, error: str) -> None:
        """The last attempt failed; only `replay` tries again."""
        self._attempted(message_id, MessageState.DEAD, self._clock(), error)

    def replay(self, message_id: str | None = None) -> int:
        """Make dead messages (or one of them) pending again, due now. Returns how many."""
        with self._lock, self._db() as db:
            return db.execute(
                "UPDATE messages SET state = 'pending', attempts = 0, due_s = ?"
                " WHERE state = 'dead' AND (? IS NULL OR id = ?)",
                (self._clock(), message_id, message_id),
            ).rowcount

    def messages(self, state: MessageState, limit: int = 256) -> list[Message]:
        """Messages in a state, oldest first."""
        return self._rows("state = ?", (str(state),), limit=limit)

    def count(self, state: MessageState, wait_s: float = -1) -> int:
        """Number of messages in a state.

        Args:
            wait_s: how long to wait for another thread's call; TimeoutError after that, or when the
                file is not open yet. -1: as long as it takes.
        """
        if wait_s >= 0 and self._opened is None and not self._is_closed:
            raise TimeoutError("the outbox is not open yet")
        if not self._lock.acquire(timeout=wait_s):
            raise TimeoutError("another thread uses the outbox")
        try:
            row = (
                self._db()
                .execute("SELECT count(*) FROM messages WHERE state = ?", (str(state),))
                .fetchone()
            )
        finally:
            self._lock.release()
        return int(row[0])

    def close(self) -> None:
        """Close the file. Messages stay in it."""
        with self._lock:
            self._is_closed = True
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _attempted(self, message_id: str, state: MessageState, due_s: float, error: str) -> None:
        with self._lock, self._db() as db:
            db.execute(
                "UPDATE messages SET state = ?, due_s = ?, error = ?, attempts = attempts + 1"
                " WHERE id = ?",
                (str(state), due_s, error[:500], message_id),
            )

    def _rows(self, where: str, values: tuple[object, ...], limit: int) -> list[Message]:
        query = (
            "SELECT id, body, created_s, due_s, attempts, state, error FROM messages"
            f" WHERE {where} ORDER BY due_s, number LIMIT {int(limit)}"
        )
        with self._lock:
            rows = self._db().execute(query, values).fetchall()
        return [
            Message(
                id=r[0],
                body=bytes(r[1]),
                created_s=r[2],
                due_s=r[3],
                attempts=r[4],
                state=MessageState(r[5]),
                error=r[6],
            )
            for r in rows
        ]


def _is_passing(error: sqlite3.OperationalError) -> bool:
    """Whether a failure is of the moment (locked, full, a fault of the disk), not of the place."""
    code = error.sqlite_errorcode & 0xFF  # the rest says which operation failed
    return code in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
    )
