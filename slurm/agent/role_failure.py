"""The failure of a role: its kind, its cause in one line, and the record of it.

Owns the facts that a post-mortem starts from: the exit code, an out-of-memory kill, the role's own report, listeners on
its ports, and the end of its log.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.run.first_failure import FirstFailure
from pipeline.utils import subprocesses
from slurm.agent.oom import OomWatch
from slurm.agent.recovery_policy import EndKind
from slurm.agent.role_process import SupervisedRole

USAGE_ERROR = 2
"""The exit code by which a program refuses its command line, which a restart would repeat."""


def kind_of_exit(role: SupervisedRole, code: int) -> EndKind:
    """The kind of an exit before the attempt's end."""
    status = role.context.status()
    if status is not None and status.state == "failed" and status.is_final:
        return "final"
    if role.state == "starting" and code == USAGE_ERROR:
        return "final"
    if code == 0:
        return "early"
    return "signal" if code < 0 else "exit"


def cause_of_exit(role: SupervisedRole, code: int, oom: OomWatch) -> str:
    """The cause of a role's exit: its code, an out-of-memory kill, its own report, and listeners on its ports. The code
    alone hides a killed process: torchrun then exits with 1, and vLLM with 0."""
    explained = oom.explains(code, last_lines(role.log))
    return f"{subprocesses.describe_exit(code)}{explained}{_own_report(role)}{role.taken_ports()}"


def failure_record(
    role: SupervisedRole, cause: str, code: int | None = None, stacks: Sequence[str] = ()
) -> FirstFailure:
    """The record of a role's failure, with the end of its log."""
    return FirstFailure(
        role=role.name,
        rank=role.context.placement.rank,
        cause=cause,
        exit_code=code,
        time=time.time(),
        log=str(role.log),
        last_lines=last_lines(role.log),
        stacks=tuple(stacks),
    )


def last_lines(log: Path) -> tuple[str, ...]:
    """The end of a log; a line with the reason if it cannot be read."""
    try:
        return tuple(subprocesses.tail(log))
    except OSError as error:
        return (f"{log} cannot be read: {error.strerror or error}",)


def _own_report(role: SupervisedRole) -> str:
    """The failure that the role itself reported; empty if it did not."""
    status = role.context.status()
    return f": {status.detail}" if status is not None and status.state == "failed" else ""
