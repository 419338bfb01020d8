"""The rank's environment, and the only reader of the scheduler's variables.

Owns the translation of Slurm's and the local controller's variables into one value, and the choice of the variables
that a child inherits. Promises that no other module reads `os.environ` for them. The `repr` of an `Environment` shows
the whole situation of a rank.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from pipeline.errors import RendezvousError
from pipeline.utils.network_interfaces import addresses_on, candidate_addresses

LOCAL_JOB = "ROLLCALL_LOCAL_JOB"
LAUNCHER = "ROLLCALL_LAUNCHER_PID"

_SETTINGS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"})
"""Variables with which Slurm's commands find their controller. They are not of a job, so every child keeps them."""

_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "SUBMITIT_", LOCAL_JOB, LAUNCHER)
"""Prefixes of the variables that describe a job or a step. A child would mistake inherited ones for its own: a job that
is submitted within another job its restart count and its shape, a library its number of tasks."""

_DEFAULTS = ("SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_")
"""Prefixes of the variables that set options of Slurm's commands."""


@dataclass(frozen=True)
class Environment:
    """One rank of one attempt.

    Attributes:
        scheduler: the scheduler that started the job.
        job, restart: the job id and its number of requeues. A heterogeneous job has its leader's id.
        rank, ranks: this task, and the number of tasks.
        addresses: candidate addresses of this node, best first.
        interface: the address on which the probe server listens: a virtual node's address, or "" for all interfaces.
        visible_gpus: the scheduler's CUDA_VISIBLE_DEVICES, "" without a GPU. On one machine the user's value, None if
            it is not set.
    """

    scheduler: Literal["local", "slurm"]
    job: str
    restart: int
    rank: int
    ranks: int
    addresses: tuple[str, ...]
    interface: str = ""
    visible_gpus: str | None = None

    def addresses_on(self, network: str) -> tuple[str, ...]:
        """The candidate addresses on `network` (`cluster.network`); a virtual node always has its loopback address."""
        return self.addresses if self.scheduler == "local" else addresses_on(self.addresses, network)

    @property
    def attempt(self) -> str:
        """The name of the attempt, `<job id>-<restart count>`."""
        return f"{self.job}-{self.restart}"

    @classmethod
    def detect(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        """The environment of this process; `RendezvousError` if no known scheduler started it."""
        if LOCAL_JOB in variables:
            return _local(variables)
        if "SLURM_JOB_ID" in variables:
            return _slurm(variables)
        raise RendezvousError("this process was started by no scheduler; start runs with launchers/submit.py")


def _local(variables: Mapping[str, str]) -> Environment:
    rank = int(variables["SUBMITIT_LOCAL_GLOBALID"])
    return Environment(
        scheduler="local",
        job=variables[LOCAL_JOB],
        restart=0,
        rank=rank,
        ranks=int(variables["SUBMITIT_LOCAL_NTASKS"]),
        addresses=(local_address(rank),),
        interface=local_address(rank),
        visible_gpus=gpus_of_user(variables),
    )


def _slurm(variables: Mapping[str, str]) -> Environment:
    job, restart = batch_attempt(variables)
    return Environment(
        scheduler="slurm",
        job=job,
        restart=restart,
        rank=int(variables["SLURM_PROCID"]),
        ranks=int(variables["SLURM_NTASKS"]),
        addresses=candidate_addresses(),
        visible_gpus=variables.get("CUDA_VISIBLE_DEVICES", ""),
    )


def batch_attempt(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Job id and restart count of the enclosing Slurm job, in its batch script and its tasks alike."""
    job = variables.get("SLURM_HET_JOB_ID") or variables.get("SLURM_JOB_ID")
    if job is None:
        raise RendezvousError("this process belongs to no Slurm job; start runs with launchers/submit.py")
    return job, int(variables.get("SLURM_RESTART_COUNT", "0"))


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


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role: that of this process without the variables of a job, plus `extra`.

    Python children never import from their working directory (`PYTHONSAFEPATH`), so a folder with the name of one of
    our packages cannot shadow it. CUDA_DEVICE_ORDER makes CUDA number the GPUs as nvidia-smi does, from which our
    indices come; its default order starts with the fastest.
    """
    ours = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return _outside_a_job(os.environ) | ours | dict(extra)


def submission_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of Slurm's commands, without the variables of an enclosing job. sbatch passes it to the job.

    The user's defaults for these commands are removed too. Those of sbatch override the options of the batch file,
    which was shown and checked; those of the other commands change their output or effect.
    """
    return {key: value for key, value in _outside_a_job(variables).items() if not key.startswith(_DEFAULTS)}


def _outside_a_job(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key in _SETTINGS or not key.startswith(_OF_A_JOB)}
