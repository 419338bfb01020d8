"""Where this rank is: the only reader of the scheduler's variables.

Owns the translation of Slurm's and the local controller's variables into one value, and which of them a child may see.
Promises that no other module reads `os.environ` for them. `repr` of an `Environment` prints the whole situation of a
rank.
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
"""How Slurm's commands find their controller: not of a job, so every child keeps them."""

_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "SUBMITIT_", LOCAL_JOB, LAUNCHER)
"""Beginnings of the variables that describe a job or a step. Whoever inherits them takes them for its own: a job its
restart count and its shape, when it is submitted from within another; a library the number of tasks."""


_DEFAULTS = ("SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_")
"""Beginnings of the variables that stand for options of Slurm's commands."""


@dataclass(frozen=True)
class Environment:
    """One rank of one attempt.

    Attributes:
        scheduler: what started the job.
        job, restart: the scheduler's job id and how often it was requeued. A heterogeneous job has its leader's id.
        rank, ranks: this task and how many there are.
        addresses: candidate addresses of this node, best first.
        interface: where this rank's beacon listens: a virtual node's own address, or "" for all interfaces.
        visible_gpus: what the scheduler put into CUDA_VISIBLE_DEVICES, "" where it gave no GPU; on one machine what
            the user did, None if nobody did.
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
        """The candidates on the network that a run asks for (`cluster.network`); a virtual node has one of its own."""
        return self.addresses if self.scheduler == "local" else addresses_on(self.addresses, network)

    @property
    def attempt(self) -> str:
        """`<job id>-<restart count>`: names this incarnation everywhere."""
        return f"{self.job}-{self.restart}"

    @classmethod
    def detect(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        """The environment of this process; `RendezvousError` when no known scheduler started it."""
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
    """Job id and restart count of the Slurm job around this process, as its batch script and its tasks have them."""
    job = variables.get("SLURM_HET_JOB_ID") or variables.get("SLURM_JOB_ID")
    if job is None:
        raise RendezvousError("this process belongs to no Slurm job; start runs with launchers/submit.py")
    return job, int(variables.get("SLURM_RESTART_COUNT", "0"))


def launcher_process(variables: Mapping[str, str] = os.environ) -> psutil.Process | None:
    """The launcher that a local job must not outlive, or None when it is gone already."""
    try:
        return psutil.Process(int(variables[LAUNCHER]))
    except psutil.NoSuchProcess:
        return None


def gpus_of_user(variables: Mapping[str, str] = os.environ) -> str | None:
    """The GPUs to which a user, or an allocation around this process, restricts it; None for all of the machine."""
    return variables.get("CUDA_VISIBLE_DEVICES")


def local_address(rank: int) -> str:
    """Loopback address of a virtual node: 127.0.0.2 for rank 0, and so on."""
    return f"127.0.{(rank + 2) // 256}.{(rank + 2) % 256}"


def local_job_environment(job: str, command: str, ranks: int, code: Path) -> dict[str, str]:
    """What the controller of a local job starts with: submitit's variables and ours. Agents import from `code`."""
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
    """The environment of a role: this process's own, less what describes the job around it, plus `extra`.

    Python children never import from their working directory (`PYTHONSAFEPATH`), so that a folder named like one of
    ours cannot shadow it. CUDA counts GPUs as nvidia-smi does, which our indices are from; by itself it begins with the
    fastest.
    """
    ours = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return _outside_a_job(os.environ) | ours | dict(extra)


def submission_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of Slurm's commands, of which sbatch's becomes the job's: as if no job were around this process.

    A user's defaults for these commands go too: those of sbatch outrank the options in a batch file, and the file is
    what was shown and checked; those of the others change what they answer, or what they do.
    """
    return {key: value for key, value in _outside_a_job(variables).items() if not key.startswith(_DEFAULTS)}


def _outside_a_job(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key in _SETTINGS or not key.startswith(_OF_A_JOB)}
