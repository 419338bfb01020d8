"""Faults of a file system in this process: what they reach, and that they end with their block."""

import errno
import os
import time
from pathlib import Path

import pytest

from pipeline.utils import shared_files
from pipeline.utils.disk_faults import FileOperation, full_disk, injected, slow_disk
from pipeline.utils.fs_retry import is_transient


def test_a_full_disk_refuses_what_takes_room_below_its_folder_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    kept = tmp_path / "full" / "kept"
    kept.write_text("kept")
    with injected(full_disk(tmp_path / "full")):
        for write in (
            lambda: (tmp_path / "full" / "new").write_text("x"),
            lambda: kept.open("ab"),
            lambda: os.open(kept, os.O_RDWR),
            lambda: (tmp_path / "full" / "folder").mkdir(),
            lambda: os.link(kept, tmp_path / "full" / "link"),
            lambda: shared_files.write_document(tmp_path / "full" / "document", 1),
        ):
            with pytest.raises(OSError, match="No space left on device") as refused:
                write()
            assert refused.value.errno == errno.ENOSPC
            assert is_transient(refused.value)
        assert kept.read_text() == "kept"
        (tmp_path / "elsewhere").write_text("there is room")
        kept.unlink()
    assert list((tmp_path / "full").iterdir()) == []
    kept.write_text("there is room again")


def test_a_condition_decides_when_the_disk_is_full(tmp_path: Path) -> None:
    moments = iter([False, True, False])
    with injected(full_disk(tmp_path, lambda: next(moments))):
        (tmp_path / "a").write_text("")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "b").write_text("")
        (tmp_path / "b").write_text("")


def test_a_slow_disk_delays_reads_writes_and_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with injected(slow_disk(tmp_path, 2.0)):
        (tmp_path / "a").write_text("")
        (tmp_path / "a").read_text()
        list(tmp_path.iterdir())
        Path("/proc/self/stat").read_text()
    assert slept == [2.0, 2.0, 2.0]


def test_a_rule_may_use_files_and_a_descriptor_is_no_path(tmp_path: Path) -> None:
    seen: list[FileOperation] = []

    def rule(operation: FileOperation) -> None:
        seen.append(operation)
        (tmp_path / "log").write_text(operation.name)

    with injected(rule):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        os.scandir(descriptor).close()
        os.close(descriptor)
    assert [(operation.name, operation.path) for operation in seen] == [("open", tmp_path)]
