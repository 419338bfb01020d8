"""A teacher's likeliest tokens from a real server: those of the model, with its log-probabilities."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import TeacherConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import RolloutError
from pipeline.inference.engine_protocol import POLICY
from pipeline.rollout.teacher_client import RowScores, Teacher
from pipeline.transport.sample_records import Group, Sample
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support.servers.vllm import SECRET, Model, a_model, starting_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ALLOWED = 6
"""The largest number that the server returns (`--max-logprobs`)."""
TOKENS, SAMPLED = [5, 9, 2, 17, 30, 8, 3], [0, 0, 1, 1, 0, 1, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    path = tmp_path_factory.mktemp("teacher") / "wise"
    shutil.copytree(BUILT_IN / "tiny_text", path)
    wise = a_model(path, 3)
    wise.save_pretrained(path)  # type: ignore[operator]
    return path, wise


@pytest.fixture(scope="module")
def keys(model: tuple[Path, Model]) -> Iterator[dict[str, Any]]:
    """The keys of the served teacher."""
    config = make_config(
        model={"path": str(model[0]), "max_length": 64},
        training={"steps": 0, "prompts_per_step": 1},
        evaluation={"only": True, "command": ["true"]},
        inference={"extra_args": ["--max-logprobs", str(ALLOWED)]},
    )
    key = model[0].parent / "key"
    key.write_text(SECRET)
    with starting_of(config, "127.0.0.5") as ready:
        yield {"url": f"http://{ready().endpoint}/v1", "model": POLICY, "key_file": str(key)}


def a_group() -> Group:
    sample = Sample(
        tokens=np.array(TOKENS, "<i4").tobytes(),
        sampled=np.array(SAMPLED, "u1").tobytes(),
        logprobs=np.zeros(len(TOKENS), "<f4").tobytes(),
        reward=0.0,
        version_min=0,
        version_max=0,
        finish="stop",
    )
    return Group(position=0, prompt=0, samples=(sample,))


def scores_of(keys: dict[str, Any], top_k: int) -> RowScores:
    teacher = Teacher(TeacherConfig(**keys, top_k=top_k))
    teacher.meet(WAIT_SECONDS, lambda: False)
    (references,) = teacher.references([a_group()], lambda: False) or []
    assert not isinstance(references, str), references
    return references[0]


@pytest.mark.parametrize("top_k", [1, ALLOWED])
def test_the_likeliest_tokens_of_a_server_are_those_of_its_model(
    top_k: int, model: tuple[Path, Model], keys: dict[str, Any]
) -> None:
    with torch.no_grad():
        table = model[1](torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    scores = scores_of(keys, top_k)
    assert scores.top_tokens is not None
    places = np.flatnonzero(SAMPLED).tolist()
    for place, ids, logprobs in zip(places, *scores.top_tokens.arrays(top_k), strict=True):
        likeliest = [token for token in table[place - 1].topk(top_k).indices.tolist() if token != TOKENS[place]]
        assert ids[: len(likeliest)].tolist() == likeliest
        assert np.isneginf(logprobs[len(likeliest) :]).all()
        torch.testing.assert_close(
            torch.tensor(logprobs[: len(likeliest)]), table[place - 1, likeliest], atol=1e-4, rtol=0
        )
    sampled = torch.tensor(np.frombuffer(scores.logprobs, "<f4")[1:].copy())
    expected = table[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=0)


def test_a_server_that_returns_no_more_says_so_when_it_is_met(keys: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=rf"refuses .*{ALLOWED + 1}.*{ALLOWED}.*fix these, .*teacher.top_k"):
        scores_of(keys, ALLOWED + 1)
