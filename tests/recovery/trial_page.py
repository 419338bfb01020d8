"""The result of one recovery trial, and the page that shows all of them."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

KINDS = {"kill": "SIGKILL", "stop": "SIGSTOP", "exit": "exit 1", "early": "exit 0 too early"}
PHASES = {
    "start": "start",
    "sft": "SFT",
    "eval": "evaluation",
    "step": "training",
    "update": "weight update",
    "save": "checkpoint",
    "end": "end",
}
"""The moment of the fault, and the phase of the run that it stands for."""
TWO_NODES = "trainer on two nodes"
HERE = "local"
HEAD = ("scheduler", "role", "end", *PHASES.values())
INTRODUCTION = (
    "# Recovery trials",
    "",
    "What becomes of a run when one of its roles is killed, is stopped, or exits. Each cell is one [injected fault]"
    "(operations.md#injected-faults) in a small run without GPUs; a run meets all faults of a role, one after another."
    " The two cores had some other work to do; during the trials on Slurm they had ten times as much as they could do."
    " `python -m tests.recovery.trials` makes the runs; with `--page docs/recovery.md` it writes this page.",
    "",
    "| cell | meaning |",
    "|---|---|",
    "| 4.2 s | the role was [restarted in place](operations.md#restarts-in-place), and no other role was; until"
    " the fault was detected and the new process was ready, 4.2 s passed, without the back-off between them |",
    "| restarted | the same, but the run ended or another fault came before the new process was ready |",
    "| ended 0.2 s | the agent detected the fault after 0.2 s, and the attempt ended with this role as its first"
    " failure; the same command resumed the run |",
    "| finished | the run finished before the fault was detected; the role was killed when it was asked to stop |",
    "| — | not tried |",
    "",
    "Every run was whole at its end: exit code 0, each step exactly once in `metrics.jsonl`, no position twice in the"
    " ledger and as many trained ones as the steps need, the model exported, no process left, and no restart or attempt"
    " without a fault. A cell with another text names the difference.",
    "",
)
NOTES = (
    "",
    "*start*: the role ends while it starts for the first time in an attempt. It is restarted, unless its error would"
    " come again ([decision 0041](decisions/0041-roles-are-restarted-in-place.md)).",
    "",
    f"A {TWO_NODES} is not restarted in place, since its agents would have to agree on it: the attempt ends, and the"
    " next one resumes from the newest checkpoint.",
    "",
    "*SIGSTOP*: a stopped process counts as hung after ten seconds"
    " ([decision 0016](decisions/0016-who-progresses-tells-it.md)), which are part of the seconds here.",
    "",
)


class RecoveryTrial(msgspec.Struct, kw_only=True):
    """The outcome of one fault.

    Attributes:
        scheduler: `local` or `Slurm`.
        role, kind, phase: the target (a role or `TWO_NODES`), one of `KINDS`, and one of `PHASES`.
        outcome: `restarted`, `ended` for the attempt, or `finished` for the run.
        detected, recovered: seconds from the fault until the agent detected it, and until the role was ready again,
            without the back-off.
        problem: the difference from the expected end; empty if there is none.
    """

    scheduler: str = HERE
    role: str
    kind: str
    phase: str
    outcome: str = ""
    detected: float | None = None
    recovered: float | None = None
    problem: str = ""

    def cell(self) -> str:
        """Its cell of the table."""
        times = {"ended": self.detected, "restarted": self.recovered}.get(self.outcome)
        text = " ".join([self.outcome] * (self.outcome != "restarted" or times is None))
        text += f" {times:.1f} s" if times is not None else ""
        return f"{text} **{self.problem}**".strip() if self.problem else text.strip()


def page(trials: Sequence[RecoveryTrial]) -> str:
    """The page as Markdown."""
    rows = [HEAD, ["---"] * len(HEAD), *_rows(trials)]
    table = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([*INTRODUCTION, _summary(trials), "", *table, *NOTES])


def _rows(trials: Sequence[RecoveryTrial]) -> Iterable[list[str]]:
    """A row per scheduler, role and kind, with a cell per phase."""
    cells = {(trial.scheduler, trial.role, trial.kind, trial.phase): trial.cell() for trial in trials}
    kinds = list(KINDS)
    heads = {key[:3] for key in cells}
    for head in sorted(heads, key=lambda head: (head[0] != HERE, head[1], kinds.index(head[2]))):
        scheduler, role, kind = head
        yield [scheduler, role, KINDS[kind], *(cells.get((*head, phase), "—") for phase in PHASES)]


def _summary(trials: Sequence[RecoveryTrial]) -> str:
    outcomes = [trial.outcome for trial in trials if not trial.problem]
    hung = sum("TimeoutExpired" in trial.problem for trial in trials)
    seconds = [trial.recovered for trial in trials if trial.recovered is not None]
    counts = ", ".join(
        f"{outcomes.count(outcome)} {text}"
        for outcome, text in (
            ("restarted", "with a restart in place"),
            ("ended", "with the end of the attempt"),
            ("finished", "at the end of the run"),
        )
        if outcome in outcomes
    )
    summary = f"{len(outcomes)} of {len(trials)} faults left a whole run: {counts}; {hung} left a run that hung."
    if seconds:
        summary += f" Restarts took {min(seconds):.1f} to {max(seconds):.1f} s, {median(seconds):.1f} s in the median."
    return summary
