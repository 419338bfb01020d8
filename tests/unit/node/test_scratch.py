"""The folder for what libraries leave behind: it goes with the attempt, and what is worth keeping lies outside."""

import tempfile
from pathlib import Path

import pytest

from slurm.node.scratch import COMPILED, FOLDER, LONGEST, SOCKETS, scratch_folder


def test_the_folder_is_gone_afterwards_with_all_that_is_in_it() -> None:
    with scratch_folder({}) as variables:
        folder = Path(variables[FOLDER])
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        assert Path(variables[COMPILED]).parent == folder.parent, "the next attempt finds it"
    assert not folder.exists()


def test_what_a_user_chose_stays() -> None:
    with scratch_folder({COMPILED: "/fast"}) as variables:
        assert set(variables) == {FOLDER}


def test_sockets_are_where_their_names_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * LONGEST)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with scratch_folder({}) as variables:
        assert variables[SOCKETS] == str(deep), "where vLLM has them by itself"
