"""Append-only line files of a run, which can be rolled back with it: `metrics.jsonl`, `ledger.jsonl`.

- The lines of one writer are complete and in order.
- A failing write (a full disk) logs a warning and fails no step; its lines are written once the disk accepts them.
- A superseded writer adds nothing, however long its last write hangs. Each writer starts with a new file
  (`rewrite_lines`) and checks its right to write after opening the file, so a late write goes to the replaced file.

    rewrite_lines(path, keep, fence.check)      # once, by the attempt that has the right to write now
    log = AppendLog(path, fence.check)
    log.add(line)
    size = log.flush()                          # on disk; a checkpoint covers the first `size` bytes
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
    """Appends lines to the file at `path`. `check` raises `SupersededError` if this writer was superseded."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path, self._check = path, check
        self._size, torn = retry_transient(f"the end of {path}", lambda: _end_of(path), FINAL_WRITE_TIMEOUT)
        # Where `rewrite_lines` could not drop an earlier writer's torn line, it must not become one with our first.
        self._unwritten = bytearray(b"\n" if torn else b"")
        self._has_warned = False

    def add(self, *lines: bytes) -> None:
        """Append lines (without line ends), now or together with later ones. `SupersededError` from `check`."""
        self._unwritten += b"".join(line + b"\n" for line in lines)
        self._write(flush=False)

    def flush(self) -> int:
        """Write and fsync all lines, if possible. Returns the file's size in bytes once it has all of them."""
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
            if not self._has_warned:
                log.warning("%s gets its next lines later: %s", self._path, error)
            self._has_warned = True
        else:
            self._has_warned = False


def _end_of(path: Path) -> tuple[int, bool]:
    """The size of a file in bytes, 0 if it is absent; and whether its last line is incomplete."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return size, file.read(1) not in (b"", b"\n")
    except FileNotFoundError:
        return 0, False


def complete_lines(path: Path) -> list[bytes]:
    """The lines of such a file without line ends; none if it is absent. A writer may have written only a part of the
    last one, which is left out."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return lines


def rewrite_lines(
    path: Path,
    keep: Callable[[bytes, int], bool],
    check: Callable[[], None] = lambda: None,
    clock: Clock = CLOCK,
    aside: Path | None = None,
) -> int:
    """Replace the file at `path` by a new one with the lines for which `keep(line, end)` is true.

    `end` is the offset in bytes behind the line. An incomplete last line is dropped. Without a file, nothing happens.
    Transient errors of the disk, and a full disk, are retried for `FINAL_WRITE_TIMEOUT` seconds; then the old file
    stays, and a warning is logged. `check` is called right before the rename; if it raises, nothing has changed.

    With `aside`, dropped complete lines are written to that file, if there are any. Returns their number.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        return retry_transient(
            f"{path} to be rolled back", lambda: _replace(path, part, keep, check, aside), FINAL_WRITE_TIMEOUT, clock
        )
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.warning("%s keeps lines of steps that are trained again: %s", path, error)
        return 0
    finally:
        _remove(part)


def _replace(
    path: Path, part: Path, keep: Callable[[bytes, int], bool], check: Callable[[], None], aside: Path | None
) -> int:
    """One try of `rewrite_lines`. Repeatable after a failure, even if the rename has already taken effect."""
    with path.open("rb") as old, part.open("wb") as new:
        dropped, end = list[bytes](), 0
        for line in old:
            end += len(line)
            if not line.endswith(b"\n"):
                continue
            if keep(line, end):
                new.write(line)
            else:
                dropped.append(line)
        new.flush()
        os.fsync(new.fileno())
    check()
    # Before the old file is replaced. A second try may read the new file: it drops nothing, and must not empty `aside`.
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
