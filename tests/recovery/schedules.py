"""Runs under random schedules of faults: each must end at its exact step count, and its files must prove it.

    python -m tests.recovery.schedules --seeds 50                    # seeds 0 to 49 that have no result yet
    python -m tests.recovery.schedules --seeds 1 --first 17 --again  # one of them

A seed is a schedule: one to three faults of `pipeline.run.fault_plan`, at random targets and moments, in a small run on
this machine. A run whose attempt ends is submitted again by the same command, as a user would. Results are added to one
file, one JSON object a line, so that seeds can be tried in several calls.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.observability.run_check import check_run
from pipeline.run.completion import is_finished
from pipeline.run.fault_plan import NUMBERED_MOMENTS, TARGETS
from tests.support.runs.launched import Launched, Launches

STEPS, PROMPTS, MAX_FAULTS = 6, 4, 3
CONFIG = (
    "resources.inference.nodes=1",
    "resources.trainer.processes=1",
    "cluster.heartbeat_seconds=20",
    f"training.steps={STEPS}",
    f"training.prompts_per_step={PROMPTS}",
    "training.sft.steps=2",
    "training.checkpoint_every=2",
    "rollout.group_size=4",
    "task.options.held_out=8",
)
KINDS = ("kill", "stop", "exit", "early", "partition", "late", "torn")
NODES = 3
"""Redis, preprocessor and actor; the trainer; a server."""
SECONDS = 900.0
"""Deadline of one submission; a run that exceeds it hangs."""
RESULTS = Path("tests/recovery/schedules.jsonl")


class ScheduleTrial(msgspec.Struct, kw_only=True):
    """The outcome of one seed.

    Attributes:
        faults, injected: the schedule; those of its faults that happened. A run may end before the moment of a fault.
        submissions: how often the command was given until the run had finished.
        restarts: restarts of roles in place.
        problem: why the run is not the expected one; empty if it is.
    """

    seed: int
    faults: tuple[str, ...]
    injected: int = 0
    submissions: int = 0
    restarts: int = 0
    seconds: float = 0.0
    problem: str = ""


def schedule(seed: int) -> tuple[str, ...]:
    """The faults of a seed."""
    draw = random.Random(seed)
    faults = list[str]()
    for _ in range(draw.randint(1, MAX_FAULTS)):
        # A run keeps two checkpoints. With both torn there is nothing to resume from, and the run is refused.
        kind = draw.choice(KINDS if not any(fault.startswith("torn") for fault in faults) else KINDS[:-1])
        steps = [f"step={step}" for step in range(1, STEPS + 1)]
        if kind == "late":
            faults.append(f"late:names={draw.randint(1, 5)}s")
            continue
        moments = (
            [*steps[2:], "end"]
            if kind == "torn"
            else ["start", *NUMBERED_MOMENTS, "end", f"{draw.randint(1, 20)}s", *steps]
        )
        target = draw.choice(TARGETS[kind])
        if kind == "partition":
            target += f"[{draw.randrange(NODES)}]={draw.randint(2, 15)}s"
        faults.append(f"{kind}:{target}@{draw.choice(moments)}")
    return tuple(faults)


def try_seed(seed: int) -> ScheduleTrial:
    """Run one schedule to its end."""
    trial, started = ScheduleTrial(seed=seed, faults=schedule(seed)), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="rollcall-schedule-") as folder, Launches(Path(folder)) as launches:
            _run(trial, launches)
    except Exception as error:  # noqa: BLE001 (it is the result)
        trial.problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    trial.seconds = round(time.monotonic() - started, 1)
    return trial


def _run(trial: ScheduleTrial, launches: Launches) -> None:
    run = None
    # Each fault ends at most one attempt.
    while trial.submissions <= len(trial.faults) and not (run and is_finished(run.run)):
        run = launches.submit("r", *CONFIG, f"faults=[{','.join(trial.faults)}]")
        trial.submissions += 1
        code = run.end(SECONDS)  # `TimeoutExpired` for a run that hangs
    assert run is not None
    trial.injected = len(list(run.run.faults.iterdir())) if run.run.faults.exists() else 0
    trial.restarts = sum(line.count('"restarting"') for line in _timelines(run))
    trial.problem = _problem_of(run, code)


def _timelines(run: Launched) -> list[str]:
    return [file.read_text() for attempt in run.attempts for file in attempt.timeline.glob("*.jsonl")]


def _problem_of(run: Launched, code: int) -> str:
    """The difference of a run from a sound one that reached its last step; empty if there is none."""
    if code != 0 or not is_finished(run.run):
        return f"exit code {code}: {' '.join(run.output().splitlines()[-3:])}"
    check = check_run(run.run.root)
    problems = list(check.problems)
    if check.steps != STEPS:
        problems.append(f"{check.steps} steps, expected {STEPS}")
    if check.groups != STEPS * PROMPTS:
        problems.append(f"{check.groups} groups, expected {STEPS * PROMPTS}")
    if not (run.run.model / "model.safetensors").exists():
        problems.append("no exported model")
    return "; ".join(problems)


def read_trials(results: Path) -> dict[int, ScheduleTrial]:
    """The newest result of every seed."""
    lines = results.read_bytes().splitlines() if results.exists() else []
    return {trial.seed: trial for trial in (msgspec.json.decode(line, type=ScheduleTrial) for line in lines)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recovery.schedules", description="Random fault schedules.")
    parser.add_argument("--seeds", type=int, default=50, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--again", action="store_true", help="also try seeds that have a result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results, one JSON object a line")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    for seed in seeds:
        if options.again or seed not in read_trials(options.results):
            trial = try_seed(seed)
            with options.results.open("ab") as file:
                file.write(msgspec.json.encode(trial) + b"\n")
            print(f"{seed}  {', '.join(trial.faults)}  {trial.seconds:.0f} s  {trial.problem or 'sound'}", flush=True)
    trials = [trial for seed, trial in read_trials(options.results).items() if seed in seeds]
    sound = sum(not trial.problem for trial in trials)
    print(f"{sound} of {len(trials)} runs reached their last step and are sound")
    return 0 if sound == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
