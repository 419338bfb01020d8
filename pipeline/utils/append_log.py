"""Files of lines that grow with a run, and go back with it: `metrics.jsonl`, `ledger.jsonl`.

Owns how lines get into such a file, and out of it when the steps that they tell of are trained again. Promises that the
lines of one writer are whole and in order; that a file that cannot be written (a full disk) costs a warning and no
step, and gets what it lacks as soon as it can; and that a writer which was replaced adds nothing, however long its last
write hangs: each writer begins with a new file, and looks whether it may write after it opened the old one. Must not
know what a line means.

    rewrite_lines(path, wanted, fence.check)       # once, by whoever has the right to write now
    journal = Journal(path, fence.check)
    journal.add(line)
    size = journal.flush()                      # on disk; `size` is what a commit covers
"""

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import CheckpointError, SupersededError
from pipeline.utils import shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, retry_transient
from pipeline.utils.waiting import CLOCK, Clock

log = logging.getLogger(__name__)


class AppendLog:
    """Adds lines to the file at `path`; `check` raises `SupersededError` when this writer was replaced."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path, self._check = path, check
        self._size = retry_transient(f"the size of {path}", lambda: _size(path), FINAL_WRITE_TIMEOUT)
        self._unwritten = bytearray()
        self._told = False

    def add(self, *lines: bytes) -> None:
        """Add lines, given without their ends, now or with later ones; `SupersededError` from `check`."""
        self._unwritten += b"".join(line + b"\n" for line in lines)
        self._write(flush=False)

    def flush(self) -> int:
        """Have all lines on disk, if that is possible; the size in bytes of the file when it has them all."""
        self._write(flush=True)
        return self._size + len(self._unwritten)

    def _write(self, *, flush: bool) -> None:
        try:
            with self._path.open("ab", buffering=0) as file:
                self._check()
                while self._unwritten:
                    written = file.write(self._unwritten)
                    del self._unwritten[:written]
                    self._size += written
                if flush:
                    os.fsync(file.fileno())
        except SupersededError:
            raise
        except (OSError, CheckpointError) as error:
            if not self._told:
                log.warning("%s gets its next lines later: %s", self._path, error)
            self._told = True
        else:
            self._told = False


def _size(path: Path) -> int:
    """In bytes; 0 where there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def rewrite_lines(
    path: Path,
    wanted: Callable[[bytes, int], bool],
    check: Callable[[], None] = lambda: None,
    clock: Clock = CLOCK,
    aside: Path | None = None,
) -> int:
    """Put a new file in place of the one at `path`, with those lines of which `wanted(line, end)` is true.

    `end` is the offset in bytes behind the line. A last line that was not written to its end goes too. Nothing happens
    when there is no file. A disk that fails for a transient reason, or is full, is tried again for
    `FINAL_WRITE_TIMEOUT`; then the old file stays, with a warning. `check` is called right before the new one takes the
    name; what it raises leaves everything as it is.

    With `aside`, the whole lines that go are written to that file, if there are any. Returns how many went.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        return retry_transient(
            f"{path} to be rolled back", lambda: _replace(path, part, wanted, check, aside), FINAL_WRITE_TIMEOUT, clock
        )
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.warning("%s keeps lines of steps that are trained again: %s", path, error)
        return 0
    finally:
        _remove(part)


def _replace(
    path: Path, part: Path, wanted: Callable[[bytes, int], bool], check: Callable[[], None], aside: Path | None
) -> int:
    """Once; may be done again after it failed, even if the new file has the name by then."""
    with path.open("rb") as old, part.open("wb") as new:
        dropped, end = list[bytes](), 0
        for line in old:
            end += len(line)
            if not line.endswith(b"\n"):
                continue
            if wanted(line, end):
                new.write(line)
            else:
                dropped.append(line)
        new.flush()
        os.fsync(new.fileno())
    check()
    # Before the old file goes. A second try that finds the new file drops nothing, and must not empty this one.
    if aside is not None and dropped:
        aside.parent.mkdir(parents=True, exist_ok=True)
        shared_files.write_atomic(aside, b"".join(dropped))
    part.replace(path)
    return len(dropped)


def _remove(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is left over and may be removed: %s", part, error)
