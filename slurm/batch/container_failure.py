"""The reason why the agents of an attempt had no container.

Owns reading this reason from the logs of the ranks, since an agent that never started records nothing. Promises that it
is recorded as the attempt's first failure only if a runtime reported it, and never in place of an agent's record.
"""

import re
import time
from dataclasses import replace
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.subprocesses import tail
from slurm.batch.attempt_summary import AttemptSummary

MAX_LOGS = 256
"""Most logs that are read: with one bad image, the logs of all ranks have the same reason."""
_REASONS = tuple(
    re.compile(pattern)
    for pattern in (r"^rollcall: container: ", r"^FATAL:", r"\[(ERROR|FATAL)\]", r"error: pyxis: (?!child|print)")
)
"""Lines of `slurm.scheduler`, apptainer, enroot and pyxis that name the reason, the most precise first."""
_END_OF_ATTEMPT = "rollcall: attempt "
"""The begin of the last line of an attempt in the log of rank 0, to which the next attempt appends."""


def with_container_failure(
    facts: AttemptSummary, run: RunPaths, paths: AttemptPaths, config: RunConfig, ranks: int
) -> AttemptSummary:
    """The records of the attempt with the failure of its container, which is recorded as its first failure.

    If no rank has started, none counts as lost: the same image fails on other nodes too.
    """
    if not config.cluster.container.is_used or not facts.code or facts.failure or facts.finished:
        return facts
    started = {int(name) for name in FileSharedDir(paths.alive).names() if name.isdecimal()}
    failure = container_failure(run, paths, config, [rank for rank in range(ranks) if rank not in started], facts.code)
    # An agent's record, which may be visible late, is never replaced.
    if failure is None or not shared_files.create_document(paths.first_failure, failure):
        return facts
    return replace(facts, failure=failure.one_line(), lost=facts.lost if started else ())


def container_failure(
    run: RunPaths, paths: AttemptPaths, config: RunConfig, ranks: list[int], code: int
) -> FirstFailure | None:
    """The failure that the log of one of these `ranks` explains, whose agents have not started; None if none does.

    `code` is the exit code of the agents' step.
    """
    for rank in ranks[:MAX_LOGS]:
        log = run.submitit / config.cluster.scheduler / f"{paths.job}_{rank}_log.out"
        if line := reason_in(log):
            cause = f"its container did not start: {line}"
            return FirstFailure(
                role=f"agent.{rank}", rank=rank, cause=cause, exit_code=code, time=time.time(), log=str(log)
            )
    return None


def reason_in(log: Path) -> str:
    """The line of a rank's log that explains why its container did not start; empty if there is none."""
    lines = tail(log)
    ends = [index for index, line in enumerate(lines) if line.startswith(_END_OF_ATTEMPT)]
    lines = lines[ends[-1] + 1 :] if ends else lines
    for pattern in _REASONS:
        matches = [line for line in lines if pattern.search(line)]
        if matches:
            return " ".join(matches[-1].removeprefix("rollcall: container: ").split())
    return ""
