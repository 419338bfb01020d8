"""The choice `resources=machine`: roles sized by the GPUs and cores of the machine on which the launcher runs.

Owns the values of the interpolations `${machine:NAME}` in `conf/`. Promises that they are resolved once, when a run is
composed, so that its frozen config has plain numbers. Must not know schedulers: a run that another machine starts is
refused, since nothing here shows its nodes.

One GPU is shared by a trainer process and a server; of several GPUs half serve, and the odd one too; without a GPU the
trainer and the server have half of the cores each.
"""

import os
from functools import cache
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from pipeline.errors import ConfigError
from slurm.agent.preflight import find_gpus

GPU_THREADS = 4
"""CPU threads of a process that has a GPU, as in the other choices of `resources`."""
GPU_PROMPTS, CPU_PROMPTS = 32, 8
"""`${machine:prompts}`: prompts of a step with GPUs, and without."""
SHARED_GPU_MEMORY, OWN_GPU_MEMORY = 0.4, 0.85
"""`inference.gpu_memory` next to a trainer process, and of a server that has a GPU for itself (the key's default)."""


class MachineSize(NamedTuple):
    """What `${machine:NAME}` gives, by name; `gpu` is the number of GPUs for a trainer process or a server."""

    device: str
    gpus: int
    gpu: int
    colocate: bool
    trainers: int
    servers: int
    threads: int
    gpu_memory: float


def machine_size(gpus: int, cores: int) -> MachineSize:
    """The roles of a machine with this many GPUs and cores; see the module."""
    if gpus == 0:
        return MachineSize("cpu", 0, 0, False, 1, 1, max(1, cores // 2), OWN_GPU_MEMORY)
    shared = gpus == 1
    trainers = max(1, gpus // 2)
    servers = 1 if shared else gpus - trainers
    memory = SHARED_GPU_MEMORY if shared else OWN_GPU_MEMORY
    return MachineSize("cuda", gpus, 1, shared, trainers, servers, GPU_THREADS, memory)


def register_machine() -> None:
    """Register `${machine:NAME}` with OmegaConf. The machine is measured once until the next call, since each
    measurement runs nvidia-smi."""
    measured = cache(_measure)

    def resolve(name: str, *, _root_: DictConfig) -> Any:
        scheduler = _root_.cluster.scheduler
        if name == "prompts":  # by the chosen resources, which may be those of a cluster
            return GPU_PROMPTS if _root_.resources.device == "cuda" else CPU_PROMPTS
        if scheduler != "local":
            raise ConfigError(
                "resources", "machine", f"the nodes of the job with cluster={scheduler}", "such as resources=gpus_8"
            )
        return getattr(measured(), name)

    OmegaConf.register_new_resolver("machine", resolve, replace=True, use_cache=False)


def _measure() -> MachineSize:
    gpus = len(find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
    return machine_size(gpus, len(os.sched_getaffinity(0)))
