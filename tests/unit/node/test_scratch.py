"""The folder for what libraries leave behind: it goes with the attempt, and a user's own choice stays."""

import tempfile
from pathlib import Path

import pytest

from slurm.node.scratch import LOGS, LONGEST, SOCKETS, scratch_folder


def test_the_folder_is_gone_afterwards_with_all_that_is_in_it() -> None:
    with scratch_folder({}) as variables:
        assert set(variables) == {SOCKETS, LOGS}
        folder = Path(variables[SOCKETS])
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
    assert not folder.exists()


def test_what_a_user_chose_stays() -> None:
    with scratch_folder({SOCKETS: "/fast"}) as variables:
        assert set(variables) == {LOGS}


def test_a_socket_in_a_folder_with_a_long_name_would_fit_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * LONGEST)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with scratch_folder({}) as variables:
        assert set(variables) == {LOGS}
