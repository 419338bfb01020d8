"""The sizes of models that commands remember."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config import ModelConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import ConfigError
from pipeline.topology.sizes import Sizes
from pipeline.train.model.model_size import sizes_of
from slurm.submission import size_cache
from slurm.submission.size_cache import remembered_sizes


class Counter:
    """Counts sizes as the trainer does, and the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: ModelConfig) -> Sizes:
        self.calls += 1
        return sizes_of(model)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(BUILT_IN / "tiny_qwen3", tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"), init="random")


def test_a_second_command_counts_nothing_and_has_the_same_sizes(model: ModelConfig) -> None:
    count = Counter()
    assert remembered_sizes(model, count) == remembered_sizes(model, count) == sizes_of(model)
    assert count.calls == 1


def test_another_config_other_keys_or_another_release_are_counted_again(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Counter()
    before = remembered_sizes(model, count)
    config = Path(model.path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 32}))
    assert remembered_sizes(model, count).layer < before.layer
    assert remembered_sizes(model.model_copy(update={"dtype": "bfloat16"}), count).width == 2
    monkeypatch.setattr(size_cache, "version", lambda library: f"{library} 99")
    remembered_sizes(model, count)
    assert count.calls == 4


@pytest.mark.parametrize("content", [b"", b"{", b'{"parameters": 1}', b"\xff"])
def test_a_damaged_file_is_replaced(model: ModelConfig, tmp_path: Path, content: bytes) -> None:
    count = Counter()
    sizes = remembered_sizes(model, count)
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(content)
    assert remembered_sizes(model, count) == sizes
    assert remembered_sizes(model, count) == sizes
    assert count.calls == 2


def test_a_cache_that_cannot_be_written_costs_only_the_counting(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    count = Counter()
    assert remembered_sizes(model, count) == remembered_sizes(model, count)
    assert count.calls == 2


def test_a_failure_is_not_remembered(model: ModelConfig, tmp_path: Path) -> None:
    def fail(model: ModelConfig) -> Sizes:
        raise ConfigError("model.path", model.path, "another model")

    with pytest.raises(ConfigError):
        remembered_sizes(model, fail)
    assert not list((tmp_path / "cache").rglob("*.json"))
