"""`pipeline.train.offline.shared_visibility`: ranks that see a folder late, as it was before, or never."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.errors import CheckpointError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.offline import shared_visibility
from pipeline.train.offline.shared_visibility import Files, files_in, wait_until_visible


class Ranks:
    """A dispatch of ranks that see what their views show, rank 0 the folder itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *views: Callable[[Path], Files]) -> None:
        self._monkeypatch, self._views = monkeypatch, views

    def run_on_all_models(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = []
        for view in self._views:
            with self._monkeypatch.context() as patched:
                patched.setattr(shared_visibility, "files_in", view)
                answers.append(function(None, *args))
        return answers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "weights").mkdir()
    return made


def test_a_folder_that_is_seen_late_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{}, {"config.json": (2, 1)}, files_in(folder)])
    wait_until_visible(cast(RankGroup, Ranks(monkeypatch, files_in, lambda _: next(looks))), folder, 30.0)
    assert next(looks, None) is None


def test_a_rank_that_sees_another_model_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"config.json": (2, 1)}  # of the same size, and older
    ranks = Ranks(monkeypatch, files_in, lambda _: before, files_in, lambda _: {})
    with pytest.raises(CheckpointError, match=r"rank 1, 3 does not see .*model as rank 0 does, after 0 s; it must lie"):
        wait_until_visible(cast(RankGroup, ranks), folder, 0.0)


def test_what_is_told_apart_is_size_and_time_of_each_file(folder: Path) -> None:
    (found,) = files_in(folder).items()
    assert found[0] == "config.json"
    os.utime(folder / "config.json", ns=(5, 5))
    assert files_in(folder) == {"config.json": (2, 5)}
    assert files_in(folder / "gone") == {}
