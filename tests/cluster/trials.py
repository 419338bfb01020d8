"""Preemption trials: every way in every phase, on a real Slurm.

    python -m tests.cluster.trials                                  # all of them, one to two minutes each
    python -m tests.cluster.trials --ways requeue node --phases training
    python -m tests.cluster.trials --undisturbed 3                  # runs that nothing happens to: the band
    python -m tests.cluster.trials --page docs/preemption.md        # write the page from the results so far

Owns the trial: start a run as a user does, disturb it once, let it finish, and say what became of it. Results are
added to one file, so that trials can be made in several calls.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.run.metrics_log import read_rows
from pipeline.utils.waiting import wait_for
from tests.cluster.disturbances import PARTITIONS, PATIENCE, PHASES, WAYS
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun
from tests.cluster.trial_page import COLD, Trial, page, problem_of

STEPS, WARM, PROMPTS = 30, 300, 16
CONFIG = (
    f"training.steps={STEPS}",
    f"training.sft.steps={WARM}",
    f"training.prompts_per_step={PROMPTS}",
    "training.checkpoint_every=5",
    "training.eval_every=0",
    "resources.inference.nodes=1",
    "resources.trainer.gpus=1",
    "resources.inference.gpus=2",
)
JOBS = {"sft": "SFT", "rl": "training"}
RESULTS = Path("trials.jsonl")


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    for seed in range(options.undisturbed):
        _try("", "", seed, options.results)
    if options.cold:
        _try("", COLD, 0, options.results)
    for way in options.ways:
        for phase in options.phases:
            for seed in range(options.repeat):
                _try(way, phase, seed, options.results)
    trials = read_trials(options.results)
    if options.page:
        options.page.write_text(page(trials))
        print(options.page)
    return 1 if any(problem_of(trial, trials) for trial in trials) else 0


def read_trials(results: Path) -> list[Trial]:
    """The newest result of every trial."""
    lines = results.read_bytes().splitlines() if results.exists() else []
    found = [msgspec.json.decode(line, type=Trial) for line in lines]
    return list({(trial.way, trial.phase, trial.seed): trial for trial in found}.values())


def _try(way: str, phase: str, seed: int, results: Path) -> None:
    """Make one trial and keep its result, also when the trial itself breaks: that does not end the series."""
    trial = Trial(way=way, phase=phase, seed=seed)
    try:
        with tempfile.TemporaryDirectory(prefix="rollcall-trial-") as folder:
            _make(trial, Path(folder))
    except Exception as error:  # noqa: BLE001 (it is the result)
        trial.problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    with results.open("ab") as file:
        file.write(msgspec.json.encode(trial) + b"\n")
    print(" | ".join(trial.cells()), flush=True)


def _make(trial: Trial, folder: Path) -> None:
    chance = random.Random(f"{trial.way} {trial.phase} {trial.seed}")
    config = (*CONFIG, "training.sft.steps=0", "training.steps=3") if trial.phase == COLD else CONFIG
    partition = f"cluster.partition={PARTITIONS.get(trial.way, 'low')}"
    with SlurmCluster(folder / "slurm") as slurm:
        run = SlurmRun.start(slurm, folder, "r", *config, f"seed={trial.seed}", partition)
        try:
            clock = AttemptClock(run)
            if trial.way:
                _disturb(trial, run, clock, chance)
            else:
                run.wait_for("a first step", lambda: bool(run.rows() or run.rows(job="sft")))
                clock.note()
                trial.cold = clock.first_step(0)
            trial.state = run.wait_for_end(PATIENCE)["JobState"]
            if trial.phase != COLD:
                _examine(trial, run)
        except Exception:
            print(run.output(), file=sys.stderr)
            raise


def _disturb(trial: Trial, run: SlurmRun, clock: "AttemptClock", chance: random.Random) -> None:
    """Do it, and wait for the first step of the next attempt."""
    PHASES[trial.phase](run, chance)
    trial.place, disturbed = place(run), time.time()
    clock.note()
    WAYS[trial.way](run.slurm, run, chance)
    if trial.phase == "checkpoint" and _open_commits(run):
        trial.place += ", commit open"
    if trial.phase != "shutdown":  # which is over, as a rule, before anybody could be requeued
        _times(trial, run, clock, disturbed)


def _open_commits(run: SlurmRun) -> list[str]:
    """The checkpoints that are being written."""
    return [folder.name for folder in run.run.checkpoints.glob("*-*") if not list(folder.glob("*/COMPLETE"))]


def _examine(trial: Trial, run: SlurmRun) -> None:
    """What the run left; a `problem` if it is not what an undisturbed one leaves."""
    trial.attempts = len(run.attempts)
    first = run.outcome(0)
    trial.outcome = first.decision if first else "none"
    trial.accuracy = tuple(row["eval/accuracy"] for row in run.rows("eval"))
    trial.resumed = _resumed(run) if trial.way else ""
    wrong = {
        f"ended as {trial.state}": trial.state != "COMPLETED",
        f"{trial.attempts} attempts": trial.attempts not in _attempts(trial),
        "steps of SFT": _steps(run, "sft") != list(range(1, WARM + 1)),
        "steps of RL": _steps(run, "rl") != list(range(1, STEPS + 1)),
        "positions of the ledger": not _every_position_once(run),
        "no last commit": not list(run.run.checkpoints.glob(f"rl-{STEPS}/*/COMPLETE")),
        "no model": not (run.run.model / "model.safetensors").exists(),
        "not finished": run.finished is None,
    }
    trial.problem = ", ".join(what for what, is_so in wrong.items() if is_so)


def _attempts(trial: Trial) -> tuple[int, ...]:
    """How many attempts it may have made. What finished while it was being ended is not run again."""
    if trial.phase == "shutdown":
        return 1, 2
    return (2,) if trial.way else (1,)


class AttemptClock:
    """When attempts of a run began, as Slurm says, and when they made their first step."""

    def __init__(self, run: SlurmRun) -> None:
        self._run, self._began = run, dict[int, float]()

    def note(self) -> None:
        """Take down when the attempt that runs now began."""
        fields = self._run.fields()
        if fields["StartTime"][:1].isdigit():
            began = time.mktime(time.strptime(fields["StartTime"], "%Y-%m-%dT%H:%M:%S"))
            self._began.setdefault(int(fields["Restarts"]), began)

    def first_step(self, restart: int) -> float | None:
        """Seconds from the start of an attempt to its first step; None if it made none."""
        rows = [row for row in read_rows(self._run.run.metrics) if row["kind"] == "train"]
        name = f"{self._run.job}-{restart}"
        steps = [row["time"] for row in rows if row["attempt"] == name]
        return min(steps) - self._began[restart] if steps and restart in self._began else None


def _times(trial: Trial, run: SlurmRun, clock: AttemptClock, disturbed: float) -> None:
    """Wait for the first step of the second attempt; it makes none when all were done."""

    def stepped() -> bool:
        if run.fields()["JobState"] == "RUNNING" and len(run.attempts) > 1:
            clock.note()
        return clock.first_step(1) is not None or run.has_ended()

    wait_for("the first step after a requeue", stepped, PATIENCE, missing=run.output, pause=0.1, longest_pause=0.3)
    trial.cold, trial.warm = clock.first_step(0), clock.first_step(1)
    rows = [row for row in read_rows(run.run.metrics) if row["attempt"] == f"{run.job}-1"]
    trial.gap = min((row["time"] for row in rows), default=disturbed) - disturbed or None


def place(run: SlurmRun) -> str:
    """The last step on record, as `training 12`."""
    rows = [row for row in read_rows(run.run.metrics) if row["kind"] == "train"]
    return f"{JOBS[rows[-1]['job']]} {rows[-1]['step']}" if rows else "start"


def _resumed(run: SlurmRun) -> str:
    """Where the last attempt's trainer went on, by its own log."""
    log = run.attempts[-1].log("trainer", 0)
    if len(run.attempts) == 1 or not log.exists():
        return "—"  # there was nothing left to do
    found = re.findall(r"(sft|rl): steps (\d+) to", log.read_text())
    return f"{JOBS[found[0][0]]} {found[0][1]}" if found and found[0] != ("sft", "0") else "start"


def _steps(run: SlurmRun, job: str) -> list[int]:
    return [row["step"] for row in run.rows(job=job)]


def _every_position_once(run: SlurmRun) -> bool:
    settled = sorted(json.loads(line)["position"] for line in run.run.ledger.read_text().splitlines())
    return len(settled) == len(set(settled)) == STEPS * PROMPTS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.trials", description=__doc__)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=list(PHASES))
    parser.add_argument("--repeat", type=int, default=1, help="seeds of each")
    parser.add_argument("--undisturbed", type=int, default=0, help="runs that nothing happens to")
    parser.add_argument("--cold", action="store_true", help="time a cold start of RL, without SFT")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the page from the results so far")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
