"""Recovery trials: every role × kind of end × phase, on one machine, through `faults=`.

    python -m tests.recovery.trials                                         # all that have no result yet
    python -m tests.recovery.trials --roles trainer --kinds kill stop --phases step=6 save
    python -m tests.recovery.trials --page docs/recovery.md                 # write the page from the results so far

Owns the trial: start a small run with one planned fault, let it end, and record the outcome. Results are added to one
file, one JSON object a line, so that trials can be made in several calls.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.run.fault_plan import TARGETS
from tests.recovery.trial_page import KINDS, PHASES, RecoveryTrial, page
from tests.support.runs.launched import PROMPTS, STEPS, Launched, Launches

RESULTS = Path("tests/recovery/results.jsonl")
CONFIG = ("resources.inference.nodes=1", "resources.trainer.processes=1", "cluster.heartbeat_seconds=20")
SECONDS = 900.0
"""Deadline of one run; a run that exceeds it hangs."""
ROLES = ("redis", "trainer", "inference", "actor", "preprocessor")


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.page:
        options.page.write_text(page(read_trials(options.results)))
        print(options.page)
        return 0
    known = {(trial.role, trial.kind, trial.phase) for trial in read_trials(options.results)}
    for role in options.roles:
        for kind in options.kinds:
            for phase in options.phases:
                if role in TARGETS[kind] and ((role, kind, phase) not in known or options.again):
                    _try(role, kind, phase, options.results)
    return 1 if any(trial.problem for trial in read_trials(options.results)) else 0


def read_trials(results: Path) -> list[RecoveryTrial]:
    """The newest result of every trial."""
    lines = results.read_bytes().splitlines() if results.exists() else []
    trials = [msgspec.json.decode(line, type=RecoveryTrial) for line in lines]
    return list({(trial.role, trial.kind, trial.phase): trial for trial in trials}.values())


def _try(role: str, kind: str, phase: str, results: Path) -> None:
    """Make one trial and record its result. An error of the trial is its result."""
    trial = RecoveryTrial(role=role, kind=kind, phase=phase)
    try:
        with tempfile.TemporaryDirectory(prefix="rollcall-trial-") as folder, Launches(Path(folder)) as launches:
            _make(trial, launches.submit("r", *CONFIG, f"faults={kind}:{role}@{phase}"))
    except Exception as error:  # noqa: BLE001 (it is the result)
        trial.problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    with results.open("ab") as file:
        file.write(msgspec.json.encode(trial) + b"\n")
    print(" | ".join(trial.cells()), flush=True)


def _make(trial: RecoveryTrial, run: Launched) -> None:
    started = time.monotonic()
    while run.process.poll() is None and time.monotonic() - started < SECONDS:
        run.processes()
        time.sleep(0.2)
    code = run.end(1)  # `TimeoutExpired` for a run that hangs
    _time(trial, run)
    if trial.outcome == "restarted":
        _examine(trial, run, code)
    else:
        failure = run.failure()
        trial.outcome = "ended"
        trial.problem = "" if code == 1 and failure and failure.role.startswith(trial.role) else f"exit code {code}"
    run.assert_nothing_left()


def _time(trial: RecoveryTrial, run: Launched) -> None:
    """Read the times of the fault, of its detection, and of the end of the recovery from the timeline."""
    lines = [json.loads(line) for file in run.attempts[-1].timeline.glob("*.jsonl") for line in file.open()]
    own = sorted((line for line in lines if line["role"] == f"{trial.role}.0"), key=lambda line: line["time"])
    fault = next(line["time"] for line in own if line["state"] == "fault")
    after = [line for line in own if line["time"] > fault]
    trial.detected = after[0]["time"] - fault
    trial.outcome = "restarted" if after[0]["state"] == "restarting" else "ended"
    ready = next((line["time"] for line in after if line["state"] == "ready"), None)
    trial.recovered = ready and ready - fault
    others = {line["role"] for line in lines if line["state"] == "restarting"} - {f"{trial.role}.0"}
    if others:
        trial.problem = f"{', '.join(sorted(others))} restarted too"


def _examine(trial: RecoveryTrial, run: Launched, code: int) -> None:
    """A restarted role leaves a run that is as whole as an undisturbed one, in one attempt."""
    steps = [row["step"] for row in run.rows()]
    positions = [json.loads(line)["position"] for line in run.run.ledger.read_text().splitlines()]
    checks = {
        f"exit code {code}": code == 0,
        f"steps {steps}": steps == list(range(1, STEPS + 1)),
        f"{len(positions)} positions, {len(set(positions))} different": len(positions)
        == len(set(positions))
        == STEPS * PROMPTS,
        f"{len(run.attempts)} attempts": len(run.attempts) == 1,
        "no exported model": (run.run.model / "model.safetensors").exists(),
    }
    wrong = [text for text, holds in checks.items() if not holds]
    trial.problem = "; ".join([*([trial.problem] if trial.problem else []), *wrong])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.recovery.trials", description="Trials of recovery in place.")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=tuple(PHASES))
    parser.add_argument("--again", action="store_true", help="also make trials that have a result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results, one JSON object a line")
    parser.add_argument("--page", type=Path, help="only write the page to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
