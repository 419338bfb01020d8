"""Documents of another node that appear late, as a process of one node finds them."""

import os
import time
from pathlib import Path

import pytest

from pipeline.utils import late_names, shared_files
from pipeline.utils.disk_faults import injected
from pipeline.utils.late_names import MARK, LateNames
from pipeline.utils.shared_dir import FileSharedDir

SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_hiders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_names, "_hiders", [])


def seen_by(node: int, folder: Path, name: str) -> tuple[bool, bool]:
    """Whether a node can open a document, and finds it in the listing of its folder."""
    late = LateNames([folder], node, SECONDS)
    late_names._hiders[:] = [late.is_hidden]
    with injected(late.rule):
        directory = FileSharedDir(folder)
        return directory.read(name, int) is not None, name in directory.names()


def age(document: Path, seconds: float) -> None:
    node, _, created = os.getxattr(document, MARK).decode().partition(" ")
    os.setxattr(document, MARK, f"{node} {float(created) - seconds}".encode())


@pytest.mark.parametrize("write", [shared_files.create_document, shared_files.write_document])
def test_a_new_document_appears_late_on_other_nodes_and_at_once_on_its_own(write, tmp_path: Path) -> None:
    folder = tmp_path / "late"
    with injected(LateNames([folder], 1, SECONDS).rule):
        write(folder / "a", 5)
        write(tmp_path / "b", 5)
    assert seen_by(1, folder, "a") == (True, True)
    assert seen_by(0, folder, "a") == (False, False)
    assert seen_by(0, tmp_path, "b") == (True, True), "only documents in the folders are late"
    assert not FileSharedDir(folder).create("a", 6), "a hidden name is taken"
    age(folder / "a", SECONDS)
    assert seen_by(0, folder, "a") == (True, True)


def test_a_document_that_replaces_another_is_as_visible_as_that(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(b"")
    with injected(LateNames([tmp_path], 1, SECONDS).rule):
        for name in ("before", "new"):
            shared_files.write_document(tmp_path / name, 1)
            shared_files.write_document(tmp_path / name, 2)
    assert seen_by(0, tmp_path, "before") == (True, True)
    assert seen_by(0, tmp_path, "new") == (False, False)
    age(tmp_path / "new", SECONDS)
    with injected(LateNames([tmp_path], 1, SECONDS).rule):
        shared_files.write_document(tmp_path / "new", 3)
    assert seen_by(0, tmp_path, "new") == (True, True)
    assert time.time() - float(os.getxattr(tmp_path / "new", MARK).split()[1]) >= SECONDS
