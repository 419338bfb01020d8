"""Where the rows of a dataset are found."""

from pathlib import Path

import pytest

from pipeline.config.data_keys import SourceConfig
from pipeline.data.row_sources import open_rows
from pipeline.errors import ConfigError


def test_the_projects_own_files_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(open_rows(SourceConfig(path="conf/data/sums.jsonl"))) == 640
    with pytest.raises(ConfigError, match=r"conf/data/absent\.jsonl"):
        open_rows(SourceConfig(path="conf/data/absent.jsonl"))
