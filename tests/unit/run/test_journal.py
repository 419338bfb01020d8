"""Files of lines that go back with their run, on a disk that fails for a while."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import SupersededError
from pipeline.utils.append_log import AppendLog, rewrite_lines
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT
from tests.fakes.clock import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    journal = AppendLog(path)
    journal.add(b"1", b"2", b"3")
    return path


def disk_that_fails(monkeypatch: pytest.MonkeyPatch, module: object, name: str, number: int, times: int) -> None:
    """The first `times` calls of that function end with an error."""
    act: Callable[..., object] = getattr(module, name)
    left = iter(range(times))

    def fail(*given: object, **more: object) -> object:
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return act(*given, **more)

    monkeypatch.setattr(module, name, fail)


def before_the_second(line: bytes, end: int) -> bool:
    return end <= 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
@pytest.mark.parametrize(("module", "name"), [(Path, "open"), (os, "fsync"), (Path, "replace")])
def test_a_file_goes_back_on_a_disk_that_fails_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str, number: int
) -> None:
    disk_that_fails(monkeypatch, module, name, number, times=3)
    rewrite_lines(path, before_the_second, clock=FakeClock())
    monkeypatch.undo()
    assert path.read_bytes() == b"1\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("module", "name"), [(Path, "open"), (os, "fsync"), (os, "replace"), (Path, "replace")])
def test_lines_that_go_are_kept_aside_on_a_disk_that_fails_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    aside = path.parent / "aside" / "1" / path.name
    disk_that_fails(monkeypatch, module, name, errno.EIO, times=3)
    assert rewrite_lines(path, before_the_second, clock=FakeClock(), aside=aside) == 2
    monkeypatch.undo()
    assert (path.read_bytes(), aside.read_bytes()) == (b"1\n", b"2\n3\n")
    assert rewrite_lines(path, before_the_second, clock=FakeClock(), aside=aside) == 0
    assert aside.read_bytes() == b"2\n3\n"


@pytest.mark.parametrize("name", ["replace", "unlink"])
def test_a_disk_that_goes_on_failing_costs_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    clock = FakeClock()
    disk_that_fails(monkeypatch, os, "fsync", errno.EIO, times=10_000)
    disk_that_fails(monkeypatch, Path, name, errno.EIO, times=10_000)
    rewrite_lines(path, before_the_second, clock=clock)
    monkeypatch.undo()
    assert clock.time == pytest.approx(FINAL_WRITE_TIMEOUT)
    assert path.read_bytes() == b"1\n2\n3\n"
    assert "keeps lines of steps that are trained again" in caplog.text


def test_who_was_replaced_while_the_disk_failed_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise SupersededError("another attempt")

    disk_that_fails(monkeypatch, os, "fsync", errno.EIO, times=3)
    with pytest.raises(SupersededError):
        rewrite_lines(path, before_the_second, refuse, FakeClock())
    assert path.read_bytes() == b"1\n2\n3\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_journal_begins_on_a_disk_that_fails_for_a_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_that_fails(monkeypatch, Path, "open", errno.ESTALE, times=1)
    assert AppendLog(path).flush() == len(b"1\n2\n3\n")


def test_a_torn_line_that_no_rollback_could_drop_takes_no_later_line_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with path.open("ab") as file:
        file.write(b'{"torn')
    with monkeypatch.context() as failing:
        disk_that_fails(failing, os, "fsync", errno.ENOSPC, times=10_000)
        rewrite_lines(path, lambda line, end: True, clock=FakeClock())
    journal = AppendLog(path)
    journal.add(b"4", b"5")
    assert path.read_bytes() == b'1\n2\n3\n{"torn\n4\n5\n'
    assert journal.flush() == path.stat().st_size
