"""Rules between the keys of GPUs: those of the trainer, of servers, and of GPUs that both share."""

from pipeline.config import RunConfig
from pipeline.errors import ConfigError

MAX_COLOCATED_SHARE = 0.7
"""Maximum fraction of a GPU's memory for servers that share it with a trainer process."""


def trainer_processes_have_one_gpu(config: RunConfig) -> None:
    gpus, hint = config.resources.trainer.gpus, "set it, and resources.trainer.processes"
    if config.resources.device == "cuda" and gpus != 1:
        expected = "1 with resources.device=cuda: each process of the trainer computes on one GPU"
        raise ConfigError("resources.trainer.gpus", gpus, expected, hint)
    if gpus > 1:
        raise ConfigError("resources.trainer.gpus", gpus, "0 or 1 for each process of the trainer", hint)


def servers_have_gpus(config: RunConfig) -> None:
    gpus, device = config.resources.inference.gpus, config.resources.device
    if device == "cuda" and not gpus:
        expected = "1 or more with resources.device=cuda: each server needs GPUs"
        raise ConfigError("resources.inference.gpus", gpus, expected, "set it")
    if config.weights_backend == "nccl" and device != "cuda":
        raise ConfigError("inference.backend", "nccl", "gloo with resources.device=cpu", "leave it out")
    if device == "cuda" and config.weights_backend == "gloo" and gpus > 1 and not config.model.lora.travels_alone:
        expected = "1 for a whole model over gloo (inference.backend=gloo), which feeds one process"
        raise ConfigError("resources.inference.gpus", gpus, expected, "set it to 1, or leave inference.backend out")


def shared_gpus_have_room(config: RunConfig) -> None:
    resources, memory = config.resources, config.inference.gpu_memory
    servers_per_gpu = resources.inference.servers_per_gpu
    if servers_per_gpu > 1 and resources.inference.gpus != 1:
        expected = "1 unless each server has exactly one GPU (resources.inference.gpus=1)"
        raise ConfigError("resources.inference.servers_per_gpu", servers_per_gpu, expected, "leave it out")
    if resources.colocate and resources.device == "cpu":
        raise ConfigError("resources.colocate", True, "false with resources.device=cpu", "leave it out")
    if resources.colocate and memory > MAX_COLOCATED_SHARE:
        expected = f"at most {MAX_COLOCATED_SHARE} with resources.colocate, since the trainer needs the rest"
        hint = "--dry-run prints the trainer's memory; 0.4 is a good start"
        raise ConfigError("inference.gpu_memory", memory, expected, hint)
