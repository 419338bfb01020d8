"""Snapshots as log lines, for output that is not a terminal.

Owns which changes are printed when. Promises each change once, in the order in which a reader needs it. Reads no file
and no clock.
"""

from collections.abc import Iterable

from pipeline.run.notices import Notice
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
        self._restarts: dict[str, int] = {}
        self._printed, self._next = ("", 0, 0), 0.0
        self._notices = set[Notice]()
        self._troubled = False
        self._evaluated: EvaluationProgress | None = None
        self._next_evaluation = 0.0

    def lines(self, snapshot: Snapshot, now: float, *, last: bool = False) -> list[str]:
        """The lines for all changes since the last call; `last` prints the progress regardless of `LINE_SECONDS`."""
        return [
            *self._past_lines(snapshot),
            *self._state_lines(snapshot),
            *self._trouble_lines(snapshot),
            *self._silence_lines(snapshot),
            *self._restart_lines(snapshot),
            *self._role_lines(snapshot),
            *self._notice_lines(snapshot),
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
        without_roles = snapshot.state in ("queued", "left", "not submitted")
        why = nothing_runs(snapshot) if without_roles else snapshot.reason
        state = state_text(snapshot)
        if (state, why) != self._state:
            lines.append(f"{snapshot.name}: {state}" + (f": {why}" if why else ""))
        self._state = state, why
        if began:
            self._attempt = snapshot.attempt
            self._roles.clear()
            self._restarts.clear()
        return lines

    def _trouble_lines(self, snapshot: Snapshot) -> Iterable[str]:
        """The line for a scheduler that does not answer, once."""
        if self._troubled or snapshot.job is None or not snapshot.job.trouble:
            return []
        self._troubled = True
        return [f"  {no_answer(snapshot.job)}"]

    def _silence_lines(self, snapshot: Snapshot) -> Iterable[str]:
        silent, before, self._silent = set(snapshot.silent), self._silent, set(snapshot.silent)
        back = sorted(before - silent) if not snapshot.is_over else []
        lines = [f"  {silence_text(snapshot)}"] if silent - before else []
        return [*lines, *(f"  rank {rank} shows signs of life again" for rank in back)]

    def _restart_lines(self, snapshot: Snapshot) -> Iterable[str]:
        """One line for each restart of a role in place."""
        lines = []
        for role in snapshot.roles:
            new = role.restarts[self._restarts.get(role.name, 0) :]
            self._restarts[role.name] = len(role.restarts)
            lines += [f"  {role.name} on rank {role.rank}: {reason}" for reason in new]
        return lines

    def _role_lines(self, snapshot: Snapshot) -> Iterable[str]:
        changed = [role for role in snapshot.roles if self._roles.get(role.name) != role.state]
        new = [role for role in changed if role.state != "waiting" and snapshot.state != "queued"]
        self._roles |= {role.name: role.state for role in new}
        return [f"  {role.name} on rank {role.rank}: {role.state}" for role in new if role.state in ("ready", "failed")]

    def _notice_lines(self, snapshot: Snapshot) -> Iterable[str]:
        new = [notice for notice in snapshot.notices if notice not in self._notices]
        self._notices = set(snapshot.notices)
        return [f"  {notice.by}: {notice.text}" for notice in new]

    def _evaluation_lines(self, snapshot: Snapshot, now: float) -> Iterable[str]:
        """The progress of the first evaluation until RL has a step; later ones are not shown."""
        evaluation = snapshot.evaluation
        if evaluation is None or not evaluation.first or evaluation == self._evaluated or now < self._next_evaluation:
            return []
        self._evaluated, self._next_evaluation = evaluation, now + LINE_SECONDS
        return [f"  {evaluation_text(evaluation)}"]

    def _progress_lines(self, snapshot: Snapshot, now: float, last: bool) -> Iterable[str]:
        progress, evaluations = snapshot.progress, len(snapshot.accuracies)
        if progress is None or (progress.job, progress.step, evaluations) == self._printed:
            return []
        if not last and now < self._next and evaluations == self._printed[2]:
            return []
        self._printed, self._next = (progress.job, progress.step, evaluations), now + LINE_SECONDS
        return [f"  {job_text(progress)} {step_text(progress)}{_known(snapshot)}"]


def _known(snapshot: Snapshot) -> str:
    """The figures that have a value, for one line."""
    if snapshot.has_rollouts and (snapshot.progress is None or snapshot.progress.job != "rl"):
        loss = snapshot.numbers.get("loss")
        return "" if loss is None else f"  loss {loss:.3f}"
    return "".join(f"  {name} {value}" for name, value, _ in figures_of(snapshot) if value != "—")
