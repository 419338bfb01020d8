"""A whole run that shares one GPU with its server, beside TRL's GRPOTrainer with vLLM in its own process there.

    python -m tests.gpu.peers OUT.json [--shape 0.6b] [--tokens 512] [--steps 30] [--seconds 240] [key=value …]

The same work for both, one after the other: the same random weights, prompts of 16 tokens, 8 samples of each and 128 a
step, one update a step with the same optimizer. Needs TRL in this Python. TRL is told what its documentation names for
one GPU (`trl_settings.py`); it samples, then trains, and its passes are of 32 samples. Samples/s are counted once each
has settled: Rollcall after its eleventh step, TRL, which compiles nothing, after its third. Judged by the goal of 3
times as many.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import bench_laptop
from tests.bench.bench_laptop import Pace
from tests.bench.tables import judge, markdown
from tests.gpu import children, loop
from tests.gpu.ceilings import PROMPT
from tests.gpu.words import Words, WordsOptions, write_whole_model
from tests.gpu.workload import WORKLOADS

GOAL, PASSES, LR = 3.0, 4, 1e-5
SETTLED = {"ours": bench_laptop.SKIPPED, "theirs": 2}
"""After which step, counted from 0, the samples of each side count."""
SCRIPT = Path(bench_laptop.__file__).with_name("trl_grpo.py")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--their-steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=240, help="for each side")
    parser.add_argument("overrides", nargs="*", help="further keys of the run's config")
    given = parser.parse_intermixed_args(arguments)
    if given.steps < SETTLED["ours"] + 2 or given.their_steps < SETTLED["theirs"] + 2:
        parser.error(f"expected at least {SETTLED['ours'] + 2} steps and {SETTLED['theirs'] + 2} of theirs")
    found: dict[str, Any] = {"command": {name: value for name, value in vars(given).items() if name != "out"}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_whole_model(folder / "model", WORKLOADS[given.shape])
        for name, side in (("theirs", theirs), ("ours", ours)):
            found[name] = side(folder, given)
            given.out.write_text(json.dumps(found, indent=1))
    paced = paces(found)
    rows = [(name, pace.seconds, pace.samples, pace.reward) for name, pace in paced.items()]
    print(markdown(("", "s a step", "samples/s", "reward, last ten steps"), rows))
    if len(paced) < len(SETTLED):
        return judge("both sides were measured", False)
    ratio, ended = paced["ours"].samples / paced["theirs"].samples, not any(found[name]["exit"] for name in SETTLED)
    return judge(f"ended well, and {ratio:.2f} times their samples/s, at least {GOAL:g}", ended and ratio >= GOAL)


def paces(found: dict[str, Any]) -> dict[str, Pace]:
    """What each side makes once it has settled, if it came so far."""
    return {
        name: Pace.of(found[name]["ends"], found[name]["rewards"], samples(), skipped)
        for name, skipped in SETTLED.items()
        if len(found[name]["ends"]) >= skipped + 2
    }


def samples() -> int:
    """Of a step."""
    return loop.PROMPTS * loop.SAMPLES


def theirs(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """When each step ended, the rewards and the versions, of the steps that were done; nothing before the first."""
    task = Words(WordsOptions(), seed=0)
    prompts = [task.prompt(index) for index in range(given.their_steps * loop.PROMPTS)]
    asked = {
        "model": str(folder / "model"),
        "rows": [{"prompt": list(prompt.messages)} for prompt in prompts],
        "steps": given.their_steps,
        "prompts_per_step": loop.PROMPTS,
        "samples": loop.SAMPLES,
        "max_tokens": given.tokens,
        "longest": given.tokens + PROMPT + 48,
        "lr": LR,
        "betas": (0.9, 0.95),
        "clip_norm": 1.0,
        "clip": 0.2,
        "threads": 0,
        "device": given.device,
        "passes": PASSES,
        "reward": "even",
        "out": str(folder / "trl.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [sys.executable, str(SCRIPT), str(folder / "asked.json")]
    environment = os.environ | {"VLLM_PLUGINS": ""}  # their vLLM as it comes, without our plugin
    code, said = children.call(command, given.seconds, environment=environment), folder / "trl.json"
    return {"exit": code, "ends": [], "rewards": [], **(json.loads(said.read_text()) if said.exists() else {})}


def ours(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    asked = [str(given.out), "--shape", given.shape, "--device", given.device, "--share", "--steps", str(given.steps)]
    asked += ["--tokens", str(given.tokens), "--seconds", str(given.seconds)]
    chosen = loop.asked_for([*asked, "model.init=pretrained", f"optim.lr={LR}", *given.overrides])
    ran = loop.run(folder, chosen, stepped=lambda _: None)
    rows = loop.trained(folder)
    return {
        "exit": ran["exit"],
        "ends": [row["time"] for row in rows],
        "rewards": [row["reward/mean"] for row in rows],
        "training_seconds": [row["seconds/train"] for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
