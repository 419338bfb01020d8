"""How fast a policy comes near its teacher with `teacher.top_k`: on-policy distillation of a tiny model on a CPU.

    python -m tests.bench.bench_distillation [--seeds 0 1] [--steps 40] [--top-k 16] [--models DIR]

A tiny model that adds with carries is the teacher; another that forgets to carry is the student. Launched runs train
both on demonstrations first (`--models` keeps them, and takes those that are there). Then each way trains the student
for each seed, in this process, without servers and without lag: 8 prompts with 4 samples a step, and the rows, the
loss and the head of the trainer. The sampled token alone is the policy gradient of the experiment `distillation`: each
token's advantage is its log-probability under the teacher minus that under the policy.

The table has the exact KL(student ‖ teacher), over the whole vocabulary and in float64, at the tokens that the student
samples on held-out prompts: before, after half of the steps, and at the end, as the mean over the seeds. `range` has
the smallest and the largest of the seeds at the end. Exits with 1 unless every run halves the student's KL, and the
largest k ends nearer on average than the sampled token alone.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import LossConfig, ModelConfig, TaskConfig
from pipeline.environments import Task, load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model.collate import collate
from pipeline.train.model.models import build_model
from pipeline.train.total_loss import total
from tests.bench.tables import judge, markdown

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"last_digit_first": True, "held_out": 32}
PROMPTS, SAMPLES, MAX_TOKENS = 8, 4, 8
LR, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0
IN_REWARD, IN_LOSS = (
    LossConfig.model_validate({"name": "reinforce", "old_logprobs": "sampler", "tis": "none", **keys})
    for keys in ({}, {"kl": 1.0, "kl_in": "loss"})
)
Model = torch.nn.Module


@dataclass(frozen=True)
class Sampled:
    """Rows with prompts of equal length P: int64[R, P + G] tokens; bool[R, G], which of the G sampled ones come before
    the stop, or are it; and float64[R, G, V], the policy's log-probabilities of each of them."""

    tokens: Tensor
    counted: Tensor
    own: Tensor

    @property
    def prompt(self) -> int:
        return self.tokens.shape[1] - self.counted.shape[1]


def imitate(folder: Path, name: str, error_rate: float) -> Path:
    """The directory of a tiny model after an SFT phase on demonstrations with this rate of errors."""
    model = folder / name / "model"
    words = ["experiment=demo", "model=tiny_text", "model.init=random", "model.max_length=64", "task=arithmetic"]
    words += ["training.sft.steps=400", "training.sft.batch=128", "training.sft.lr=1.5e-3", "training.steps=0"]
    words += [f"task.options={{last_digit_first: true, demonstration_error_rate: {error_rate}}}", "tracking=none"]
    if not model.is_dir():
        argv = [
            sys.executable,
            "launchers/submit.py",
            f"output={folder}",
            f"name={name}",
            "training.eval_every=0",
            *words,
        ]
        subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    return model


@torch.no_grad()
def sample(network: Model, prompts: Sequence[Sequence[int]], stops: Sequence[int]) -> Iterator[Sampled]:
    """`SAMPLES` completions of each prompt at temperature 1; one item for each length of a prompt."""
    for length in sorted({len(prompt) for prompt in prompts}):
        tokens = torch.tensor([prompt for prompt in prompts if len(prompt) == length]).repeat_interleave(SAMPLES, 0)
        alive, counted, own = torch.ones(len(tokens), dtype=torch.bool), list[Tensor](), list[Tensor]()
        for _ in range(MAX_TOKENS):
            own.append(network(input_ids=tokens, use_cache=False).logits[:, -1].double().log_softmax(-1))
            counted.append(alive)
            drawn = torch.multinomial(own[-1].exp(), 1)
            tokens = torch.cat([tokens, drawn], 1)
            alive = alive & ~torch.isin(drawn[:, 0], torch.tensor(stops))
        yield Sampled(tokens, torch.stack(counted, 1), torch.stack(own, 1))


@torch.no_grad()
def scored(network: Model, sampled: Sampled) -> Tensor:
    """float64[R, G, V]: a model's log-probabilities of each sampled token."""
    logits: Tensor = network(input_ids=sampled.tokens, use_cache=False).logits[:, sampled.prompt - 1 : -1]
    return logits.double().log_softmax(-1)


def make_rows(teacher: Model, sampled: Sampled, top_k: int) -> list[TrainSequence]:
    """The rows of a step, as the preprocessor and the trainer make them."""
    rows = []
    columns = (sampled.tokens, sampled.counted.sum(1).tolist(), sampled.own, scored(teacher, sampled))
    for tokens, count, own_GV, wise_GV in zip(*columns, strict=True):
        drawn = tokens[sampled.prompt :][:count]
        logprobs = [table[:count].gather(1, drawn[:, None])[:, 0].float().numpy() for table in (own_GV, wise_GV)]
        own, reference = (np.concatenate([np.zeros(sampled.prompt, np.float32), values]) for values in logprobs)
        top_ids, top_logprobs = likeliest(wise_GV[:count], drawn, top_k)
        row = TrainSequence(
            tokens=tokens[: sampled.prompt + count].int().numpy(),
            mask=np.arange(sampled.prompt + count) >= sampled.prompt,
            advantages=0.0 if top_k else reference - own,
            sampler_logprobs=own,
            reference=reference,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )
        rows.append(row)
    return rows


def likeliest(
    wise_nV: Tensor, sampled_n: Tensor, top_k: int
) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """`top_ids` and `top_logprobs` of a row: the teacher's likeliest tokens, without the sampled one."""
    if not top_k:
        return None, None
    logprobs, ids = wise_nV.topk(top_k)
    logprobs = logprobs.masked_fill(ids == sampled_n[:, None], -torch.inf)
    return ids.int().numpy(), logprobs.float().numpy()


def distil(student: Path, teacher: Model, task: Task, top_k: int, seed: int, steps: int) -> list[float]:
    """The exact KL before the first step, after half of them, and after the last."""
    policy = build_model(ModelConfig(path=str(student), init="pretrained"), 0, "policy")
    chat = ChatTokenizer(student)
    adam = torch.optim.AdamW(policy.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    found = []
    for step in range(steps):
        if step in (0, steps // 2):
            found.append(exact_kl(policy.network, teacher, task, chat))
        torch.manual_seed(1000 * seed + step)
        prompts = [chat.prompt(task.prompt(step * PROMPTS + index).messages) for index in range(PROMPTS)]
        groups = sample(policy.network, prompts, chat.stop_token_ids)
        rows = [row for sampled in groups for row in make_rows(teacher, sampled, top_k)]
        micro = collate(Batch.of(rows), "packed", torch.device("cpu"))
        targets = micro.targets_M if micro.support_MK is None else micro.support_MK
        where = micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M
        logprobs, _ = policy(*where, targets, 1.0, False)
        loss, _ = total(micro.loss_tokens(logprobs, None), IN_LOSS if top_k else IN_REWARD, "none")
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        adam.step()
    return [*found, exact_kl(policy.network, teacher, task, chat)]


def exact_kl(policy: Model, teacher: Model, task: Task, chat: ChatTokenizer) -> float:
    """KL(policy ‖ teacher) in nats, the mean over the tokens that the policy samples on held-out prompts."""
    torch.manual_seed(0)
    prompts, values = [chat.prompt(prompt.messages) for prompt in task.held_out()], list[Tensor]()
    for sampled in sample(policy, prompts, chat.stop_token_ids):
        values.append((sampled.own.exp() * (sampled.own - scored(teacher, sampled))).sum(-1)[sampled.counted])
    return torch.cat(values).mean().item()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--top-k", type=int, nargs="+", default=[16])
    parser.add_argument("--models", type=Path, help="keep the teacher and the student there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = options.models or Path(tempfile.mkdtemp(prefix="rollcall-distillation-"))
    wise, student = (imitate(folder, name, rate) for name, rate in (("teacher", 0.0), ("student", 0.6)))
    teacher = AutoModelForCausalLM.from_pretrained(wise, dtype=torch.float32).eval()
    runs: dict[int, list[list[float]]] = {}
    for top_k in (0, *options.top_k):
        for seed in options.seeds:
            task = load_task(TaskConfig(name="arithmetic", options=OPTIONS), seed)
            runs.setdefault(top_k, []).append(distil(student, teacher, task, top_k, seed, options.steps))
            print(top_k, seed, runs[top_k][-1], file=sys.stderr, flush=True)
    return report(runs, options.steps)


def report(runs: dict[int, list[list[float]]], steps: int) -> int:
    """Print the table; 0 if the rule of the module's docstring is met."""
    columns = ("teacher.top_k", "before", f"after {steps // 2} steps", f"after {steps} steps", "range")
    means = {top_k: [fmean(values) for values in zip(*found, strict=True)] for top_k, found in runs.items()}
    ends = {top_k: [values[-1] for values in found] for top_k, found in runs.items()}
    rows = [(str(top_k), *means[top_k], f"{min(ends[top_k]):.3f} … {max(ends[top_k]):.3f}") for top_k in runs]
    print(markdown(columns, rows))
    halved = all(values[-1] < values[0] / 2 for found in runs.values() for values in found)
    nearer = means[max(runs)][-1] < means[0][-1]
    return judge(
        f"every run halves the KL, and top_k={max(runs)} ends nearer than the sampled token", halved and nearer
    )


if __name__ == "__main__":
    sys.exit(main())
