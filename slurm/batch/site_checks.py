"""A submission's checks of the site.

Owns the queries to the scheduler before anything is queued: that it answers, that partition, GPUs, nodes, time and
account exist, and that it accepts the batch file. Promises one `ConfigError` for the first mistake, with the site's
values, and that nothing is queued. A job that Slurm would accept and never start is a mistake; a job that only waits
for a node's repair is none.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import RunConfig, closest_match
from pipeline.errors import ConfigError, PlanError, SchedulerError
from pipeline.topology.plan import NodeBundle, Plan
from slurm.agent.supervisor import max_shutdown_seconds
from slurm.scheduler.allocation import Component, components
from slurm.scheduler.scheduler_protocol import JobQueue, Nodes, Partition
from slurm.scheduler.scheduler_registry import batch_scheduler

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def check_site(config: RunConfig, plan: Plan, queue: JobQueue, batch_text: str) -> None:
    """Raise `ConfigError` for the first reason why the job cannot run here; `batch_text` is the whole batch file."""
    try:
        partitions = queue.partitions()
        parts = components(config, plan)
        keys = _partition_keys(config, len(parts))
        chosen = [
            partition
            for key, part in zip(keys, parts, strict=True)
            for partition in _check(key, part, partitions, config)
        ]
        _check_account(config, queue)
        _check_batch(batch_text, chosen, config, queue)
    except SchedulerError as error:
        hint = f"{error}; try again later, or ask the cluster's administrators"
        raise ConfigError("cluster.scheduler", config.cluster.scheduler, "a scheduler that answers", hint) from None


def warnings(config: RunConfig, queue: JobQueue) -> list[str]:
    """Warnings about valid settings that may cost progress, one line each."""
    scheduler = batch_scheduler(config.cluster.scheduler)
    setting = scheduler.kill_settings[0]
    try:
        wait = queue.kill_wait()
    except SchedulerError as error:
        return [f"{scheduler.title}'s {setting}, its time between TERM and KILL, is not known: {error}"]
    needed, grace = max_shutdown_seconds(config.cluster), config.cluster.grace_seconds
    if wait >= needed:
        return []
    least = needed - grace
    hint = f"set cluster.grace_seconds={wait - least:g}" if wait > least else "lower cluster.stop_seconds"
    return [
        f"this site kills a job {wait} s after TERM ({setting}), and this run may need {needed:g} s to save a "
        f"checkpoint and shut down: without other notice it may resume from an older checkpoint; {hint}, or ask for a "
        f"longer {' or '.join(scheduler.kill_settings)}"
    ]


def seconds_of(time: str) -> int | None:
    """The seconds of a time in Slurm's format; None for no limit (`infinite`, or 0) and for an invalid time.

    `90` is minutes, `90:30` minutes and seconds, `1-12` days and hours, `1-12:30` days, hours and minutes.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        seconds = ((int(match["days"]) * 24 + first) * 60 + second) * 60 + third
    elif match["third"] is not None:
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
    """The partitions that the component may run in. Of a comma-separated list, Slurm uses any that fits."""
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


def _find(key: str, requested: str, partitions: Sequence[Partition]) -> list[Partition]:
    by_name = {partition.name: partition for partition in partitions}
    names = list(by_name)
    if not requested:
        default = [partition for partition in partitions if partition.default]
        if not default:
            expected = "a partition, since this site has no default"
            raise ConfigError(key, "", expected, f"choose from: {', '.join(names)}")
        return default
    chosen = requested.split(",")
    for name in chosen:
        if name not in names:
            raise _unknown(key, name, "a partition of this cluster", names)
    return [by_name[name] for name in chosen]


def _unknown(key: str, value: str, expected: str, among: list[str]) -> ConfigError:
    """The error for an unknown name, with the closest match and all names of the site."""
    hint = closest_match(value, among, "the scheduler lists them")
    known = "" if hint.startswith("choose") or len(among) > 20 else f" ({', '.join(sorted(among))})"
    return ConfigError(key, value, expected + known, hint)


def _check_up(key: str, partition: Partition, partitions: Sequence[Partition]) -> None:
    if not partition.up:
        others = ", ".join(other.name for other in partitions if other.up)
        hint = f"choose from: {others}" if others else "none is up; ask the cluster's administrators"
        raise ConfigError(key, partition.name, "a partition that is up", hint)


def _check_gpus(
    key: str, component: Component, partition: Partition, partitions: Sequence[Partition], config: RunConfig
) -> None:
    """Raise `ConfigError` unless some node of the partition has the GPUs of the largest node bundle."""
    needed, kind = component.gpus, component.gpu_type
    if not needed:
        return
    if not partition.gpus:
        others = ", ".join(other.name for other in partitions if other.gpus) or "none of this cluster"
        expected = f"a partition whose nodes have GPUs, since {_largest_component(component).name} needs {needed}"
        raise ConfigError(key, partition.name, expected, f"those that do: {others}")
    kinds = sorted({name for nodes in partition.kinds for name in nodes.gpus if name})
    if kind and kind not in kinds:
        if not kinds:
            expected = f"nothing, since the GPUs of partition {partition.name} have no type"
            raise ConfigError("cluster.gpu_type", kind, expected, "leave it out")
        raise _unknown("cluster.gpu_type", kind, f"a type of GPU of partition {partition.name}", kinds)
    most = max(_gpus(nodes, kind) for nodes in partition.kinds)
    if needed > most:
        asks, count, hint = _asking_key(component, config)
        what = f"{kind} GPUs" if kind else "GPUs"
        expected = f"at most {most} {what} for each node, as partition {partition.name} has, not {needed}"
        raise PlanError(asks, count, expected, hint)


def _check_nodes(key: str, component: Component, partition: Partition, config: RunConfig) -> None:
    """Raise `PlanError` unless the partition has enough nodes with those GPUs. Nodes that are down count too."""
    needed, kind = component.gpus, component.gpu_type
    available = sum(nodes.count for nodes in partition.kinds if _gpus(nodes, kind) >= needed)
    if component.nodes <= available:
        return
    resources = config.resources
    parts = {} if config.evaluation.only else {"resources.trainer.nodes": resources.trainer.nodes}
    if config.has_servers:
        parts["resources.inference.nodes"] = resources.inference.nodes
    if config.has_rollouts:
        parts["resources.services.nodes"] = resources.services.nodes
    parts["resources.spare_nodes"] = resources.spare_nodes
    with_gpus = f" with {needed} {kind or 'GPU'}{'' if needed == 1 or kind else 's'}" if needed else ""
    expected = f"at most {available}, the nodes{with_gpus} of partition {partition.name}"
    if resources.nodes:
        raise PlanError("resources.nodes", resources.nodes, expected, f"lower it, or set another {key}")
    counts = ", ".join(f"{name} ({count})" for name, count in parts.items() if count)
    hint = f"lower one of {counts}, or set another {key}"
    raise PlanError("resources", f"{component.nodes} nodes", expected, hint)


def _check_time(partition: Partition, config: RunConfig) -> None:
    """Raise `ConfigError` unless the partition allows the time limit. With a quality of service, Slurm checks the
    limit.

    The notice must come after the start, or every attempt would get its stop request at once.
    """
    cluster = config.cluster
    limit, requested = seconds_of(partition.time_limit), seconds_of(cluster.time)
    too_long = bool(cluster.time) and limit is not None and (requested is None or requested > limit)
    if too_long and not cluster.qos:
        expected = f"at most {partition.time_limit}, the limit of partition {partition.name}"
        hint = "a requeued job gets a fresh time limit, so a run may take longer than one attempt"
        raise ConfigError("cluster.time", cluster.time, expected, hint)
    if requested is not None and requested <= cluster.notice_seconds:
        expected = f"less than the time limit (cluster.time={cluster.time} is {requested} s)"
        raise ConfigError("cluster.notice_seconds", cluster.notice_seconds, expected, "lower it, or raise cluster.time")


def _check_account(config: RunConfig, queue: JobQueue) -> None:
    account = config.cluster.account
    if not account:
        return
    known = queue.accounts()
    if known and account.lower() not in known:
        raise _unknown("cluster.account", account, "an account that you may charge", known)


def _check_batch(text: str, chosen: Sequence[Partition], config: RunConfig, queue: JobQueue) -> None:
    """Raise `ConfigError` unless the scheduler would accept the whole file, once nodes that are down are repaired."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.sh"
        file.write_text(text)
        down = any(nodes.down for partition in chosen for nodes in partition.kinds)
        refusal = queue.test_only(file, nodes_down=down)
    if refusal:
        name = config.cluster.scheduler
        hint = "see the batch file with --dry-run, and the keys of cluster in docs/cluster.md"
        expected = f"a job that {batch_scheduler(name).title} accepts; its refusal: {refusal}"
        raise ConfigError("cluster", name, expected, hint)


def _gpus(nodes: Nodes, kind: str) -> int:
    """The number of GPUs of each of these nodes, of one kind or of all kinds."""
    return nodes.gpus.get(kind, 0) if kind else sum(nodes.gpus.values())


def _largest_component(component: Component) -> NodeBundle:
    return max(component.bundles, key=lambda bundle: bundle.gpus)


def _asking_key(component: Component, config: RunConfig) -> tuple[str, int, str]:
    """The key that sets the most GPUs of a node, its value, and a hint with other keys to change."""
    roles = {slot.role for slot in _largest_component(component).roles}
    if config.resources.colocate and "inference" in roles:
        hint = "lower it and raise resources.trainer.nodes and resources.inference.nodes"
        return "resources.trainer.processes", config.resources.trainer.processes, hint
    if config.resources.gpus_per_node and config.has_rollouts:
        return "resources.gpus_per_node", config.resources.gpus_per_node, "set it to the number of GPUs of the nodes"
    if "inference" in roles:
        servers, gpus = config.resources.inference.servers, config.resources.inference.gpus
        return "resources.inference.gpus", gpus, f"lower it, or resources.inference.servers ({servers})"
    return (
        "resources.trainer.processes",
        config.resources.trainer.processes,
        "lower it and raise resources.trainer.nodes",
    )
