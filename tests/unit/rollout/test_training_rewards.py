"""The rewards that give advantages."""

from typing import Any

import numpy as np

from pipeline.rollout.training_rewards import training_rewards
from pipeline.transport.sample_records import Branch, Sample
from tests.fakes.configs import make_config

PROMPT, LIMIT = 10, 100


def arrays(prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "tokens": np.ones(prompt + sampled, "<i4").tobytes(),
        "sampled": np.array([0] * prompt + [1] * sampled, "<u1").tobytes(),
        "logprobs": np.zeros(prompt + sampled, "<f4").tobytes(),
    }


def test_an_episode_is_as_long_in_two_rows_as_in_one() -> None:
    """Two turns of 90 tokens, half way into the last fifth of the limit."""
    config = make_config(
        training={"overlong_buffer": 0.2},
        rollout={"group_size": 4, "max_tokens": LIMIT},
        model={"path": "tiny_qwen3", "max_length": 512},
    )
    common: dict[str, Any] = {"reward": 1.0, "version_min": 0, "version_max": 0, "finish": "stop", "turns": 2}
    one = Sample(**arrays(PROMPT, 180), **common)
    branched = Sample(**arrays(PROMPT, 90), **common, branches=(Branch(of=0, shared=PROMPT, **arrays(0, 90)),))
    for sample in (one, branched):
        sample.check()
    assert training_rewards([one, branched], config) == [0.5, 0.5]
