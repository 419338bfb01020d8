"""Snapshots as lines, for where there is no terminal: a log, a pipe.

Owns what is told when. Promises each thing once, in the order in which a reader needs it. Reads no file and knows no
clock.
"""

from collections.abc import Iterable

from slurm.monitor.run_snapshot import EvaluationProgress, Snapshot
from slurm.monitor.status_panel import (
    attempt_text,
    evaluation_text,
    figures_of,
    job_text,
    no_answer,
    nothing_runs,
    silence_text,
    state_text,
    step_text,
)

LINE_SECONDS = 5.0


class LogLines:
    """Turns snapshots into lines: every change of state at once, progress every `LINE_SECONDS` and at evaluations."""

    def __init__(self) -> None:
        self._state, self._attempt, self._past = ("", ""), "", set[str]()
        self._roles, self._silent = dict[str, str](), set[int]()
        self._told, self._next = ("", 0, 0), 0.0
        self._troubled = False
        self._evaluated: EvaluationProgress | None = None
        self._next_evaluation = 0.0

    def lines(self, snapshot: Snapshot, now: float, *, last: bool = False) -> list[str]:
        """What is new since the call before; `last` tells the progress whenever it was told."""
        return [
            *self._past_lines(snapshot),
            *self._state_lines(snapshot),
            *self._trouble_lines(snapshot),
            *self._silence_lines(snapshot),
            *self._role_lines(snapshot),
            *self._evaluation_lines(snapshot, now),
            *self._progress_lines(snapshot, now, last),
        ]

    def _past_lines(self, snapshot: Snapshot) -> Iterable[str]:
        new = [past for past in snapshot.past if past.name not in self._past]
        self._past |= {past.name for past in new}
        return [f"  attempt {past.name}: {past.end}" + (f": {past.why}" if past.why else "") for past in new]

    def _state_lines(self, snapshot: Snapshot) -> Iterable[str]:
        began = snapshot.attempt not in ("", self._attempt) and snapshot.job is not None and not snapshot.is_over
        lines = [f"{snapshot.name}: {attempt_text(snapshot)}"] if began else []
        told = snapshot.state in ("queued", "left", "not submitted")
        why = nothing_runs(snapshot) if told else snapshot.reason
        state = state_text(snapshot)
        if (state, why) != self._state:
            lines.append(f"{snapshot.name}: {state}" + (f": {why}" if why else ""))
        self._state = state, why
        if began:
            self._attempt = snapshot.attempt
            self._roles.clear()
        return lines

    def _trouble_lines(self, snapshot: Snapshot) -> Iterable[str]:
        """Once: that the scheduler is silent is no news a minute later."""
        if self._troubled or snapshot.job is None or not snapshot.job.trouble:
            return []
        self._troubled = True
        return [f"  {no_answer(snapshot.job)}"]

    def _silence_lines(self, snapshot: Snapshot) -> Iterable[str]:
        silent, before, self._silent = set(snapshot.silent), self._silent, set(snapshot.silent)
        back = sorted(before - silent) if not snapshot.is_over else []
        told = [f"  {silence_text(snapshot)}"] if silent - before else []
        return [*told, *(f"  rank {rank} shows signs of life again" for rank in back)]

    def _role_lines(self, snapshot: Snapshot) -> Iterable[str]:
        changed = [role for role in snapshot.roles if self._roles.get(role.name) != role.state]
        new = [role for role in changed if role.state != "waiting" and snapshot.state != "queued"]
        self._roles |= {role.name: role.state for role in new}
        return [f"  {role.name} on rank {role.rank}: {role.state}" for role in new if role.state in ("ready", "failed")]

    def _evaluation_lines(self, snapshot: Snapshot, now: float) -> Iterable[str]:
        """Of an evaluation that training waits for; later ones run beside it."""
        found = snapshot.evaluation
        if found is None or not found.first or found == self._evaluated or now < self._next_evaluation:
            return []
        self._evaluated, self._next_evaluation = found, now + LINE_SECONDS
        return [f"  {evaluation_text(found)}"]

    def _progress_lines(self, snapshot: Snapshot, now: float, last: bool) -> Iterable[str]:
        progress, evaluations = snapshot.progress, len(snapshot.accuracies)
        if progress is None or (progress.job, progress.step, evaluations) == self._told:
            return []
        if not last and now < self._next and evaluations == self._told[2]:
            return []
        self._told, self._next = (progress.job, progress.step, evaluations), now + LINE_SECONDS
        return [f"  {job_text(snapshot, progress)} {step_text(progress)}{_known(snapshot)}"]


def _known(snapshot: Snapshot) -> str:
    """The figures that have a value, for one line."""
    if snapshot.has_rollouts and (snapshot.progress is None or snapshot.progress.job != "rl"):
        loss = snapshot.numbers.get("loss")
        return "" if loss is None else f"  loss {loss:.3f}"
    return "".join(f"  {name} {value}" for name, value, _ in figures_of(snapshot) if value != "—")
