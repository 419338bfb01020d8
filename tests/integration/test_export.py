"""A trained model leaves the trainer as a directory that vLLM serves and the trainer itself reads."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import checkpoint_worlds as worlds
from tests.support.ranks.forked_ranks import run_ranks
from tests.support.servers.offline_vllm import MOST, greedily

pytestmark = pytest.mark.integration
CLOSE = 1e-4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def test_vllm_continues_greedily_with_the_trainers_logprobs(tmp_path: Path) -> None:
    """Two ranks train and export; vLLM samples from what they wrote; one rank reads it and says what is true."""
    model, truth = tmp_path / "model", tmp_path / "truth.json"
    run_ranks(2, worlds.train_and_export, model)
    answers = greedily(model, PROMPTS)
    assert [len(tokens) for tokens, _ in answers] == [MOST] * len(PROMPTS)
    rows = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
    run_ranks(1, worlds.logprobs_of, model, rows, truth)
    for (_, logprobs), whole in zip(answers, json.loads(truth.read_text()), strict=True):
        assert logprobs == pytest.approx(whole[-MOST:], abs=CLOSE)
        assert min(logprobs) < -0.01, "nothing is certain in an untrained model, so the comparison says something"
