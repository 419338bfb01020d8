"""The result of one recovery trial, and the page that shows all of them."""

from collections.abc import Sequence

import msgspec

from pipeline.run.fault_plan import TARGETS

KINDS = {"kill": "SIGKILL", "stop": "SIGSTOP", "exit": "exit 1", "early": "exit 0 too early"}
PHASES = {
    "start": "start",
    "sft": "SFT",
    "eval": "evaluation",
    "step=6": "training",
    "update": "weight update",
    "save": "checkpoint",
    "end": "end",
}
"""The moment of the fault, and the phase of the run that it stands for."""
HEAD = ("role", "end", "phase", "outcome", "detected", "ready again", "the run")
INTRODUCTION = (
    "# Recovery trials",
    "",
    "Each row is one [injected fault](operations.md#injected-faults) in a small run on one machine without GPUs. Faults"
    " of one role and kind in different phases may share a run. `python -m tests.recovery.trials` makes the rows; with "
    "`--page docs/recovery.md` it writes this page.",
    "",
    "| column | meaning |",
    "|---|---|",
    "| outcome | `restarted`: the role was [restarted in place](operations.md#restarts-in-place), and no other role "
    "was. `ended`: the attempt ended with this role as its first failure; the same command resumes the run |",
    "| detected | seconds from the fault until the agent detected it |",
    "| ready again | seconds from the fault until the new process was ready |",
    "",
    "*every step once* means that the run ended with exit code 0 in one attempt, `metrics.jsonl` has each step exactly "
    "once, the ledger has each position exactly once, and the model is exported.",
    "",
)


class RecoveryTrial(msgspec.Struct, kw_only=True):
    """The outcome of one run with one fault.

    Attributes:
        role, kind, phase: the target, one of `KINDS`, and one of `PHASES`.
        outcome: `restarted`, or `ended` for the attempt.
        detected, recovered: seconds from the fault until the agent detected it, and until the role was ready again.
        problem: the difference from the expected end; empty if there is none.
    """

    role: str
    kind: str
    phase: str
    outcome: str = ""
    detected: float | None = None
    recovered: float | None = None
    problem: str = ""

    def cells(self) -> list[str]:
        """Its row of the table."""
        times = [f"{value:.1f} s" if value is not None else "—" for value in (self.detected, self.recovered)]
        end = self.problem or ("every step once" if self.outcome == "restarted" else "named in `first_failure.json`")
        return [self.role, KINDS[self.kind], PHASES[self.phase], self.outcome, *times, end]


def page(trials: Sequence[RecoveryTrial]) -> str:
    """The page as Markdown."""
    kinds, phases = list(KINDS), list(PHASES)
    ordered = sorted(trials, key=lambda trial: (trial.role, kinds.index(trial.kind), phases.index(trial.phase)))
    whole = sum(not trial.problem for trial in ordered)
    restarted = sum(trial.outcome == "restarted" for trial in ordered)
    hung = sum("TimeoutExpired" in trial.problem for trial in ordered)
    summary = (
        f"{whole} of {len(ordered)} faults ended as described, {restarted} with a restart; {hung} left a run that hung."
    )
    tried = {(trial.role, trial.kind) for trial in ordered}
    untried = [f"{role} × {KINDS[kind]}" for kind in KINDS for role in TARGETS[kind] if (role, kind) not in tried]
    if untried:
        summary += f" Not tried yet: {', '.join(untried)}."
    rows = [HEAD, ["---"] * len(HEAD), *(trial.cells() for trial in ordered)]
    return "\n".join([*INTRODUCTION, summary, "", *("| " + " | ".join(cells) + " |" for cells in rows)]) + "\n"
