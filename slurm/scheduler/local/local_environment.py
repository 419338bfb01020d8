"""The environment of a local job: its variables, the addresses of its virtual nodes, its launcher, the user's GPUs.

Owns the variables that the launcher of a local job sets and its agents read.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from slurm.scheduler.rank_environment import COMMON_VARIABLES, Environment

LOCAL_JOB = "ROLLCALL_LOCAL_JOB"
LAUNCHER = "ROLLCALL_LAUNCHER_PID"


class LocalScheduler:
    """The virtual nodes of this machine, as a `slurm.scheduler.scheduler_protocol.Scheduler`."""

    title = "this machine"
    job_variables = (LOCAL_JOB, LAUNCHER, *COMMON_VARIABLES)
    client_variables: frozenset[str] = frozenset()

    def environment(self, variables: Mapping[str, str]) -> Environment | None:
        if LOCAL_JOB not in variables:
            return None
        rank = int(variables["SUBMITIT_LOCAL_GLOBALID"])
        return Environment(
            scheduler="local",
            job=variables[LOCAL_JOB],
            restart=0,
            rank=rank,
            ranks=int(variables["SUBMITIT_LOCAL_NTASKS"]),
            addresses=(local_address(rank),),
            allocated=False,
            interface=local_address(rank),
            visible_gpus=gpus_of_user(variables),
        )


def launcher_process(variables: Mapping[str, str] = os.environ) -> psutil.Process | None:
    """The launcher that a local job must not outlive; None if it has exited."""
    try:
        return psutil.Process(int(variables[LAUNCHER]))
    except psutil.NoSuchProcess:
        return None


def gpus_of_user(variables: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_VISIBLE_DEVICES as the user or an enclosing allocation set it; None for all GPUs of the machine."""
    return variables.get("CUDA_VISIBLE_DEVICES")


def local_address(rank: int) -> str:
    """The loopback address of a virtual node: 127.0.0.2 for rank 0, and so on."""
    return f"127.0.{(rank + 2) // 256}.{(rank + 2) % 256}"


def local_job_environment(job: str, command: str, ranks: int, code: Path) -> dict[str, str]:
    """The environment of a local job's controller: submitit's variables and ours. Agents import from `code`."""
    return dict(os.environ) | {
        LOCAL_JOB: job,
        LAUNCHER: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH", "")])),
        "PYTHONSAFEPATH": "1",
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": command,
        "SUBMITIT_LOCAL_NTASKS": str(ranks),
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_TIMEOUT_S": "0",
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }
