"""The replacement of offline folders, with folders of a service that writes what it is told to."""

import shutil
from pathlib import Path

import pytest

from pipeline.tracking.offline_folders import BUFFER_BYTES, OfflineFolders, complete_folders

UPLOADED = "uploaded"


def is_uploaded(folder: Path) -> bool:
    return (folder / UPLOADED).exists()


class Attempt:
    """An attempt whose service makes the folder `run-<name>`, and logs rows from the first one on."""

    def __init__(self, root: Path, name: str) -> None:
        self.logged = root / "logged"
        self.folders = OfflineFolders(root / "service", "run-*", self.logged, is_uploaded)
        self.folder = root / "service" / f"run-{name}"
        self.folder.mkdir()
        self.file = self.folder / "rows"
        self.folders.mark_new()

    def log(self, total: int) -> None:
        """The rows up to `total`, one byte each."""
        lines = self.logged.read_text().splitlines(keepends=True) if self.logged.exists() else []
        first = len(lines) if self.folders.first_row is None else self.folders.first_row
        self.logged.write_text("".join(lines[:first]) + '["train/rl",0]\n' * (total - first))
        self.file.write_bytes(b"r" * (total - first))
        self.folders.add_row()


def finished(root: Path, name: str, total: int) -> Attempt:
    attempt = Attempt(root, name)
    attempt.log(total)
    attempt.folders.complete()
    return attempt


def names(root: Path) -> list[str]:
    return sorted(child.name for child in (root / "service").glob("run-*"))


def upload(root: Path) -> str:
    return complete_folders(root / "service", "run-*")


def test_the_old_folder_is_removed_when_the_new_one_is_complete(tmp_path: Path) -> None:
    finished(tmp_path, "1", 3)
    attempt = Attempt(tmp_path, "2")
    assert attempt.folders.first_row == 0
    assert names(tmp_path) == ["run-1", "run-2"]
    assert upload(tmp_path) == f"{tmp_path}/service/run-1"
    attempt.log(5)
    attempt.folders.complete()
    assert names(tmp_path) == ["run-2"]
    assert upload(tmp_path) == f"{tmp_path}/service/run-*"


def test_an_incomplete_folder_is_removed_by_the_next_attempt_which_begins_again(tmp_path: Path) -> None:
    finished(tmp_path, "1", 3)
    Attempt(tmp_path, "2").log(2)
    attempt = Attempt(tmp_path, "3")
    assert names(tmp_path) == ["run-1", "run-3"]
    assert attempt.folders.first_row == 0


def test_rows_are_complete_only_when_a_buffer_has_been_written_after_them(tmp_path: Path) -> None:
    finished(tmp_path, "1", 3)
    attempt = Attempt(tmp_path, "2")
    attempt.log(3)
    for size in (10, 20 + 2 * BUFFER_BYTES, 20 + 2 * BUFFER_BYTES, 20 + 3 * BUFFER_BYTES - 1):
        attempt.file.write_bytes(b"r" * size)
        attempt.folders.idle()
        assert names(tmp_path) == ["run-1", "run-2"], f"{size}: a growing file, or a part of a buffer"
    attempt.file.write_bytes(b"r" * (20 + 3 * BUFFER_BYTES))
    attempt.folders.idle()
    assert names(tmp_path) == ["run-2"]


def test_an_attempt_without_rows_leaves_the_old_folder(tmp_path: Path) -> None:
    finished(tmp_path, "1", 3)
    Attempt(tmp_path, "2").folders.complete()
    assert upload(tmp_path) == f"{tmp_path}/service/run-1"


def test_a_removal_that_was_cut_off_is_finished_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    finished(tmp_path, "1", 3)
    attempt = Attempt(tmp_path, "2")
    attempt.log(5)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            attempt.folders.complete()
    assert upload(tmp_path) == f"{tmp_path}/service/run-2", "the new folder has all rows"
    Attempt(tmp_path, "3")
    assert names(tmp_path) == ["run-2", "run-3"]


def test_the_rows_after_an_upload_are_counted_although_a_rewrite_was_cut_off(tmp_path: Path) -> None:
    first = finished(tmp_path, "1", 9)
    Attempt(tmp_path, "2").log(2)
    (first.folder / UPLOADED).touch()
    attempt = Attempt(tmp_path, "3")
    assert names(tmp_path) == ["run-1", "run-3"]
    assert attempt.folders.first_row is None
    assert len(attempt.logged.read_text().splitlines()) == 9
    attempt.log(11)
    assert finished(tmp_path, "4", 12).folders.first_row == 9


def test_a_folder_whose_creation_was_cut_off_counts_from_the_rows_before_it(tmp_path: Path) -> None:
    first = finished(tmp_path, "1", 9)
    (first.folder / UPLOADED).touch()
    OfflineFolders(tmp_path / "service", "run-*", first.logged, is_uploaded)
    (tmp_path / "service" / "run-2").mkdir()  # the process is killed before `mark_new`
    assert upload(tmp_path) == f"{tmp_path}/service/run-*"
    assert finished(tmp_path, "3", 10).folders.first_row == 9
    assert names(tmp_path) == ["run-1", "run-3"]


@pytest.mark.parametrize("mark", [None, "", "?"])
def test_a_folder_without_a_readable_first_row_is_written_again_from_row_0(tmp_path: Path, mark: str | None) -> None:
    first = finished(tmp_path, "1", 3)
    file = first.folder / "rollcall-first-row"
    file.unlink() if mark is None else file.write_text(mark)
    assert Attempt(tmp_path, "2").folders.first_row == 0


def test_an_unreadable_state_removes_nothing(tmp_path: Path) -> None:
    finished(tmp_path, "1", 3)
    Attempt(tmp_path, "2").log(2)
    (tmp_path / "service" / "rollcall-rewrite.json").write_bytes(b"")
    assert Attempt(tmp_path, "3").folders.first_row == 0
    assert names(tmp_path) == ["run-1", "run-2", "run-3"]
