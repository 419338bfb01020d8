"""The result of one preemption trial, and the page that shows all of them."""

from collections.abc import Sequence
from statistics import median

import msgspec

from tests.cluster.disturbances import PHASES, WAY_WORDS, WAYS


class Trial(msgspec.Struct, kw_only=True):
    """What became of one run that was disturbed once, or not at all (`way` empty).

    Attributes:
        place: where the run was when it was disturbed, as `training 12`.
        resumed: where its second attempt went on, as `training 10`.
        attempts, outcome: how many there were, and what was decided after the first.
        state: of the job at its end, in Slurm's word.
        accuracy: held out, before and after RL.
        cold, warm: seconds from the start of the first and of the last attempt to its first step.
        gap: seconds from the disturbance to the first step after it, the queue included.
        problem: in what it differs from an undisturbed run; empty if in nothing.
    """

    way: str = ""
    phase: str = ""
    seed: int = 0
    place: str = ""
    resumed: str = ""
    attempts: int = 0
    outcome: str = ""
    state: str = ""
    accuracy: tuple[float, ...] = ()
    cold: float | None = None
    warm: float | None = None
    gap: float | None = None
    problem: str = ""

    def cells(self, problem: str = "") -> list[str]:
        """Its row of the table; `problem` is what only a comparison with the others tells."""
        accuracy = " → ".join(f"{value:.2f}" for value in self.accuracy)
        times = [f"{value:.0f} s" if value is not None else "—" for value in (self.cold, self.warm, self.gap)]
        end = self.problem or problem or f"{self.state}, every step once"
        way = WAY_WORDS.get(self.way, "undisturbed")
        return [way, self.phase, self.place, self.outcome, self.resumed, *times, accuracy, end]


MARGIN = 0.1
"""Of the held-out accuracy: two standard deviations of 256 prompts, and the difference that other rollouts make."""
HEAD = ["disturbed by", "phase", "at", "decision", "went on at", "cold", "warm", "gap", "held-out", "end"]
COLD = "cold"
"""The `phase` of the run that only times a cold start of RL."""
INTRODUCTION = (
    "# Preemption trials",
    "",
    "Each row is one run on a real Slurm of four nodes on one machine (KillWait 30 s). The run was submitted "
    "as a user does, disturbed once and left to finish. `python -m tests.cluster.trials` makes the rows; "
    "with `--page docs/preemption.md` it writes this page.",
    "",
    "| column | meaning |",
    "|---|---|",
    "| at | the state of the run when it was disturbed; *commit open* marks a checkpoint in progress |",
    "| went on at | the step from which the next attempt trained; the steps in between were trained again |",
    "| cold, warm | seconds from the start of an attempt to its first step: of the first attempt, and of the "
    "resumed one. The first step of SFT needs no server and the first RL step needs all "
    "servers, so compare only rows of the same phase |",
    "| gap | seconds from the disturbance to the first step after it, including Slurm's waiting time |",
    "| held-out | held-out accuracy before and after RL |",
    "",
    "*every step once* means that all of these hold: `metrics.jsonl` has each step of SFT and of RL exactly "
    "once; the ledger has each position due for training exactly once; the last checkpoint is of the last step; the "
    "model is exported; the held-out accuracy is in the range of the undisturbed runs (0.1 wider on both "
    "sides); there were exactly two attempts (or one, if the run finished during the shutdown); and the job "
    "ended as COMPLETED.",
    "",
)


def page(trials: Sequence[Trial]) -> str:
    """The page as Markdown."""
    calm = [trial for trial in trials if not trial.way and trial.phase != COLD]
    cold = next((trial.cold for trial in trials if trial.phase == COLD), None)
    disturbed = sorted((trial for trial in trials if trial.way), key=_order)
    cells = [trial.cells(problem_of(trial, trials)) for trial in [*calm, *disturbed]]
    rows = [HEAD, ["---"] * len(HEAD), *cells]
    return "\n".join([*INTRODUCTION, *_summary(calm, disturbed, cold, trials), "", *map(_row, rows)]) + "\n"


def problem_of(trial: Trial, trials: Sequence[Trial]) -> str:
    """What is wrong with a trial, also beside the undisturbed ones: its accuracy at the end must be in their band."""
    calm = [other.accuracy[-1] for other in trials if not other.way and other.accuracy]
    if trial.problem or not trial.way or not calm:
        return trial.problem
    low, high = min(calm) - MARGIN, max(calm) + MARGIN
    accuracy = trial.accuracy[-1] if trial.accuracy else 0.0
    return "" if low <= accuracy <= high else f"accuracy outside {low:.2f} to {high:.2f}"


def _summary(
    calm: Sequence[Trial], disturbed: Sequence[Trial], cold: float | None, trials: Sequence[Trial]
) -> list[str]:
    whole = [trial for trial in disturbed if not problem_of(trial, trials)]
    lines = [f"- {len(whole)} of {len(disturbed)} disturbed runs ended like an undisturbed run."]
    for name, some in (("undisturbed", calm), ("disturbed", whole)):
        last = [trial.accuracy[-1] for trial in some if trial.accuracy]
        if last:
            lines.append(f"- Held-out accuracy at the end of the {name} runs: {min(last):.2f} to {max(last):.2f}.")
    untried = {
        WAY_WORDS[way]: [phase for phase in PHASES if (way, phase) not in {(t.way, t.phase) for t in disturbed}]
        for way in WAYS
    }
    lines += [f"- Not tried yet: {way}: {', '.join(phases)}." for way, phases in untried.items() if phases]
    starts = [trial.cold for trial in [*calm, *disturbed] if trial.cold is not None]
    lines += _compared("SFT", median(starts) if starts else None, [trial for trial in whole if not _in_rl(trial)])
    return [*lines, *_compared("RL", cold, [trial for trial in whole if _in_rl(trial)])]


def _in_rl(trial: Trial) -> bool:
    """Whether it went on in RL, whose first step needs servers."""
    return trial.resumed.startswith("training")


def _compared(job: str, cold: float | None, trials: Sequence[Trial]) -> list[str]:
    """One line: seconds to the first step of a job, cold and after a requeue."""
    warm = [trial.warm for trial in trials if trial.warm is not None]
    if cold is None or not warm:
        return []
    return [f"- First step of {job}: {cold:.0f} s after a cold start, {median(warm):.0f} s after a requeue."]


def _order(trial: Trial) -> tuple[int, int, int]:
    return list(WAYS).index(trial.way), list(PHASES).index(trial.phase), trial.seed


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
