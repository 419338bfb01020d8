"""How near a policy comes to its teacher with `teacher.top_k`: on-policy distillation on a CPU, and the exact KL.

    python -m tests.bench.bench_distillation [--seeds 0 1] [--steps 40] [--top-k 1 4 16] [--output DIR] [key=v …]

A tiny model that adds with carries is the teacher, served by vLLM. Another that forgets to carry is the student of
every run, without a task's reward. Each way runs once for each seed, with equal keys otherwise. The exact
KL(student ‖ teacher) is over the whole vocabulary, in float64, at the tokens that the final student samples on held-out
prompts; all students draw them with the same seed. Exits with 1 unless each top-k run ends nearer to the teacher than
half of the student's distance at the start, and the largest k ends no farther on average than the sampled token alone.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import TaskConfig
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.inference.engine_protocol import POLICY
from pipeline.run.metrics_log import read_rows, series
from tests.bench.tables import judge, markdown
from tests.fakes.configs import make_config
from tests.support.servers.vllm import SECRET, starting_of

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"last_digit_first": True, "demonstration_error_rate": 0.6}
MAX_TOKENS, MAX_LENGTH, SAMPLES = 8, 64, 4
SAMPLED = {
    "sampled token": ["loss.kl_in=reward", "loss.kl_estimator=k1"],
    "sampled token, k2 in the loss": ["loss.kl_in=loss", "loss.kl_estimator=k2"],
}
SUMS = [
    "model=tiny_text",
    f"model.max_length={MAX_LENGTH}",
    "task=arithmetic",
    f"rollout.max_tokens={MAX_TOKENS}",
    "rollout.concurrency=64",
    "training.checkpoint_every=1000",
    "tracking=none",
]
COLUMNS = ("way", "seed", "exact KL", "held-out accuracy", "s a step")


def run_ways(options: argparse.Namespace) -> dict[str, list[str]]:
    """The keys of each way."""
    return {f"top_k={k}": [f"teacher.top_k={k}", "loss.kl_in=loss"] for k in options.top_k} | SAMPLED


def launch(output: Path, name: str, words: Sequence[str]) -> Path:
    """A run to its end, unless it has ended before; its directory."""
    if (output / name / "finished.json").is_file():
        return output / name
    argv = [sys.executable, "launchers/submit.py", f"output={output}", f"name={name}", *words]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    return output / name


def imitate(output: Path, name: str, error_rate: float) -> Path:
    """The directory of a tiny model after an SFT phase on demonstrations with this rate of errors."""
    options = f"task.options={{last_digit_first: true, demonstration_error_rate: {error_rate}}}"
    words = ["training.sft.steps=400", "training.sft.batch=128", "training.sft.lr=1.5e-3", "training.steps=0"]
    start = ["experiment=demo", *SUMS, "model.init=random", *words, "training.eval_every=0", options]
    return launch(output, name, start) / "model"


@contextmanager
def serving(teacher: Path, folder: Path) -> Iterator[list[str]]:
    """The keys of a run with the served teacher."""
    config = make_config(
        model={"path": str(teacher), "max_length": MAX_LENGTH},
        training={"steps": 0, "prompts_per_step": 1},
        evaluation={"only": True, "command": ["true"]},
        inference={"extra_args": ["--max-logprobs", "-1"]},
    )
    (folder / "key").write_text(SECRET)
    with starting_of(config, "127.0.0.1") as ready:
        url = f"http://{ready().endpoint}/v1"
        yield [f"teacher.url={url}", f"teacher.model={POLICY}", f"teacher.key_file={folder / 'key'}"]


def distil(output: Path, name: str, student: Path, words: Sequence[str]) -> Path:
    """The directory of a distillation run from this student."""
    task = "+task.options={last_digit_first: true, demonstration_error_rate: 0.6}"
    sets = "+evaluation.sets.sums={task: {name: arithmetic, options: {last_digit_first: true}}}"
    start = ["experiment=distillation", *SUMS, f"model.path={student}", "model.init=pretrained", "optim.lr=1e-4"]
    return launch(output, name, [*start, task, sets, "evaluation.builtin_set=false", "training.max_lag=2", *words])


def exact_kl(student: Path, teacher: Path) -> float:
    """KL(student ‖ teacher) in nats, the mean over the tokens that the student samples on held-out prompts."""
    policy, wise = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (student, teacher)
    )
    tokenizer = ChatTokenizer(teacher)
    prompts = [
        tokenizer.prompt(p.messages) for p in load_task(TaskConfig(name="arithmetic", options=OPTIONS), 0).held_out()
    ]
    torch.manual_seed(0)
    values = list[Tensor]()
    with torch.no_grad():
        for length in sorted({len(prompt) for prompt in prompts}):
            alike = [prompt for prompt in prompts if len(prompt) == length]
            values.append(divergences(policy, wise, torch.tensor(alike).repeat(SAMPLES, 1), tokenizer.stop_token_ids))
    return torch.cat(values).mean().item()


def divergences(policy: torch.nn.Module, wise: torch.nn.Module, prompts: Tensor, stops: Sequence[int]) -> Tensor:
    """KL at each token that the policy samples after prompts of equal length, until it stops."""
    tokens, alive, values = prompts, torch.ones(len(prompts), dtype=torch.bool), list[Tensor]()
    for _ in range(MAX_TOKENS):
        own, other = (
            model(input_ids=tokens, use_cache=False).logits[:, -1].log_softmax(-1) for model in (policy, wise)
        )
        values.append((own.exp() * (own - other)).sum(-1)[alive])
        drawn = torch.multinomial(own.exp(), 1)
        alive &= ~torch.isin(drawn[:, 0], torch.tensor(stops))
        tokens = torch.cat([tokens, drawn], 1)
    return torch.cat(values)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=Path, help="keep the runs there; those that ended there are not repeated")
    options, overrides = parser.parse_known_args(arguments)
    output = options.output or Path(tempfile.mkdtemp(prefix="rollcall-distillation-"))
    teacher, student = (imitate(output, name, rate) for name, rate in (("teacher", 0.0), ("student", 0.6)))
    start = exact_kl(student, teacher)
    steps = [f"training.steps={options.steps}", f"training.eval_every={options.steps}"]
    results = list[tuple[str, int, float, float, float]]()
    with serving(teacher, output) as taught:
        for seed, (way, keys) in product(options.seeds, run_ways(options).items()):
            name = f"{way.replace(' ', '-').replace(',', '').replace('=', '-')}-{seed}"
            run = distil(output, name, student, [*taught, *keys, *steps, f"seed={seed}", *overrides])
            rows = read_rows(run / "metrics.jsonl")
            accuracy = [value for _, value in series(rows, "eval/sums/accuracy")]
            seconds = [value for _, value in series(rows, "seconds/step")]
            results.append((way, seed, exact_kl(run / "model", teacher), accuracy[-1], median(seconds)))
            print(results[-1], file=sys.stderr, flush=True)
    print(markdown(COLUMNS, [("student at the start", "", start, accuracy[0], ""), *results]))
    return verdict(start, results)


def verdict(start: float, results: Sequence[tuple[str, int, float, float, float]]) -> int:
    """0 if the rules of the module's docstring are met."""
    ends = {way: [kl for name, _, kl, *_ in results if name == way] for way, *_ in results}
    tops = sorted((way for way in ends if way.startswith("top_k")), key=lambda way: int(way.partition("=")[2]))
    halved = all(kl < start / 2 for way in tops for kl in ends[way])
    nearer = fmean(ends[tops[-1]]) <= fmean(ends["sampled token"])
    rule = f"each top-k run halves the KL of {start:.3g}, and {tops[-1]} ends no farther than the sampled token"
    return judge(rule, halved and nearer)


if __name__ == "__main__":
    sys.exit(main())
