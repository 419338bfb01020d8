"""Bases with random weights."""

import shutil
from pathlib import Path

from pipeline.config.model_directory import BUILT_IN
from pipeline.train.service.random_base import base_digest, recorded_digest, write_base


def test_weights_in_the_directory_of_the_model_do_not_replace_the_random_ones(tmp_path: Path) -> None:
    shape, base = tmp_path / "shape", tmp_path / "base"
    shutil.copytree(BUILT_IN / "tiny_qwen3", shape)
    (shape / "model.safetensors").write_bytes(b"trained")
    (shape / "model.safetensors.index.json").write_text("{}")
    write_base(shape, base, seed=3)
    assert (base / "model.safetensors").stat().st_size > len(b"trained")
    assert not (base / "model.safetensors.index.json").exists()
    assert (base / "tokenizer_config.json").is_file()
    assert recorded_digest(base) == base_digest(shape, 3) != base_digest(shape, 4)
