"""The batch file of a run.

Owns the text: sbatch's options for one or two components, and the script that starts an agent on every node and then
decides about a requeue. Promises that no option of the user overrides one of ours, and that paths and values reach
their command unchanged, whatever characters they contain. Pure.

    text = batch_file(config, plan, run, run_id="demo-1f3a", folder=folder, python=sys.executable, command=command)

The script survives the signals that its agents get, since its last line, `slurm.batch.requeue`, owns the requeue. A
heterogeneous job has one step over both components, and so one rank space that begins with the services. With
`cluster.container` the step starts each agent in a container; the script itself runs on the host.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from slurm.scheduler.allocation import Component, components
from slurm.scheduler.slurm.container_command import agent_words, gpu_exports, srun_options

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
    "no-kill": "set resources.spare_nodes; without spare nodes a job that lost a node must be requeued, not continue",
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
"""The options of sbatch that `cluster.sbatch` may not contain, with a hint. Slurm accepts a prefix of a long option, so
prefixes are refused as well."""

_APPEND = 'exec "$@" >>"$0/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>&1'
"""Each agent opens its own log, with the name that submitit expects. srun's `%t` is not the rank in a heterogeneous
step (22.05 counts the offset of the component twice)."""
_BLOCK = (
    "import os, sys; from signal import *; "
    "pthread_sigmask(SIG_BLOCK, (SIGTERM, SIGUSR1, SIGUSR2)); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Blocks signals while an agent's Python starts and imports, until `note_signals` handles them, so that they neither
kill the agent nor reach submitit. (`env --block-signal` does the same, but is too new for many clusters.)"""
_PLUGIN = """\
if ! grep -q -e --container-image <<< "$(srun --help 2>/dev/null)"; then
  echo "rollcall: container: node $(hostname): srun has no --container-image, so Slurm has no pyxis here; \
set cluster.container.kind=enroot or apptainer, or ask the administrators for pyxis"
  code=127
fi"""
"""Reports a site without pyxis, whose srun would only print an unknown option. No pipeline: with `pipefail` in
`cluster.setup`, an srun that writes when grep has found its line would count as failed."""


def batch_file(
    config: RunConfig, plan: Plan, run: RunPaths, *, run_id: str, folder: Path, python: str, command: str
) -> str:
    """The text of the batch file.

    `folder` is submitit's job folder, `python` the interpreter, `command` the quoted words of an agent. `ConfigError`
    for an option in `cluster.sbatch` that is one of ours, for a value that a batch file cannot contain, and for a
    container's image or mount that does not exist.
    """
    _check_path(folder)
    parts = components(config, plan)
    comment, output = f"rollcall {run_id}", {"output": f"{folder}/%j_0_log.out", "open-mode": "append"}
    directives = [_directives(config, part, comment, first=part is parts[0]) for part in parts]
    directives[0] += _lines(output)
    sections = [
        ["#!/bin/bash"],
        "\n#SBATCH hetjob\n".join("\n".join(lines) for lines in directives).split("\n"),
        config.cluster.setup,
        [*_exports(run), *gpu_exports(config)],
        _start(config, run, parts, folder, python, command),
        _epilogue(run, python),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _directives(config: RunConfig, part: Component, comment: str, *, first: bool) -> list[str]:
    """The `#SBATCH` lines of one component. Only the `first` component requests mail."""
    cluster = config.cluster
    mail = {"mail-user": cluster.mail_user, "mail-type": cluster.mail_type} if first else {}
    return _lines({**_shared(config, comment), **mail, **_options(part), **_extras(cluster.sbatch)})


def _shared(config: RunConfig, comment: str) -> dict[str, Value]:
    """The options of all components."""
    cluster = config.cluster
    return {
        "job-name": config.name,
        "no-kill": _outlives_nodes(config),
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


def _outlives_nodes(config: RunConfig) -> bool:
    """Whether the job continues when it loses a node: with spare ones the agents replace it, or end the attempt."""
    return config.resources.spare_nodes > 0


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


def _extras(options: Mapping[str, Value]) -> dict[str, Value]:
    """The user's additional options, by their full names; `ConfigError` for one in `RESERVED_OPTIONS`."""
    extras = {}
    for key, value in options.items():
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
    """One `#SBATCH` line per option. True is a flag; False and empty values are skipped."""
    lines = []
    for key, value in options.items():
        if value is False or value == "":
            continue
        if "\n" in str(value):
            raise ConfigError(f"sbatch's {key}", value, "one line", "a batch file has one option per line")
        lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}")
    return lines


def _check_path(folder: Path) -> None:
    """Raise `ConfigError` for characters that Slurm would replace in a log's name, and for line ends."""
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


def _start(
    config: RunConfig, run: RunPaths, parts: Sequence[Component], folder: Path, python: str, command: str
) -> list[str]:
    """The trap, and one step over all components. Its environment is the script's, for any `--export` of the user."""
    het = len(parts) > 1
    container = srun_options(config, run)
    steps = []
    for index, part in enumerate(parts):
        group = [f"--het-group={index}"] if het else []
        # With spare nodes the agents decide whether the job continues without a node.
        losses = ["--kill-on-bad-exit=0", "--no-kill"] if _outlives_nodes(config) else ["--kill-on-bad-exit=1"]
        srun = [*losses, "--export=ALL", f"--cpus-per-task={part.cpus}", *config.cluster.srun_args, *container]
        steps.append(f'{_quoted([*group, *srun])} "${{agent[@]}}"')
    step = f"srun {' : '.join(steps)} || code=$?"
    return [
        f"agent=({_agent(config, run, folder, python, command)})",
        "trap : TERM USR1 USR2",
        "code=0",
        *([_PLUGIN, f"[ $code != 0 ] || {step}"] if container else [step]),
    ]


def _agent(config: RunConfig, run: RunPaths, folder: Path, python: str, command: str) -> str:
    """The quoted words of a rank's task. Its log is opened on the host, or with pyxis in the container."""
    log = f"-c {shlex.quote(_APPEND)} {shlex.quote(str(folder))}"
    if not config.cluster.container.is_used:
        return f"bash {log} {shlex.quote(python)} -I -S -c {shlex.quote(_BLOCK)} {command}"
    lines = agent_words(config, run, python, shlex.split(command)[1:])
    return "\n  ".join([f"sh {log}", *map(_quoted, lines)])


def _epilogue(run: RunPaths, python: str) -> list[str]:
    """The lines that decide about a requeue. They ignore the agents' signals, so that no later one interrupts them."""
    decide = f'{shlex.quote(python)} -P -m slurm.batch.requeue {shlex.quote(str(run.root))} "$code"'
    return ["trap '' TERM USR1 USR2", decide, "exit $?"]


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
