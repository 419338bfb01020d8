"""The durable state of the gateway.

Owns one SQLite file: sessions, models, samplers and checkpoints as facts, and requests with their results. Promises
that changes are on disk when `keep` returns, that the changes of one call are stored together or not at all, and that
one process at a time has the file. Changes of many callers share one flush. Must not know the meaning of facts and
requests.

SQLite is in Python's standard library, its transactions survive a kill at any instruction, and one file with one writer
is enough. Its journal mode here needs no shared memory, so the file may be on a network filesystem.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RunStateError, one_line
from pipeline.tinker.api_errors import OverLimitError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (kind TEXT, key TEXT, body BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, model TEXT, seq INTEGER, body BLOB, result BLOB, served REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_model ON requests (model, seq);
"""
_VERSION = 1
_BATCH = 256
FAILURE_BYTES = 1 << 14
"""More than any failure has: what is longer is read when it is asked for."""

Statement = tuple[str, tuple[object, ...]]


@dataclass(frozen=True)
class StoredRequest:
    """A request as it lies in the store: not `open`, without a body, once no trainer can need it; without a result
    until it is done, and with an empty one in place of more than `FAILURE_BYTES`. `served` is when a client got the
    result, in seconds since the epoch; 0 until then."""

    id: str
    model: str
    seq: int
    open: bool
    result: bytes | None
    served: float


def fact(kind: str, key: str, body: bytes) -> Statement:
    """The change that makes `body` the fact of that name."""
    return "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (kind, key, body)


def no_fact(kind: str, key: str) -> Statement:
    """The change that drops a fact."""
    return "DELETE FROM facts WHERE kind = ? AND key = ?", (kind, key)


def request(id: str, model: str, seq: int, body: bytes, result: bytes | None = None) -> Statement:
    """The change that adds a request, with its result if it has one already."""
    return "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, 0)", (id, model, seq, body, result)


def result(id: str, body: bytes) -> Statement:
    """The change that gives a request its result, unless it has one: what a client may have seen never changes."""
    return "UPDATE requests SET result = ? WHERE id = ? AND result IS NULL", (body, id)


def served(id: str, time: float) -> Statement:
    """The change that notes that a client got a result."""
    return "UPDATE requests SET served = ? WHERE id = ? AND served = 0", (time, id)


def cursor_passed(model: str, seq: int) -> Statement:
    """The change that drops the bodies of a model's requests up to a number."""
    return "UPDATE requests SET body = NULL WHERE model = ? AND seq <= ? AND result IS NOT NULL", (model, seq)


def no_body(id: str) -> Statement:
    """The change that drops the body of a request."""
    return "UPDATE requests SET body = NULL WHERE id = ?", (id,)


def no_requests(ids: Sequence[str]) -> list[Statement]:
    """The changes that drop requests."""
    return [("DELETE FROM requests WHERE id = ?", (id,)) for id in ids]


class Store:
    """The file at `path`, for this process alone; `RunStateError` if another has it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._waiting: queue.SimpleQueue[tuple[Sequence[Statement], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._link = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except sqlite3.Error as error:
            self._link.close()
            hint = "end the other server of this run, or choose another name="
            raise RunStateError("name", str(path), f"a store that nobody else has ({error})", hint) from None
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            self._link.execute(f"PRAGMA {pragma}").fetchall()
        version = int(self._link.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it has version {version}; this code reads {_VERSION}")
        self._link.executescript(_SCHEMA)
        self._link.execute(f"PRAGMA user_version = {_VERSION}")

    def facts(self, kind: str) -> Iterator[tuple[str, bytes]]:
        """Keys and bodies of a kind; for the start, before anything is kept."""
        yield from self._link.execute("SELECT key, body FROM facts WHERE kind = ? ORDER BY key", (kind,))

    def requests(self) -> Iterator[StoredRequest]:
        """All requests, each model's in order."""
        rows = self._link.execute(
            "SELECT id, model, seq, body IS NOT NULL, CASE WHEN length(result) > ? THEN x'' ELSE result END, served"
            " FROM requests ORDER BY model, seq",
            (FAILURE_BYTES,),
        )
        for id, model, seq, is_open, result, served in rows:
            yield StoredRequest(id, model, seq, bool(is_open), result, served)

    def body(self, id: str) -> bytes | None:
        """The body of a request; None if it is no longer kept."""
        row = self._link.execute("SELECT body FROM requests WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    def result(self, id: str) -> bytes | None:
        """The result of a request; None until it is done."""
        row = self._link.execute("SELECT result FROM requests WHERE id = ?", (id,)).fetchone()
        return None if row is None else row[0]

    async def keep(self, *changes: Statement) -> None:
        """Have all changes on disk. If this raises, none was made: `OverLimitError` if the disk does not take them,
        another error for a value that SQLite cannot store."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put((changes, done))
        await done

    def close(self) -> None:
        """End after what was given before."""
        self._waiting.put(None)
        self._thread.join()
        self._link.close()

    def _write(self) -> None:
        ending = False
        while not ending:
            batch = [self._waiting.get()]
            while len(batch) < _BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            ending = None in batch
            submissions = [submission for submission in batch if submission is not None]
            if submissions:
                self._keep_together(submissions)

    def _keep_together(self, submissions: list[tuple[Sequence[Statement], "asyncio.Future[None]"]]) -> None:
        """All in one flush; if that fails, each alone, so that one caller's trouble is not another's."""
        error = self._transaction([change for changes, _ in submissions for change in changes])
        for changes, done in submissions:
            own = error if error is None or len(submissions) == 1 else self._transaction(changes)
            with contextlib.suppress(RuntimeError):  # the caller's event loop has ended
                done.get_loop().call_soon_threadsafe(_resolve, done, own)

    def _transaction(self, changes: Sequence[Statement]) -> Exception | None:
        try:
            self._link.execute("BEGIN")
            try:
                for statement, values in changes:
                    self._link.execute(statement, values)
                self._link.execute("COMMIT")
            except BaseException:
                if self._link.in_transaction:
                    self._link.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            return OverLimitError(f"{self._path} takes nothing just now ({one_line(error)}); free some space")
        except Exception as error:  # noqa: BLE001 (its caller raises it; the thread serves all other callers)
            return error
        return None


def _resolve(done: "asyncio.Future[None]", error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
