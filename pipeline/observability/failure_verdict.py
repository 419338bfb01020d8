"""The verdict on an attempt: the kind of its end, and one sentence with the cause and what to do.

The failure's own remedy comes first (`pipeline.run.first_failure`). This module adds the ends without such a record:
lost nodes, preemptions, and ends that nothing on disk explains. Pure.
"""

from typing import NamedTuple

from pipeline.observability.run_history import Attempt
from pipeline.observability.run_status import SILENT_SECONDS
from pipeline.utils.user_commands import user_command

RESUME = "the same command resumes the run"


class Verdict(NamedTuple):
    """The kind of an end, such as `out of memory`, and a sentence for a person."""

    kind: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


def verdict_of(attempt: Attempt, now: float) -> Verdict:
    """The verdict on an attempt with these records; `now` is seconds since the epoch."""
    if attempt.failure is not None:
        return Verdict(attempt.failure.kind, attempt.failure.one_line())
    if "failed" in attempt.events:
        return Verdict("crash", f"{attempt.events['failed'].why}; read its log; {RESUME}")
    if "training_finished" in attempt.events:
        return Verdict("finished", "the attempt reached the last step of training; there is nothing to do")
    if attempt.outcome is not None and attempt.outcome.decision == "stopped":
        kind = "lost node" if "without an exit marker" in attempt.outcome.reason else "stopped"
        return Verdict(kind, f"{attempt.outcome.reason}; {RESUME}")
    if silent := [rank for rank, beat in attempt.alive.items() if now - beat > SILENT_SECONDS]:
        hosts = ", ".join(f"rank {rank}" for rank in silent[:8]) + (" and more" if len(silent) > 8 else "")
        seconds = now - max(attempt.alive[rank] for rank in silent)
        why = f"no heartbeat of {hosts} for {seconds:.0f} s, and no exit marker: killed, or lost with the node"
        return Verdict("lost node", f"{why}; {RESUME}")
    if "draining" in attempt.events:
        return Verdict("preemption", f"the attempt was asked to end: {attempt.events['draining'].why}; {RESUME}")
    if attempt.alive:
        return Verdict("running", f"the attempt has not ended; {user_command('watch')} shows it")
    return Verdict("unknown", "nothing in the run directory explains the end; read the agents' output in agents/")
