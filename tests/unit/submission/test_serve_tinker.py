"""The base with random weights of a run that serves, and the lines that a client's shell reads."""

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import ConfigError
from pipeline.tinker.gateway_settings import Address
from slurm.submission.compose_config import compose_config
from slurm.submission.serve_tinker import _exports, with_base


def serving(output: Path, *more: str) -> RunConfig:
    given = ["experiment=tinker", "cluster=local", "serve.enabled=true", "training.steps=0", "model=tiny_qwen3"]
    return compose_config([*given, f"output={output}", "name=srv", *more])


def test_a_base_of_another_model_or_seed_is_not_served_under_the_name_of_this_one(tmp_path: Path) -> None:
    base = Path(with_base(serving(tmp_path)).model.path)
    asked, written = (json.loads((path / "config.json").read_text()) for path in (BUILT_IN / "tiny_qwen3", base))
    assert written["vocab_size"] == asked["vocab_size"]
    before = (base / "model.safetensors").stat()
    for more in ("model=tiny_text", "seed=7"):
        with pytest.raises(ConfigError, match="choose another name, such as name=srv-2") as refused:
            with_base(serving(tmp_path, more))
        assert more.replace("model=", "model.path=") in str(refused.value)
        assert "\n" not in str(refused.value)
    assert with_base(serving(tmp_path)).model.path == str(base), "the same command continues"
    assert (base / "model.safetensors").stat() == before


def test_a_shell_reads_the_key_from_a_path_with_a_space(tmp_path: Path) -> None:
    key = tmp_path / "a b" / "it's key"
    key.parent.mkdir()
    key.write_text("tml-secret")
    lines = _exports(Address(url="http://host:1", secret="", pid=1), key)
    command = ["sh", "-c", f'{lines}\necho "$TINKER_BASE_URL $TINKER_API_KEY"']
    assert subprocess.run(command, capture_output=True, text=True).stdout == "http://host:1 tml-secret\n"
