"""Does this site take the job?

Owns what a submission asks the scheduler before anything is queued: that it answers, that partition, GPUs, nodes, time
and account exist there, and at last that it accepts the batch file. Promises one `ConfigError` for the first thing that
is wrong, with what the site has instead, and that nothing is queued. A job that Slurm would accept and never start
counts as wrong; one that only waits for a node to be repaired does not.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import RunConfig, closest_match
from pipeline.errors import ConfigError, PlanError, SchedulerError
from pipeline.topology.plan import NodeBundle, Plan
from slurm.agent.supervisor import max_shutdown_seconds
from slurm.scheduler.scheduler_protocol import Nodes, Partition, Scheduler
from slurm.scheduler.slurm.batch_file import Component, components

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_NO_SUCH_NODES = "Requested node configuration is not available"
"""What Slurm says of nodes that do not exist and, in a dry run, of nodes that are down."""


def check_site(config: RunConfig, plan: Plan, scheduler: Scheduler, batch_text: str) -> None:
    """Raise `ConfigError` for the first reason why the job cannot run here; `batch_text` is the whole batch file."""
    try:
        partitions = scheduler.partitions()
        parts = components(config, plan)
        keys = _partition_keys(config, len(parts))
        chosen = [
            partition
            for key, part in zip(keys, parts, strict=True)
            for partition in _check(key, part, partitions, config)
        ]
        _check_account(config, scheduler)
        _check_batch(batch_text, chosen, scheduler)
    except SchedulerError as error:
        hint = f"{error}; try again later, or ask those who run the cluster"
        raise ConfigError("cluster.scheduler", "slurm", "a scheduler that answers", hint) from None


def warnings(config: RunConfig, scheduler: Scheduler) -> list[str]:
    """What is not wrong, but will hurt; one line each."""
    try:
        wait = scheduler.kill_wait()
    except SchedulerError as error:
        return [f"how long Slurm waits before it kills a job is not known: {error}"]
    needed, grace = max_shutdown_seconds(config.cluster), config.cluster.grace_seconds
    if wait >= needed:
        return []
    least = needed - grace
    hint = f"set cluster.grace_seconds={wait - least:g}" if wait > least else "lower cluster.stop_seconds"
    return [
        f"this site kills a job {wait} s after it asked it to end (KillWait), and this run may need {needed:g} s to "
        f"commit and come down: without other notice it may resume from an older checkpoint; {hint}, or ask for a "
        f"longer KillWait or GraceTime"
    ]


def seconds_of(time: str) -> int | None:
    """Seconds of a time as Slurm writes and reads it; None for no limit (`infinite`, or 0) and for no time at all.

    `90` is minutes, `90:30` minutes and seconds, `1-12` days and hours, `1-12:30` days, hours and minutes.
    """
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:
        seconds = ((int(found["days"]) * 24 + first) * 60 + second) * 60 + third
    elif found["third"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return seconds or None


def _partition_keys(config: RunConfig, parts: int) -> tuple[str, ...]:
    """The key that names the partition of each component."""
    own = "cluster.partition"
    if parts == 1:
        return (own,)
    return ("cluster.services.partition" if config.cluster.services.partition else own), own


def _check(key: str, component: Component, partitions: Sequence[Partition], config: RunConfig) -> list[Partition]:
    """The partitions that the component may run in: of several, with commas between, Slurm uses any that fits."""
    chosen = _find(key, component.partition, partitions)
    refusals = []
    for partition in chosen:
        try:
            _check_up(key, partition, partitions)
            _check_gpus(key, component, partition, partitions, config)
            _check_nodes(key, component, partition, config)
            _check_time(partition, config)
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == len(chosen):
        raise refusals[0]
    return chosen


def _find(key: str, wanted: str, partitions: Sequence[Partition]) -> list[Partition]:
    by_name = {partition.name: partition for partition in partitions}
    names = list(by_name)
    if not wanted:
        default = [partition for partition in partitions if partition.default]
        if not default:
            expected = "a partition, since this site has no default"
            raise ConfigError(key, "", expected, f"choose from: {', '.join(names)}")
        return default
    chosen = wanted.split(",")
    for name in chosen:
        if name not in names:
            raise _unknown(key, name, "a partition of this cluster", names)
    return [by_name[name] for name in chosen]


def _unknown(key: str, value: str, expected: str, among: list[str]) -> ConfigError:
    """For a word that the site does not have: the nearest it has, and all."""
    hint = closest_match(value, among, "sinfo shows them")
    known = "" if hint.startswith("choose") or len(among) > 20 else f" ({', '.join(sorted(among))})"
    return ConfigError(key, value, expected + known, hint)


def _check_up(key: str, partition: Partition, partitions: Sequence[Partition]) -> None:
    if not partition.up:
        others = ", ".join(other.name for other in partitions if other.up)
        hint = f"choose from: {others}" if others else "none is; ask those who run the cluster"
        raise ConfigError(key, partition.name, "a partition that is up", hint)


def _check_gpus(
    key: str, component: Component, partition: Partition, partitions: Sequence[Partition], config: RunConfig
) -> None:
    """Insist that some node of the partition has the GPUs that the largest seat needs."""
    wanted, kind = component.gpus, component.gpu_type
    if not wanted:
        return
    if not partition.gpus:
        others = ", ".join(other.name for other in partitions if other.gpus) or "none of this cluster"
        expected = f"a partition whose nodes have GPUs, since {_largest_component(component).name} needs {wanted}"
        raise ConfigError(key, partition.name, expected, f"those that do: {others}")
    kinds = sorted({name for nodes in partition.kinds for name in nodes.gpus if name})
    if kind and kind not in kinds:
        if not kinds:
            expected = f"nothing, since the GPUs of partition {partition.name} have no type"
            raise ConfigError("cluster.gpu_type", kind, expected, "leave it out")
        raise _unknown("cluster.gpu_type", kind, f"a type of GPU of partition {partition.name}", kinds)
    most = max(_gpus(nodes, kind) for nodes in partition.kinds)
    if wanted > most:
        asks, count, hint = _asking_key(component, config)
        what = f"{kind} GPUs" if kind else "GPUs"
        expected = f"at most {most} {what} for each node, as partition {partition.name} has, not {wanted}"
        raise PlanError(asks, count, expected, hint)


def _check_nodes(key: str, component: Component, partition: Partition, config: RunConfig) -> None:
    """Insist on enough nodes that have those GPUs; nodes that are down count, since they may be mended."""
    wanted, kind = component.gpus, component.gpu_type
    there = sum(nodes.count for nodes in partition.kinds if _gpus(nodes, kind) >= wanted)
    if component.nodes <= there:
        return
    resources = config.resources
    parts = {} if config.evaluation.only else {"resources.trainer.nodes": resources.trainer.nodes}
    if config.has_servers:
        parts["resources.inference.nodes"] = resources.inference.nodes
    if config.has_rollouts:
        parts["resources.services.nodes"] = resources.services.nodes
    parts["resources.spare_nodes"] = resources.spare_nodes
    with_gpus = f" with {wanted} {kind or 'GPU'}{'' if wanted == 1 or kind else 's'}" if wanted else ""
    expected = f"at most {there}, the nodes{with_gpus} of partition {partition.name}"
    if resources.nodes:
        raise PlanError("resources.nodes", resources.nodes, expected, f"lower it, or set another {key}")
    counts = ", ".join(f"{name} ({count})" for name, count in parts.items() if count)
    hint = f"lower one of {counts}, or set another {key}"
    raise PlanError("resources", f"{component.nodes} nodes", expected, hint)


def _check_time(partition: Partition, config: RunConfig) -> None:
    """Insist on a time limit that the partition allows. A quality of service may allow more than that; then Slurm says.

    The notice must come after the start, or every attempt would be told to end as it begins.
    """
    cluster = config.cluster
    limit, wanted = seconds_of(partition.time_limit), seconds_of(cluster.time)
    too_long = bool(cluster.time) and limit is not None and (wanted is None or wanted > limit)
    if too_long and not cluster.qos:
        expected = f"at most {partition.time_limit}, the limit of partition {partition.name}"
        hint = "a requeued job gets a fresh time limit, so a run may take longer than one attempt"
        raise ConfigError("cluster.time", cluster.time, expected, hint)
    if wanted is not None and wanted <= cluster.notice_seconds:
        expected = f"less than the time limit (cluster.time={cluster.time} is {wanted} s)"
        raise ConfigError("cluster.notice_seconds", cluster.notice_seconds, expected, "lower it, or raise cluster.time")


def _check_account(config: RunConfig, scheduler: Scheduler) -> None:
    account = config.cluster.account
    if not account:
        return
    known = scheduler.accounts()
    if known and account.lower() not in known:
        raise _unknown("cluster.account", account, "an account that you may charge", known)


def _check_batch(text: str, chosen: Sequence[Partition], scheduler: Scheduler) -> None:
    """Insist that the scheduler would accept the whole file.

    When it is only asked, Slurm refuses for nodes that are down as for nodes that do not exist. The submission itself
    tells them apart, so with nodes down that refusal is left to it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.sh"
        file.write_text(text)
        refusal = scheduler.test_only(file)
    waiting = refusal == _NO_SUCH_NODES and any(nodes.down for partition in chosen for nodes in partition.kinds)
    if refusal and not waiting:
        hint = "see the batch file with --dry-run and what docs/cluster.md says of cluster's keys"
        raise ConfigError("cluster", "slurm", f"a job that Slurm accepts, but it says: {refusal}", hint)


def _gpus(nodes: Nodes, kind: str) -> int:
    """GPUs of each of these nodes, of one kind or of all."""
    return nodes.gpus.get(kind, 0) if kind else sum(nodes.gpus.values())


def _largest_component(component: Component) -> NodeBundle:
    return max(component.seats, key=lambda seat: seat.gpus)


def _asking_key(component: Component, config: RunConfig) -> tuple[str, int, str]:
    """The key that asks for most GPUs of a node, its value, and what else to change."""
    roles = {slot.role for slot in _largest_component(component).roles}
    if config.resources.colocate and "inference" in roles:
        hint = "lower it and raise resources.trainer.nodes and resources.inference.nodes"
        return "resources.trainer.processes", config.resources.trainer.processes, hint
    if config.resources.gpus_per_node and config.has_rollouts:
        return "resources.gpus_per_node", config.resources.gpus_per_node, "set it to what the nodes have"
    if "inference" in roles:
        servers, gpus = config.resources.inference.servers, config.resources.inference.gpus
        return "resources.inference.gpus", gpus, f"lower it, or resources.inference.servers ({servers})"
    return (
        "resources.trainer.processes",
        config.resources.trainer.processes,
        "lower it and raise resources.trainer.nodes",
    )
