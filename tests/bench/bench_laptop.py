"""A whole run on this machine's cores beside TRL's GRPOTrainer: the same model, prompts, samples a step and optimizer.

    python -m tests.bench.bench_laptop --trl /path/to/python [--rounds 2] [--steps 100] [--output DIR] [key=value …]

`--trl` is the Python of an environment that has TRL; it is no dependency of the project:

    python -m venv trl && trl/bin/pip install trl

Both go on from the weights of the demo's SFT, with 32 prompts of 8 samples a step, and both may use two threads
at most for each process. Rollcall's side is the demo as a user starts it, without evaluations: launcher, agents, Redis,
a vLLM server, actor, preprocessor and trainer, asynchronous with the demo's `max_lag`. TRL's is one process in which
transformers generates, then trains. They take turns, and who begins changes too. Samples/s are counted after the
eleventh step; the mean reward of the last ten steps says that both learn. Exits with 1 unless Rollcall makes at least
as many samples/s, by the medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.environments import load_task
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import RunPaths
from tests.bench.tables import judge, markdown

ROOT = Path(__file__).resolve().parents[2]
SKIPPED, THREADS = 10, 2
OURS_ALONE = ("name", "output", "model.path", "model.init", "training.steps", "training.eval_every")


@dataclass(frozen=True)
class Pace:
    """What one run made.

    Attributes:
        seconds: of a step, by the clock.
        samples: a second.
        reward: mean of the last ten steps.
    """

    seconds: float
    samples: float
    reward: float

    @classmethod
    def of(cls, ends: list[float], rewards: list[float], samples: int, skipped: int = SKIPPED) -> "Pace":
        seconds = (ends[-1] - ends[skipped]) / (len(ends) - 1 - skipped)
        return cls(seconds, samples / seconds, statistics.mean(rewards[-10:]))


def launch(output: Path, name: str, *overrides: str) -> Path:
    """The demo, to its end; its run directory."""
    command = [sys.executable, "launchers/submit.py", "experiment=demo", f"name={name}", f"output={output}"]
    subprocess.run([*command, *overrides], cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    return output / name


def run_ours(output: Path, name: str, model: Path, given: argparse.Namespace, overrides: list[str]) -> Pace:
    run = launch(
        output,
        name,
        f"model.path={model}",
        "model.init=pretrained",
        "training.sft.steps=0",
        f"training.steps={given.steps}",
        "training.eval_every=0",
        *overrides,
    )
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"]
    return Pace.of([row["time"] for row in rows], [row["reward/mean"] for row in rows], int(rows[0]["samples"]))


def run_theirs(folder: Path, model: Path, config: RunConfig, given: argparse.Namespace) -> tuple[Pace, str]:
    """TRL's side: what `tests/bench/trl_grpo.py` wrote, and the versions."""
    training, rollout = config.training, config.rollout
    task = load_task(config.task, config.seed)
    prompts = [task.prompt(index) for index in range(given.steps * training.prompts_per_step)]
    asked: dict[str, Any] = {
        "model": str(model),
        "rows": [{"prompt": list(prompt.messages), "answer": prompt.answer} for prompt in prompts],
        "steps": given.steps,
        "prompts_per_step": training.prompts_per_step,
        "samples": rollout.group_size,
        "max_tokens": rollout.max_tokens,
        "lr": config.optim.lr,
        "betas": (config.optim.beta1, config.optim.beta2),
        "clip_norm": config.optim.clip_norm,
        "clip": config.loss.clip_low,
        "threads": THREADS,
        "device": "cpu",
        "passes": 1,
        "reward": "right",
        "out": str(folder / "trl.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [given.trl, str(Path(__file__).with_name("trl_grpo.py")), str(folder / "asked.json")]
    done = subprocess.run(command, timeout=900, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
    if done.returncode:
        sys.exit(f"TRL's side ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    found = json.loads((folder / "trl.json").read_text())
    pace = Pace.of(found["ends"], found["rewards"], training.prompts_per_step * rollout.group_size)
    return pace, f"TRL {found['trl']}, transformers {found['transformers']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="Python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=None, help="keep the runs there")
    given, overrides = parser.parse_known_args()
    if given.steps < SKIPPED + 2 or given.rounds < 1:
        parser.error(f"expected at least one round of at least {SKIPPED + 2} steps")
    if ours_alone := [each for each in overrides if each.partition("=")[0] in OURS_ALONE]:
        parser.error(f"{', '.join(ours_alone)} would change one side only, or nothing: --steps sets the steps")
    if not given.trl:
        print("skipped: give a Python that has TRL, made by: python -m venv trl && trl/bin/pip install trl; --trl")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = given.output or folder / "runs"
        warm = launch(output, "warm", "training.steps=0", *overrides)
        model, config = warm / "model", read_frozen_config(RunPaths(warm))
        assert config is not None
        ours, theirs = [], []
        for number in range(given.rounds):
            for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
                if side == "ours":
                    ours.append(run_ours(output, f"round-{number}", model, given, overrides))
                else:
                    pace, versions = run_theirs(folder, model, config, given)
                    theirs.append(pace)
    rows = [
        (number + 1, name, pace.seconds, pace.samples, pace.reward, pace.samples / pair[1].samples)
        for number, pair in enumerate(zip(ours, theirs, strict=True))
        for name, pace in zip(("Rollcall", "TRL"), pair, strict=True)
    ]
    print(markdown(("round", "", "s a step", "samples/s", "reward, last ten steps", "of TRL"), rows))
    ratio = statistics.median(pace.samples for pace in ours) / statistics.median(pace.samples for pace in theirs)
    print(f"\n{versions}; medians: {ratio:.2f} of TRL's samples/s")
    return judge("at least TRL's samples/s", ratio >= 1)


if __name__ == "__main__":
    sys.exit(main())
