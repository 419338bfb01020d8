"""The schedulers of this checkout, by name, and the environment of this process by any of them.

Owns the way from a name to a scheduler. A folder of this package is a scheduler; `pipeline.config.cluster_keys` accepts
the same names for `cluster.scheduler`.
"""

import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from pipeline.errors import ConfigError, RendezvousError
from pipeline.utils.user_commands import user_command
from slurm import scheduler
from slurm.scheduler.rank_environment import Environment, without_variables
from slurm.scheduler.scheduler_protocol import CALL_SECONDS, BatchScheduler, JobQueue, Scheduler

_FOLDER = scheduler.__name__.replace(".", "/")
_START_HINT = f"start runs with {user_command('submit')}"


def scheduler_names() -> tuple[str, ...]:
    """The names of all schedulers, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(scheduler.__path__) if module.ispkg))


@cache
def find_scheduler(name: str) -> Scheduler:
    """The scheduler with this name; `ConfigError` if this checkout has none, as for a job of another checkout."""
    if name not in scheduler_names():
        known = ", ".join(scheduler_names())
        raise ConfigError("cluster.scheduler", name, f"a scheduler of this checkout: {known}", f"add {_FOLDER}/{name}")
    selected: Scheduler = import_module(f"{scheduler.__name__}.{name}").SCHEDULER
    return selected


def batch_scheduler(name: str) -> BatchScheduler:
    """The scheduler with this name; `ConfigError` if it has no queue."""
    selected = find_scheduler(name)
    if not isinstance(selected, BatchScheduler):
        batch = [other for other in scheduler_names() if _has_queue(find_scheduler(other))]
        raise ConfigError("cluster.scheduler", name, "a scheduler with a queue", f"set cluster={' or '.join(batch)}")
    return selected


def connect_scheduler(name: str, seconds: float = CALL_SECONDS) -> JobQueue:
    """The queue of a scheduler, each command with a deadline of `seconds`; `ConfigError` if a command is missing."""
    selected = batch_scheduler(name)
    selected.require_commands()
    return selected.queue(seconds)


def detect_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The rank that this process is; `RendezvousError` if no known scheduler started it."""
    # A local job may run within a job of a scheduler, whose variables it inherits, never the reverse.
    for selected in sorted(map(find_scheduler, scheduler_names()), key=_has_queue):
        if (environment := selected.environment(variables)) is not None:
            return environment
    raise RendezvousError(f"this process was started by no scheduler; {_START_HINT}")


def batch_attempt(variables: Mapping[str, str] = os.environ) -> tuple[BatchScheduler, str, int]:
    """The scheduler of the enclosing job, the job's id and its number of requeues; `RendezvousError` outside a job."""
    for name in scheduler_names():
        selected = find_scheduler(name)
        if isinstance(selected, BatchScheduler) and (attempt := selected.batch_attempt(variables)) is not None:
            return selected, *attempt
    raise RendezvousError(f"this process belongs to no job of a scheduler; {_START_HINT}")


def _has_queue(selected: Scheduler) -> bool:
    return isinstance(selected, BatchScheduler)


def outside_a_job(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables without those that describe a job of any scheduler."""
    schedulers = [find_scheduler(name) for name in scheduler_names()]
    prefixes = tuple(prefix for selected in schedulers for prefix in selected.job_variables)
    return without_variables(
        variables, prefixes, frozenset().union(*(selected.client_variables for selected in schedulers))
    )


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role: that of this process without the variables of a job, plus `extra`.

    Python children never import from their working directory (`PYTHONSAFEPATH`), so a folder with the name of one of
    our packages cannot shadow it. CUDA_DEVICE_ORDER makes CUDA number the GPUs as nvidia-smi does, from which our
    indices come; its default order starts with the fastest.
    """
    ours = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return outside_a_job() | ours | dict(extra)
