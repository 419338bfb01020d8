"""Files of a shared filesystem: whole or absent, one creator, nothing left behind."""

import errno
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.utils import shared_files
from tests.support.strangers import NOBODY, needs_another_user, shared_directory


class Note(msgspec.Struct, frozen=True):
    """Any document."""

    number: int
    text: str = ""


@given(st.binary(max_size=200))
def test_what_is_sealed_unseals(body):
    assert shared_files.unseal(shared_files.seal(body)) == body


@given(st.binary(max_size=200), st.data())
def test_every_torn_copy_is_recognised(body, data):
    sealed = shared_files.seal(body)
    assert shared_files.unseal(sealed[: data.draw(st.integers(0, len(sealed) - 1))]) is None


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_flipped_byte_is_recognised(body, data):
    sealed = bytearray(shared_files.seal(body))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    assert shared_files.unseal(bytes(sealed)) is None


def test_a_document_is_read_as_it_was_written(tmp_path):
    shared_files.write_document(tmp_path / "new" / "note.json", Note(3, "three"))
    assert shared_files.read_document(tmp_path / "new" / "note.json", Note) == Note(3, "three")


@pytest.mark.parametrize(
    "content", [b"", b"{}", shared_files.seal(b"{}")[:-1], shared_files.seal(b'{"number": "x"}'), b"\x00" * 64]
)
def test_empty_torn_and_foreign_files_are_no_documents(tmp_path, content):
    (tmp_path / "note.json").write_bytes(content)
    assert shared_files.read_document(tmp_path / "note.json", Note) is None


def test_absent_files_and_folders_are_no_documents(tmp_path):
    (tmp_path / "file").touch()
    assert shared_files.read_document(tmp_path / "none.json", Note) is None
    assert shared_files.read_document(tmp_path / "none" / "none.json", Note) is None
    assert shared_files.read_document(tmp_path / "file" / "none.json", Note) is None


def test_an_unreadable_file_is_an_error_not_an_absence(tmp_path):
    with pytest.raises(IsADirectoryError):
        shared_files.read_document(tmp_path, Note)


def test_one_of_many_creators_wins_and_its_content_stays(tmp_path):
    path, start, wins = tmp_path / "claim.json", threading.Barrier(16), []

    def claim(number: int) -> None:
        start.wait(10)
        if shared_files.create_document(path, Note(number)):
            wins.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [shared_files.read_document(path, Note)] == [Note(number) for number in wins]


def test_a_link_whose_reply_was_lost_counts_as_created(tmp_path, monkeypatch):
    real_link = os.link

    def link(source: Path, target: Path) -> None:
        real_link(source, target)
        raise OSError(errno.EIO, "the server's reply was lost")

    monkeypatch.setattr(os, "link", link)
    assert shared_files.create_document(tmp_path / "claim.json", Note(1))


@pytest.mark.parametrize("call", ["link", "replace"])
def test_a_call_that_a_client_sent_twice_counts_as_done(tmp_path, monkeypatch, call):
    """The reply to the first was lost; the second finds its own work, and fails on it."""
    really, write = getattr(os, call), shared_files.create_document if call == "link" else shared_files.write_document

    def sent_twice(source: Path, target: Path) -> None:
        really(source, target)
        really(source, target)

    monkeypatch.setattr(os, call, sent_twice)
    assert write(tmp_path / "claim.json", Note(1)) in (True, None)
    assert shared_files.read_document(tmp_path / "claim.json", Note) == Note(1)
    assert [path.name for path in tmp_path.iterdir()] == ["claim.json"]


def test_a_client_that_asks_twice_for_a_name_that_another_has_is_not_its_creator(tmp_path, monkeypatch):
    shared_files.write_document(tmp_path / "claim.json", Note(1))
    really = os.link
    monkeypatch.setattr(os, "link", lambda source, target: really(source, target) or really(source, target))
    assert not shared_files.create_document(tmp_path / "claim.json", Note(2))
    assert shared_files.read_document(tmp_path / "claim.json", Note) == Note(1)


@pytest.mark.parametrize("call", ["link", "replace"])
def test_a_call_that_failed_and_did_nothing_is_an_error_and_no_lost_race(tmp_path, monkeypatch, call):
    write = shared_files.create_document if call == "link" else shared_files.write_document

    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "claim.json", Note(1))
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_name_that_cannot_be_removed_does_not_undo_what_was_written(tmp_path, monkeypatch):
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "unlink", fail)
    assert shared_files.create_document(tmp_path / "claim.json", Note(1))
    assert shared_files.read_document(tmp_path / "claim.json", Note) == Note(1)


def test_a_reader_beside_a_busy_writer_never_sees_a_part(tmp_path):
    path, done = tmp_path / "note.json", threading.Event()
    shared_files.write_document(path, Note(0, "x" * 5000))
    torn = []

    def read() -> None:
        while not done.is_set():
            note = shared_files.read_document(path, Note)
            if note is None or note.text != "x" * (5000 + note.number):
                torn.append(note)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        shared_files.write_document(path, Note(number, "x" * (5000 + number)))
    done.set()
    reader.join(10)
    assert torn == []


def test_nothing_is_left_behind_but_the_file_and_only_its_owner_may_read_it(tmp_path):
    shared_files.write_document(tmp_path / "a.json", Note(1))
    shared_files.create_document(tmp_path / "b.json", Note(1))
    assert not shared_files.create_document(tmp_path / "b.json", Note(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_content_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "note.json"
    shared_files.write_document(path, Note(1))

    def fsync(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no space left"):
        shared_files.write_document(path, Note(2))
    assert shared_files.read_document(path, Note) == Note(1)
    assert [path.name for path in tmp_path.iterdir()] == ["note.json"]


@pytest.mark.parametrize("name", ["absent", "file/below", "a" * 300, "a/" * 3000, "\0", "loop", "\ud800"])
def test_a_path_that_names_nothing_does_not_exist(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert shared_files.exists(tmp_path / "file")
    assert not shared_files.exists(tmp_path / name)


@needs_another_user
def test_whether_a_file_of_a_closed_folder_exists_is_unknown() -> None:
    with shared_directory() as folder:
        (folder / "closed").mkdir(mode=0o700)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(PermissionError):
                shared_files.exists(folder / "closed" / "file")
        finally:
            os.seteuid(0)
