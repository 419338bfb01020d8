"""Recovery trials: every role × kind of end × phase, on one machine, through `faults=`.

    python -m tests.recovery.trials                                         # all that have no result yet
    python -m tests.recovery.trials --roles trainer --kinds kill stop --phases step=6 save
    python -m tests.recovery.trials --page docs/recovery.md                 # write the page from the results so far

Owns the trial: start a small run with planned faults of one role and kind, let it end, and record the outcome of each.
Results are added to one file, one JSON object a line, so that trials can be made in several calls.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.run.fault_plan import TARGETS
from tests.recovery.trial_page import KINDS, PHASES, RecoveryTrial, page
from tests.support.runs.launched import PROMPTS, STEPS, Launched, Launches

RESULTS = Path("tests/recovery/results.jsonl")
CONFIG = ("resources.inference.nodes=1", "resources.trainer.processes=1", "cluster.heartbeat_seconds=20")
SECONDS = 900.0
"""Deadline of one run; a run that exceeds it hangs."""
ROLES = ("trainer", "actor", "preprocessor", "redis", "inference")
BATCHES: dict[str, tuple[tuple[str, ...], ...]] = {
    "trainer": (("sft", "save", "step=6", "end"), ("eval",), ("update",), ("start",)),
    "": (("sft", "eval", "step=6", "update", "save", "end"), ("start",)),
}
"""The phases that share a run, by role. A trainer has to complete a step between two faults."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.page:
        options.page.write_text(page(read_trials(options.results)))
        print(options.page)
        return 0
    known = {(trial.role, trial.kind, trial.phase) for trial in read_trials(options.results)}
    for kind in options.kinds:
        for role in options.roles:
            for batch in BATCHES.get(role, BATCHES[""]) if role in TARGETS[kind] else ():
                phases = [phase for phase in batch if phase in options.phases]
                if phases and (options.again or not known.issuperset((role, kind, phase) for phase in phases)):
                    _try(role, kind, phases, options.results)
    return 1 if any(trial.problem for trial in read_trials(options.results)) else 0


def read_trials(results: Path) -> list[RecoveryTrial]:
    """The newest result of every trial."""
    lines = results.read_bytes().splitlines() if results.exists() else []
    trials = [msgspec.json.decode(line, type=RecoveryTrial) for line in lines]
    return list({(trial.role, trial.kind, trial.phase): trial for trial in trials}.values())


def _try(role: str, kind: str, phases: Sequence[str], results: Path) -> None:
    """Make one run with a fault in each phase, and record a result for each. An error of the run is their result."""
    trials = [RecoveryTrial(role=role, kind=kind, phase=phase) for phase in phases]
    faults = ",".join(f"{kind}:{role}@{phase}" for phase in phases)
    try:
        with tempfile.TemporaryDirectory(prefix="rollcall-trial-") as folder, Launches(Path(folder)) as launches:
            _make(trials, launches.submit("r", *CONFIG, f"recovery.{role}={len(phases)}", f"faults=[{faults}]"))
    except Exception as error:  # noqa: BLE001 (it is the result)
        for trial in trials:
            trial.problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    with results.open("ab") as file:
        file.writelines(msgspec.json.encode(trial) + b"\n" for trial in trials)
    print("\n".join(" | ".join(trial.cells()) for trial in trials), flush=True)


def _make(trials: Sequence[RecoveryTrial], run: Launched) -> None:
    started = time.monotonic()
    while run.process.poll() is None and time.monotonic() - started < SECONDS:
        run.processes()
        time.sleep(0.2)
    code = run.end(1)  # `TimeoutExpired` for a run that hangs
    lines = [json.loads(line) for file in run.attempts[-1].timeline.glob("*.jsonl") for line in file.open()]
    for trial in trials:
        _time(trial, sorted(lines, key=lambda line: line["time"]))
        trial.problem = _problem_of(trial, run, lines, code)
    run.assert_nothing_left()


def _time(trial: RecoveryTrial, lines: Sequence[dict[str, Any]]) -> None:
    """Read the times of the fault, of its detection, and of the end of the recovery from the timeline."""
    own = [line for line in lines if line["role"] == f"{trial.role}.0"]
    fault = next(line["time"] for line in own if line["detail"] == f"{trial.kind}:{trial.role}@{trial.phase}")
    after = [line for line in own if line["time"] > fault]
    trial.detected = after[0]["time"] - fault
    trial.outcome = "restarted" if after[0]["state"] == "restarting" else "ended"
    # At the end of a run the role may be stopped before its new process is ready.
    ready = next((line for line in after[1:] if line["state"] in ("ready", "stopped")), None)
    trial.recovered = ready["time"] - fault if ready and ready["state"] == "ready" else None


def _problem_of(trial: RecoveryTrial, run: Launched, lines: Sequence[dict[str, Any]], code: int) -> str:
    """The difference of a run from the expected one, empty if there is none.

    A restarted role leaves a run that is as whole as an undisturbed one, in one attempt, in which no other role was
    restarted. Otherwise the attempt names the role as its first failure.
    """
    if trial.outcome == "ended":
        failure = run.failure()
        return "" if code == 1 and failure and failure.role == f"{trial.role}.0" else f"exit code {code}"
    steps = [row["step"] for row in run.rows()]
    positions = [json.loads(line)["position"] for line in run.run.ledger.read_text().splitlines()]
    others = {line["role"] for line in lines if line["state"] == "restarting"} - {f"{trial.role}.0"}
    checks = {
        f"exit code {code}": code == 0,
        f"steps {steps}": steps == list(range(1, STEPS + 1)),
        f"{len(positions)} positions": len(positions) == len(set(positions)) == STEPS * PROMPTS,
        f"{len(run.attempts)} attempts": len(run.attempts) == 1,
        f"{', '.join(sorted(others))} restarted too": not others,
        "no exported model": (run.run.model / "model.safetensors").exists(),
    }
    return "; ".join(text for text, holds in checks.items() if not holds)


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
