"""A trained model leaves the trainer as a directory that vLLM serves and the trainer itself reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.roles import inference
from pipeline.world.plan import Placement
from tests.support.ranks import checkpoint_worlds as worlds
from tests.support.ranks.forked_ranks import run_ranks
from tests.support.servers.offline_vllm import MOST
from tests.support.servers.vllm import tiny_config

pytestmark = pytest.mark.integration
CLOSE = 1e-4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def test_vllm_continues_greedily_with_the_trainers_logprobs(tmp_path: Path) -> None:
    """Two ranks train and export; vLLM samples from what they wrote; one rank reads it and says what is true."""
    model, truth = tmp_path / "model", tmp_path / "truth.json"
    run_ranks(2, worlds.train_and_export, model)
    answers = greedy(model)
    assert [len(tokens) for tokens, _ in answers] == [MOST] * len(PROMPTS)
    rows = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
    run_ranks(1, worlds.logprobs_of, model, rows, truth)
    for (_, logprobs), whole in zip(answers, json.loads(truth.read_text()), strict=True):
        assert logprobs == pytest.approx(whole[-MOST:], abs=CLOSE)
        assert min(logprobs) < -0.01, "nothing is certain in an untrained model, so the comparison says something"


def greedy(model: Path) -> list[tuple[list[int], list[float]]]:
    """Each prompt's greedy continuation by vLLM and the log-probabilities of its tokens."""
    place = Placement(role="inference", index=0, rank=0, address="127.0.0.1", ports=(0,))
    environment = dict(os.environ) | inference.server_environment(
        tiny_config(model), place, model.parent / "world.json"
    )
    command = [sys.executable, "-m", "tests.support.servers.offline_vllm", str(model), json.dumps(PROMPTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[tuple[list[int], list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return answers
