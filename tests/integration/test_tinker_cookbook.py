"""Recipes of tinker-cookbook, unmodified and offline, against a server of ours: trials.

The cookbook needs an older transformers than we do, so it runs in an environment of its own, which `TINKER_COOKBOOK`
names the Python of:

    python -m venv cb && cb/bin/pip install torch==2.13.0 'transformers<=5.5.4' tinker==0.38.0
    cb/bin/pip install --no-deps tinker-cookbook==0.6.1
    cb/bin/pip install blobfile chz cloudpickle datasets pillow pyrage rich termcolor tiktoken tml-renderers \
        sympy pylatexenc math-verify
    TINKER_COOKBOOK=cb/bin/python python -m pytest -m trial tests/integration/test_tinker_cookbook.py
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.integration.tinker_server import TinkerServer, serving_samples

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.timeout(1800)]
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""The smallest model in the cookbook's table; here it is the name of a directory with a tiny one."""
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
SECONDS = 900


@pytest.fixture(scope="module")
def python() -> str:
    if not os.environ.get("TINKER_COOKBOOK"):
        pytest.skip("TINKER_COOKBOOK names no Python with tinker-cookbook")
    return os.environ["TINKER_COOKBOOK"]


@pytest.fixture(scope="module")
def room(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that recipes run in: model, tokenizer and data lie under their names on the hub."""
    room = tmp_path_factory.mktemp("cookbook")
    write_model(room / MODEL)
    robots, grades = room / "HuggingFaceH4" / "no_robots", room / "openai" / "gsm8k"
    for folder in (robots, grades):
        folder.mkdir(parents=True)
    turns = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": "Word."}]
    (robots / "train.jsonl").write_text(f"{json.dumps({'prompt': 'p', 'messages': turns})}\n" * 32)
    row = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
    (grades / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 32)
    (grades / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")
    return room


@pytest.fixture(scope="module")
def server(room: Path) -> Iterator[TinkerServer]:
    served = {"base_name": MODEL, "max_rank": 32}
    with serving_samples(room / "run", ["127.0.0.10"], base=room / MODEL, max_length=1024, **served) as (made, _):
        yield made


def write_model(folder: Path) -> None:
    """A tiny Qwen3 whose tokens are bytes and the marks of its chat template."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[2], pad_token=MARKS[0])
    whole.save_pretrained(folder)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    ids = {"eos_token_id": whole.eos_token_id, "pad_token_id": whole.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(whole), max_position_embeddings=2048, tie_word_embeddings=False, **shape, **ids)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def recipe(python: str, room: Path, server: TinkerServer, name: str, **options: object) -> list[dict[str, Any]]:
    """Run a recipe to its end; its metrics, a row for each step."""
    log = room / f"log-{name.replace('.', '-')}"
    env = {each: value for each, value in os.environ.items() if each != "PYTHONPATH"}
    env |= {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(room / "hf"),
    }
    given = {"model_name": MODEL, "log_path": log, **options}
    command = [python, "-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in given.items())]
    done = subprocess.run(command, cwd=room, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_supervised_training_runs_to_its_end(python: str, room: Path, server: TinkerServer) -> None:
    options = {"batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "lora_rank": 8, "max_length": 256}
    losses = [row["train_mean_nll"] for row in recipe(python, room, server, "sl_loop", **options)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_the_loop_of_rl_runs_to_its_end(python: str, room: Path, server: TinkerServer) -> None:
    options = {"batch_size": 4, "group_size": 4, "max_steps": 2, "max_tokens": 16, "lora_rank": 8}
    rows = recipe(python, room, server, "rl_loop", loss_fn="importance_sampling", **options)
    assert len(rows) == 2


def test_arithmetic_raises_its_reward(python: str, room: Path, server: TinkerServer) -> None:
    """A model of random weights learns to end its answer in time: 0.1 of the reward."""
    options = {"env": "arithmetic", "group_size": 16, "groups_per_batch": 16, "max_steps": 20, "lora_rank": 32}
    options |= {"learning_rate": 1e-2, "loss_fn": "importance_sampling", "save_every": 0, "eval_every": 0}
    rows = recipe(python, room, server, "math_rl.train", **options)
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.02, rewards
