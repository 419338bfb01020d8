"""What is asked of Slurm: the batch file of a run.

Owns the text: the options of sbatch, of one component or of two, and the script that starts an agent on every node and
then decides about a requeue. Promises that nothing of ours can be contradicted by an option of the user's, and that
whatever characters are in a path or a value reach the command they are meant for. Pure.

    text = batch_file(config, plan, run, run_id="demo-1f3a", folder=folder, python=sys.executable, command=command)

The script outlives the signals that its agents get, so that its last line, `slurm.batch.requeue`, is the one owner of
the requeue. A heterogeneous job has one step over both components, and so one rank space: the services are rank 0.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import NodeBundle, Plan, RoleProcess

Value = str | int | bool

RESERVED_OPTIONS: Mapping[str, str] = {
    "account": "set cluster.account",
    "array": "a run is one job; sweep with -m",
    "comment": "it carries the run_id",
    "constraint": "set cluster.constraint",
    "cpus-per-gpu": "set cluster.cpus",
    "cpus-per-task": "set cluster.cpus",
    "error": "the output is in the run directory",
    "exclude": "set cluster.exclude",
    "exclusive": "set cluster.exclusive",
    "gres": "set resources.trainer.gpus, resources.inference.gpus and cluster.gpu_type",
    "gpus": "set resources.trainer.gpus and resources.inference.gpus",
    "gpus-per-node": "set resources.trainer.gpus, resources.inference.gpus and cluster.gpu_type",
    "gpus-per-socket": "set resources.trainer.gpus and resources.inference.gpus",
    "gpus-per-task": "set resources.trainer.gpus and resources.inference.gpus",
    "help": "it queues nothing",
    "input": "agents read none",
    "job-name": "set name",
    "mail-type": "set cluster.mail_type",
    "mail-user": "set cluster.mail_user",
    "mem": "set cluster.memory",
    "no-kill": "a job that lost a node must be requeued, not go on",
    "no-requeue": "set cluster.max_restarts=0",
    "nodelist": "set cluster.nodelist",
    "nodes": "set resources.nodes, or those of the roles",
    "ntasks": "one agent runs on each node; set resources.nodes",
    "ntasks-per-core": "one agent runs on each node",
    "ntasks-per-gpu": "one agent runs on each node",
    "ntasks-per-node": "one agent runs on each node",
    "ntasks-per-socket": "one agent runs on each node",
    "open-mode": "the logs of all attempts are kept",
    "output": "it is in the run directory",
    "parsable": "it changes what sbatch prints",
    "partition": "set cluster.partition",
    "qos": "set cluster.qos",
    "quiet": "it changes what sbatch prints",
    "requeue": "set cluster.max_restarts",
    "reservation": "set cluster.reservation",
    "signal": "set cluster.notice_seconds",
    "tasks-per-node": "one agent runs on each node",
    "test-only": "use --dry-run",
    "time": "set cluster.time",
    "usage": "it queues nothing",
    "version": "it queues nothing",
    "wait": "leave --detach out",
    "wrap": "the script is ours",
}
"""The options of sbatch that `cluster.sbatch` may not hold, and what to do instead. Slurm takes a long option's
beginning for the option, so beginnings are refused as well."""

_AGENT_CPUS = 1
_APPEND = 'exec "$@" >>"$0/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1'
"""Each agent opens its own log, under the name that submitit looks for. srun's `%t` is not the rank in a heterogeneous
step (22.05 counts the offset of the component twice)."""
_BLOCK = (
    "import os, sys; from signal import *; "
    "pthread_sigmask(SIG_BLOCK, (SIGTERM, SIGUSR1, SIGUSR2)); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""A signal that comes while an agent's Python starts and imports waits until `note_signals` can hear it, and neither
kills the agent nor reaches submitit. (`env --block-signal` does the same, but is too young for many a cluster.)"""


@dataclass(frozen=True)
class Component:
    """A part of the allocation whose nodes are alike: all of it, or one half of a heterogeneous job.

    Attributes:
        nodes: how many; `seats` are of the roles among them, and any node may get any seat.
        partition: empty for the site's own; so are `constraint`, `memory` and `nodelist`.
        cpus: those of each node's agent and its roles.
        gpu_type: of its GPUs; empty for any.
    """

    nodes: int
    seats: tuple[NodeBundle, ...]
    partition: str
    constraint: str
    memory: str
    cpus: int
    nodelist: str = ""
    gpu_type: str = ""

    @property
    def gpus(self) -> int:
        """GPUs that each of its nodes must have."""
        return max((seat.gpus for seat in self.seats), default=0)


def batch_file(
    config: RunConfig, plan: Plan, run: RunPaths, *, run_id: str, folder: Path, python: str, command: str
) -> str:
    """The text that sbatch gets.

    `folder` is submitit's job folder, `python` the interpreter, `command` the quoted words of an agent. `ConfigError`
    for an option in `cluster.sbatch` that contradicts ours, and for what a batch file cannot hold.
    """
    _check_path(folder)
    parts = components(config, plan)
    comment, output = f"rollcall {run_id}", {"output": f"{folder}/%j_0_log.out", "open-mode": "append"}
    asked = [_directives(config, part, comment, first=part is parts[0]) for part in parts]
    asked[0] += _lines(output)
    sections = [
        ["#!/bin/bash"],
        "\n#SBATCH hetjob\n".join("\n".join(lines) for lines in asked).split("\n"),
        config.cluster.setup,
        _exports(run),
        _start(config, parts, folder, python, command),
        _epilogue(run, python),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _directives(config: RunConfig, part: Component, comment: str, *, first: bool) -> list[str]:
    """The `#SBATCH` lines of one component. Mail is asked for once, with the `first`."""
    cluster = config.cluster
    mail = {"mail-user": cluster.mail_user, "mail-type": cluster.mail_type} if first else {}
    return _lines({**_shared(config, comment), **mail, **_options(part), **_extras(cluster.sbatch)})


def components(config: RunConfig, plan: Plan) -> tuple[Component, ...]:
    """The parts of the allocation in the order of their ranks: one, or the services' and then the others'."""
    cluster, resources = config.cluster, config.resources
    services, others = split_components(plan) if resources.hetjob else ((), plan.bundles)
    last = Component(
        nodes=plan.ranks - len(services),
        seats=others,
        partition=cluster.partition,
        constraint=cluster.constraint,
        memory=cluster.memory,
        cpus=cluster.cpus or _max_cpus(others, config),
        nodelist=cluster.nodelist,
        gpu_type=cluster.gpu_type,
    )
    if not services:
        return (last,)
    own = cluster.services
    first = Component(
        nodes=len(services),
        seats=services,
        partition=own.partition or cluster.partition,
        constraint=own.constraint,
        memory=own.memory,
        cpus=own.cpus or _max_cpus(services, config),
    )
    return first, last


def split_components(plan: Plan) -> tuple[tuple[NodeBundle, ...], tuple[NodeBundle, ...]]:
    """The seats of the first and of the second component of a heterogeneous job: services, and the others."""
    services = tuple(seat for seat in plan.bundles if not any(_is_compute(slot) for slot in seat.roles))
    return services, tuple(seat for seat in plan.bundles if seat not in services)


def cpus_needed(seat: NodeBundle, config: RunConfig) -> int:
    """CPUs that the roles of a seat keep busy, and one for its agent."""
    return _AGENT_CPUS + sum(_cpus(slot, config) for slot in seat.roles)


def _is_compute(slot: RoleProcess) -> bool:
    return slot.role in ("trainer", "inference")


def _cpus(slot: RoleProcess, config: RunConfig) -> int:
    resources = config.resources
    if slot.role == "trainer":
        return resources.trainer.processes * resources.trainer.threads
    if slot.role == "actor":  # it mostly waits itself while the processes of its task compute
        return config.task.processes
    return resources.inference.threads if slot.role == "inference" else 1


def _max_cpus(seats: Sequence[NodeBundle], config: RunConfig) -> int:
    return max(cpus_needed(seat, config) for seat in seats)


def _shared(config: RunConfig, comment: str) -> dict[str, Value]:
    """The options that all components have."""
    cluster = config.cluster
    return {
        "job-name": config.name,
        "comment": comment,
        "requeue": cluster.max_restarts > 0,
        "no-requeue": cluster.max_restarts == 0,
        "signal": f"USR2@{cluster.notice_seconds}" if cluster.notice_seconds else "",
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        "reservation": cluster.reservation,
        "exclude": cluster.exclude,
        "exclusive": cluster.exclusive,
    }


def _options(part: Component) -> dict[str, Value]:
    """The options of one component."""
    kind = f"{part.gpu_type}:" if part.gpu_type else ""
    return {
        "partition": part.partition,
        "constraint": part.constraint,
        "nodelist": part.nodelist,
        "mem": part.memory,
        "nodes": part.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": part.cpus,
        "gpus-per-node": f"{kind}{part.gpus}" if part.gpus else "",
    }


def _extras(given: Mapping[str, Value]) -> dict[str, Value]:
    """The user's further options, by their full names; `ConfigError` for one that is ours."""
    extras = {}
    for key, value in given.items():
        option = key.replace("_", "-")
        if len(option) < 2 or not option.replace("-", "").isalnum():
            raise ConfigError(f"cluster.sbatch.{key}", value, "the long name of an option of sbatch", "see man sbatch")
        mine = next((name for name in sorted(RESERVED_OPTIONS) if name.startswith(option)), None)
        if mine:
            raise ConfigError(
                f"cluster.sbatch.{key}", value, "an option that is not Rollcall's own", RESERVED_OPTIONS[mine]
            )
        extras[option] = value
    return extras


def _lines(options: Mapping[str, Value]) -> list[str]:
    """One `#SBATCH` line an option; True is a flag, and what is False or empty is left out."""
    lines = []
    for key, value in options.items():
        if value is False or value == "":
            continue
        if "\n" in str(value):
            raise ConfigError(f"sbatch's {key}", value, "one line", "a batch file holds one option a line")
        lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}")
    return lines


def _check_path(folder: Path) -> None:
    """Refuse what Slurm would replace in the name of a log, and what ends a line."""
    bad = next((character for character in '%\\"\n' if character in str(folder)), None)
    if bad:
        raise ConfigError(
            "output", str(folder), f"a path without {bad!r}, which Slurm reads as its own", "set output=…"
        )


def _exports(run: RunPaths) -> list[str]:
    return [
        f"export PYTHONPATH={shlex.quote(str(run.code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1 SUBMITIT_EXECUTOR=slurm",
    ]


def _start(config: RunConfig, parts: Sequence[Component], folder: Path, python: str, command: str) -> list[str]:
    """The trap, and one step over all components. Its environment is the script's, whatever `--export` says."""
    het = len(parts) > 1
    steps = []
    for index, part in enumerate(parts):
        group = [f"--het-group={index}"] if het else []
        srun = ["--kill-on-bad-exit=1", "--export=ALL", f"--cpus-per-task={part.cpus}", *config.cluster.srun_args]
        steps.append(f'{_quoted([*group, *srun])} "${{agent[@]}}"')
    blocking = f"{shlex.quote(python)} -I -S -c {shlex.quote(_BLOCK)}"
    return [
        f"agent=(bash -c {shlex.quote(_APPEND)} {shlex.quote(str(folder))} {blocking} {command})",
        "trap : TERM USR1 USR2",
        "code=0",
        f"srun {' : '.join(steps)} || code=$?",
    ]


def _epilogue(run: RunPaths, python: str) -> list[str]:
    """The decision. It ignores what the agents were to hear, so that no later signal cuts it off."""
    decide = f'{shlex.quote(python)} -P -m slurm.batch.requeue {shlex.quote(str(run.root))} "$code"'
    return ["trap '' TERM USR1 USR2", decide, "exit $?"]


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
