"""GRPO in one process: transformers generates, torch trains, and nothing else: what a run's rewards are compared with.

    python -m tests.gpu.reference OUT.json MODEL [--steps 60] [--tokens 64] [--lr 1e-4] [--seed 0] [--device cuda]

Owns a synchronous loop as one would write it: sample 16 prompts 8 times each, weigh each sample by its group's reward,
one AdamW step, again. Parameters are float32; passes and sampling are bfloat16 on a GPU, as a run's are there, and
float32 on CPUs. Each step is written once it is done.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.config import OptimConfig
from pipeline.environments.task_protocol import Prompt
from tests.gpu.words import END, Words, WordsOptions

PROMPTS, SAMPLES, PARTS = 16, 8, 4
"""Of a step; passes of its gradient."""
EPSILON = 1e-6


def sample(model: PreTrainedModel, prompts_NP: Tensor, tokens: int) -> Tensor:
    """Prompts and what the model goes on with at temperature 1: int64[N, P + tokens], all `END` after the first."""
    return model.generate(
        prompts_NP,
        attention_mask=torch.ones_like(prompts_NP),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=END,
        pad_token_id=END,
    )


def rewards_of(task: Words, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, answers_NT: Tensor) -> Tensor:
    """float32[N], of samples that lie prompt after prompt."""
    texts = tokenizer.batch_decode(answers_NT, skip_special_tokens=True)
    return torch.tensor([task.reward(prompts[place // SAMPLES], text) for place, text in enumerate(texts)])


def advantages_of(rewards_N: Tensor) -> Tensor:
    """A reward less its group's mean, over the group's deviation (GRPO, Shao et al. 2024)."""
    groups = rewards_N.view(-1, SAMPLES)
    deviations = groups.std(1, correction=0, keepdim=True)
    return ((groups - groups.mean(1, keepdim=True)) / (deviations + EPSILON)).flatten()


def add_gradients(model: PreTrainedModel, rows_NT: Tensor, prompt: int, advantages_N: Tensor) -> None:
    """Of −Σ advantage · log-probability over all sampled tokens, by their number: on-policy, every ratio is 1."""
    sampled_NT = rows_NT[:, prompt:]
    counted_NT = (sampled_NT == END).cumsum(1) - (sampled_NT == END).long() == 0
    weights_NT = counted_NT * advantages_N[:, None] / counted_NT.sum()
    for rows, weights in zip(rows_NT.chunk(PARTS), weights_NT.chunk(PARTS), strict=True):
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, prompt - 1 :]
        surprise = cross_entropy(logits.float().flatten(0, 1), rows[:, prompt:].flatten(), reduction="none")
        (weights.flatten() * surprise).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device, dtype = given.device, torch.bfloat16 if given.device == "cuda" else torch.float32
    trained = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device)
    sampler = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    optim = OptimConfig(lr=given.lr)
    adamw = torch.optim.AdamW(
        trained.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0
    )
    task, rows = Words(WordsOptions(), given.seed), []
    for step in range(given.steps):
        began = time.monotonic()
        prompts = [task.prompt(step * PROMPTS + index) for index in range(PROMPTS)]
        texts = [tokenizer.apply_chat_template(list(prompt.messages), tokenize=False) for prompt in prompts]
        asked = tokenizer(texts, return_tensors="pt").input_ids.to(device).repeat_interleave(SAMPLES, 0)
        with torch.no_grad():
            for own, other in zip(sampler.parameters(), trained.parameters(), strict=True):
                own.copy_(other)
            sampled = sample(sampler, asked, given.tokens)
        rewards = rewards_of(task, prompts, tokenizer, sampled[:, asked.shape[1] :])
        add_gradients(trained, sampled, asked.shape[1], advantages_of(rewards).to(device))
        torch.nn.utils.clip_grad_norm_(trained.parameters(), optim.clip_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        rows.append({"reward": float(rewards.mean()), "seconds": time.monotonic() - began})
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
