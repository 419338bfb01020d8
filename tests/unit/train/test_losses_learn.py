"""Every loss of `conf/loss` makes a small policy better: no sign is wrong and no setting holds it where it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.algorithms.advantage_estimators import sample_advantages
from pipeline.algorithms.loss_tokens import LossTokens
from pipeline.config import LossConfig
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.loss_specs import SFT, PolicyLossSpec
from pipeline.train.total_loss import total
from slurm.submission import compose_config
from tests.unit.train.losses_by_hand import NAMES

LENGTH, VOCABULARY, PROMPTS, SAMPLES, STEPS = 3, 6, 4, 8, 40
TARGET = torch.tensor([4, 0, 2])


def logprobs_of(logits_TV: Tensor, answers_RT: Tensor) -> Tensor:
    """[R, T] → log-probabilities [R · T] of a policy whose tokens do not depend on each other."""
    return logits_TV.log_softmax(-1)[torch.arange(LENGTH), answers_RT].flatten()


def reward_of(answers_RT: Tensor) -> Tensor:
    return (answers_RT == TARGET).double().mean(-1)


def advantages_of(rewards_R: Tensor, loss: LossConfig) -> Tensor:
    """Those of the loss; where they need the whole batch or a critic, the rewards over their mean and deviation."""
    if not loss.estimator.within_group:
        return (rewards_R - rewards_R.mean()) / (rewards_R.std() + 1e-6)
    groups = rewards_R.view(PROMPTS, SAMPLES).tolist()
    return torch.from_numpy(np.concatenate([sample_advantages(group, loss.advantage_estimator) for group in groups]))


def weights_of(loss: LossConfig) -> float:
    """That of each token: all rows are alike, so all tokens weigh the same."""
    row = TrainSequence(np.zeros(LENGTH + 1, np.int32), np.array([0] + [1] * LENGTH, np.uint8))
    return Batch.of([row] * (PROMPTS * SAMPLES), loss.normalize, max_length=2 * LENGTH).weights[0]


def learned(loss: LossConfig) -> float:
    """The expected reward after some steps of two epochs, on fresh samples."""
    torch.manual_seed(0)
    logits_TV = torch.zeros(LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits_TV], lr=0.1)
    for _ in range(STEPS):
        with torch.no_grad():
            answers_RT = torch.multinomial(logits_TV.softmax(-1), PROMPTS * SAMPLES, replacement=True).T
            sampler_logprobs_N = logprobs_of(logits_TV, answers_RT)
        samples = LossTokens(
            logprobs_N=sampler_logprobs_N,
            weights_N=torch.full_like(sampler_logprobs_N, weights_of(loss)),
            advantages_N=advantages_of(reward_of(answers_RT), loss).repeat_interleave(LENGTH),
            sampler_logprobs_N=sampler_logprobs_N,
            rows_N=torch.arange(len(answers_RT)).repeat_interleave(LENGTH),
            rows=len(answers_RT),
            reference_N=sampler_logprobs_N,
            old_logprobs_N=sampler_logprobs_N,
        )
        for _ in range(2):
            train(adam, replace(samples, logprobs_N=logprobs_of(logits_TV, answers_RT)), loss)
    return logits_TV.detach().softmax(-1)[torch.arange(LENGTH), TARGET].mean().item()


def train(adam: torch.optim.Adam, tokens: LossTokens, objective: PolicyLossSpec) -> None:
    adam.zero_grad()
    total(tokens, objective, "none")[0].backward()
    adam.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_finds_what_is_rewarded(name: str) -> None:
    assert learned(compose_config.compose_config(["experiment=demo", f"loss={name}"]).loss) > 0.9


def test_a_policy_learns_what_it_is_shown() -> None:
    logits_TV = torch.zeros(LENGTH, VOCABULARY, requires_grad=True)
    adam = torch.optim.Adam([logits_TV], lr=0.1)
    zeros_N, ones_N = torch.zeros(LENGTH), torch.ones(LENGTH)
    for _ in range(STEPS):
        logprobs_N = logprobs_of(logits_TV, TARGET[None])
        train(adam, LossTokens(logprobs_N, ones_N / LENGTH, ones_N, zeros_N, zeros_N.long(), 1), SFT)
    assert logits_TV.argmax(-1).tolist() == TARGET.tolist()
