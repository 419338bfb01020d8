"""Directories and files that only their owner may use."""

import os
import stat
from pathlib import Path

import pytest

from pipeline.utils.private_files import is_private, make_directory, open_private
from tests.support.strangers import as_stranger, needs_another_user, shared_directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("wanted", [0o700, 0o750])
def test_a_directory_has_its_mode_whatever_the_umask(umask: int, wanted: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        make_directory(tmp_path / "new", wanted)
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == wanted


def test_a_directory_that_is_there_is_closed_and_keeps_its_group_bit(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    make_directory(tmp_path)
    assert mode(tmp_path) == 0o2700


def test_only_a_directory_of_ones_own_is_private(tmp_path: Path) -> None:
    make_directory(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "open").mkdir(mode=0o755)
    found = {path.name for path in tmp_path.iterdir() if is_private(path)}
    assert found == {"own"}
    assert not is_private(tmp_path / "absent")


def test_a_file_that_others_could_read_is_closed_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(mode=0o666)
    with open(path, "a+", opener=open_private):
        assert mode(path) == 0o600


@needs_another_user
def test_a_directory_of_a_stranger_is_not_private() -> None:
    with shared_directory() as shared:
        made = as_stranger("import os, sys; os.mkdir(sys.argv[1], 0o700)", shared / "theirs")
        assert not made.returncode, made.stderr
        assert not is_private(shared / "theirs")
