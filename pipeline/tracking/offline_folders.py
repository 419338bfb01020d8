"""The folders of a service that logs offline. Each attempt replaces those that were not uploaded by a new one.

The new folder gets the rows of the old ones again, from `metrics.jsonl`. Until all of these rows are on disk, the file
`rollcall-rewrite.json` marks the new folder as incomplete, and the old ones stay. So a rewrite that is cut off loses
nothing: the next attempt removes the incomplete folder and begins again.

    start            old folders   rollcall-rewrite.json
    the service      old folders   rollcall-rewrite.json   new folder (incomplete)
    rows on disk     old folders   "is_complete"           new folder
    end                                                    new folder
"""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.utils import shared_files

_STATE = "rollcall-rewrite.json"
_FIRST_ROW = "rollcall-first-row"
"""A file in a folder with the number of its first row among all rows of the run."""
BUFFER_BYTES = 64 * 1024
"""More than a service keeps in memory of the rows of a file: both write blocks of at most 32 KiB."""


class _Rewrite(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a rewrite.

    Attributes:
        first_row: the number of the new folder's first row.
        present: the names of all folders at the start.
        replaced: those of them that were not uploaded, so that the new folder gets their rows.
        logged: the file of logged rows at the start. A rewrite truncates the file.
        is_complete: the new folder has all rows of the replaced ones.
    """

    first_row: int
    present: list[str]
    replaced: list[str]
    logged: str
    is_complete: bool = False


class OfflineFolders:
    """The offline folders of one attempt.

        folders = OfflineFolders(folder, "run-*", logged)
        ...                                      # the service creates its folder
        folders.mark_new()
        folders.add_row()                        # for each row that is logged, from `folders.first_row` on
        folders.idle()                           # whenever there are no new rows
        ...                                      # the service ends
        folders.complete()

    Attributes:
        first_row: the number of the first row to log; None to continue after the rows that were logged.
    """

    def __init__(
        self, folder: Path, pattern: str, logged: Path, is_uploaded: Callable[[Path], bool] = lambda _: False
    ) -> None:
        """Note the folders of earlier attempts, and remove incomplete ones.

        Args:
            pattern: a glob pattern for the names of the service's folders.
            logged: the file of logged rows (`tracker_process.follow_metrics`).
            is_uploaded: whether a folder was uploaded. It stays: the service appends the rows of a later folder.
        """
        self._folder, self._pattern, self._is_uploaded = folder, pattern, is_uploaded
        before = _read(folder)
        if before is not None:
            self._remove(before)
        content = logged.read_text() if logged.exists() else ""
        if before is not None and not before.is_complete and len(before.logged) > len(content):
            content = before.logged
        old = [child for child in self._list() if not is_uploaded(child)]
        self.first_row = min((_first_row(child, before) for child in old), default=None)
        if self.first_row is None and before is not None:
            shared_files.write_atomic(logged, content.encode())  # all were uploaded since the rewrite began
        rows = content.count("\n")
        first = rows if self.first_row is None else min(self.first_row, rows)
        present, replaced = sorted(child.name for child in self._list()), sorted(child.name for child in old)
        self._state = _Rewrite(first, present, replaced, content)
        self._last_size, self._buffered_from, self._has_rows = -1, -1, False
        self._write()

    @property
    def is_rewriting(self) -> bool:
        """Whether the old folders are still needed."""
        return not self._state.is_complete

    def mark_new(self) -> None:
        """Note the folder that the service has created."""
        for child in self._new():
            shared_files.write_atomic(child / _FIRST_ROW, str(self._state.first_row).encode())
        if not self._state.replaced:
            self._end()

    def add_row(self) -> None:
        """Note that the service has been handed a row."""
        self._has_rows = True

    def idle(self) -> None:
        """End the rewrite if its rows are on disk: the new folder has grown by a buffer since they were handed over.

        Called when all rows of `metrics.jsonl` have been handed to the service. The service writes them later, so its
        folder counts from the first call that finds its size unchanged.
        """
        if not self.is_rewriting:
            return
        size = sum(file.stat().st_size for child in self._new() for file in child.iterdir() if file.is_file())
        if self._buffered_from < 0 and size == self._last_size:
            self._buffered_from = size
        if 0 <= self._buffered_from <= size - BUFFER_BYTES:
            self.complete()
        self._last_size = size

    def complete(self) -> None:
        """Remove the folders whose rows the new folder has. Called when the service has ended after all rows.

        An attempt without a row leaves them: its `metrics.jsonl` is gone or could not be read.
        """
        if self.is_rewriting and self._has_rows:
            self._end()

    def _end(self) -> None:
        self._state.is_complete = True
        self._write()
        self._remove(self._state)
        (self._folder / _STATE).unlink(missing_ok=True)

    def _remove(self, state: _Rewrite) -> None:
        """Remove the folders without use: the replaced ones of a complete rewrite, the new one of another."""
        for child in self._list():
            is_new = child.name not in state.present
            useless = child.name in state.replaced if state.is_complete else is_new and bool(state.replaced)
            if useless and not self._is_uploaded(child):
                shutil.rmtree(child)

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        shared_files.write_atomic(self._folder / _STATE, msgspec.json.encode(self._state))

    def _list(self) -> list[Path]:
        return sorted(self._folder.glob(self._pattern))

    def _new(self) -> list[Path]:
        return [child for child in self._list() if child.name not in self._state.present]


def complete_folders(folder: Path, pattern: str) -> str:
    """The folders to upload as words of a shell command: none that repeats rows of another; empty without a folder."""
    names, state = sorted(child.name for child in folder.glob(pattern)), _read(folder)
    if state is not None and (outdated := _repeating(names, state)):
        return " ".join(shlex.quote(str(folder / name)) for name in names if name not in outdated)
    return f"{shlex.quote(str(folder))}/{pattern}" if names else ""


def _repeating(names: list[str], state: _Rewrite) -> set[str]:
    """The folders whose rows are in others: the replaced ones, or the new one while it is incomplete."""
    replaced = set(names) & set(state.replaced)
    return replaced if state.is_complete else set(names) - set(state.present) if replaced else set()


def _read(folder: Path) -> _Rewrite | None:
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=_Rewrite)
    except (OSError, msgspec.DecodeError):
        return None


def _first_row(child: Path, state: _Rewrite | None) -> int:
    """The number of a folder's first row. Of a folder without a readable one all rows are logged again."""
    try:
        return int((child / _FIRST_ROW).read_text())
    except (OSError, ValueError):
        return 0 if state is None or child.name in state.present else state.first_row
