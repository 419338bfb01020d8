"""Recovery trials: every role × kind of end × phase of a run, through `faults=`.

    python -m tests.recovery.trials                                     # all that have no result yet
    python -m tests.recovery.trials --subjects trainer --kinds kill stop --phases step save
    python -m tests.recovery.trials --page docs/recovery.md             # write the page from the results so far

Owns the plan: the run of each subject with its faults. A subject is a role on this machine, a trainer on two nodes, or
all roles on a Slurm that the trial starts. One run meets all faults of its subject, one after another. Results are
added to one file, one JSON object a line, so that trials can be made in several calls.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.recovery.trial_page import KINDS, PHASES, TWO_NODES, RecoveryTrial, page
from tests.recovery.trial_run import PlannedFault, make_run

RESULTS = Path("tests/recovery/results.jsonl")
ROLES = ("redis", "actor", "preprocessor", "inference", "trainer")
SLURM = "slurm"
SUBJECTS = (*ROLES, TWO_NODES, SLURM)
LAST = dict(zip(ROLES, KINDS, strict=False))
"""The kind with which a role's run also ends its trainer in the phase `end`. A trainer that was restarted there has
completed no step before another fault, so its own run has no fault in this phase."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.page:
        options.page.write_text(page(read_trials(options.results)))
        print(options.page)
        return 0
    known = {} if options.again else {_key(trial): trial for trial in read_trials(options.results)}
    plans = [(subject, trials_of(subject, options.kinds, options.phases)) for subject in options.subjects]
    if options.together:
        plans = [together([trials for _, trials in plans])]
    for subject, trials in plans:
        if not known.keys() >= {_key(trial) for trial in trials}:
            _try(subject, trials, options.results)
    return 1 if any(trial.problem for trial in read_trials(options.results)) else 0


def read_trials(results: Path) -> list[RecoveryTrial]:
    """The newest result of every trial."""
    lines = results.read_bytes().splitlines() if results.exists() else []
    trials = [msgspec.json.decode(line, type=RecoveryTrial) for line in lines]
    return list({_key(trial): trial for trial in trials}.values())


def trials_of(subject: str, kinds: Sequence[str], phases: Sequence[str]) -> list[RecoveryTrial]:
    """The trials of a subject's run. On Slurm and for two nodes, one phase stands for all."""
    if subject == SLURM:
        return [
            RecoveryTrial(scheduler="Slurm", role=role, kind=kind, phase="step")
            for role in ROLES
            for kind in kinds
            if "step" in phases
        ]
    if subject == TWO_NODES:
        return [RecoveryTrial(role=TWO_NODES, kind=kind, phase="step") for kind in kinds if "step" in phases]
    own = [phase for phase in phases if (subject, phase) != ("trainer", "end")]
    trials = [RecoveryTrial(role=subject, kind=kind, phase=phase) for phase in own for kind in kinds]
    if "end" in phases and LAST.get(subject) in kinds:
        trials.append(RecoveryTrial(role="trainer", kind=LAST[subject], phase="end"))
    return trials


def together(plans: Sequence[Sequence[RecoveryTrial]]) -> tuple[str, list[RecoveryTrial]]:
    """One run of several roles; it ends its trainer once in the phase `end`."""
    trials = [trial for plan in plans for trial in plan]
    ends = [trial for trial in trials if (trial.role, trial.phase) == ("trainer", "end")]
    return "", [trial for trial in trials if trial not in ends[1:]]


def planned(trials: Sequence[RecoveryTrial]) -> list[PlannedFault]:
    """The fault of each trial. Two faults of a phase of RL are two steps apart, so a trainer makes progress."""
    numbers, faults = dict.fromkeys(PHASES, 0), []
    for trial in trials:
        phase = "sft" if trial.phase == "sft" else "step"
        numbers[phase] += 1 if phase == "sft" else 2 * (trial.phase not in ("start", "end"))
        moment = trial.phase if trial.phase in ("start", "end") else f"{trial.phase}={numbers[phase]}"
        target = "trainer[1]" if trial.role == TWO_NODES else trial.role
        faults.append(PlannedFault(trial, f"{trial.kind}:{target}@{moment}", numbers["step"], numbers["sft"]))
    return faults


def _try(subject: str, trials: Sequence[RecoveryTrial], results: Path) -> None:
    """Make one run, and record a result for each fault. An error of the run is the result of those without another."""
    try:
        make_run(planned(trials), slurm=subject == SLURM, nodes=2 if subject == TWO_NODES else 1)
    except Exception as error:  # noqa: BLE001 (it is the result)
        for trial in trials:
            trial.problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    with results.open("ab") as file:
        file.writelines(msgspec.json.encode(trial) + b"\n" for trial in trials)
    print("\n".join(f"{trial.role} {trial.kind} {trial.phase}: {trial.cell()}" for trial in trials), flush=True)


def _key(trial: RecoveryTrial) -> tuple[str, ...]:
    return trial.scheduler, trial.role, trial.kind, trial.phase


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.recovery.trials", description="Trials of recovery.")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=tuple(PHASES))
    parser.add_argument("--together", action="store_true", help="one run for all chosen roles")
    parser.add_argument("--again", action="store_true", help="also make trials that have a result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results, one JSON object a line")
    parser.add_argument("--page", type=Path, help="only write the page to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
