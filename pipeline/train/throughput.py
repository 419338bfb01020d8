"""How fast a trainer is, and how much of its hardware that is.

Owns the figures that follow from a step's tokens and seconds. Must not know models or ranks, and needs torch only to
ask what a CUDA device is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config import RunConfig

PEAKS: Mapping[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "A10": 125e12,
}
"""Dense bf16 FLOP/s by a part of the device's name, the first that fits; from the makers' data sheets."""


def peak_flops(device: str) -> float:
    """Dense bf16 FLOP/s of a CUDA device of this name; 0 where that is not known."""
    words = f" {device.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), 0.0)


@dataclass(frozen=True)
class DeviceSpeed:
    """What trains.

    Attributes:
        processes: of the trainer, over all nodes.
        peak: FLOP/s of one process's device; 0 if it is not known.
    """

    processes: int = 1
    peak: float = 0.0


def rates(metrics: Mapping[str, float], seconds: float, machine: DeviceSpeed) -> dict[str, float]:
    """The speeds of a whole step, from its `tokens/batch`, `tokens/left_out`, `flops` and `seconds/data`; see
    docs/metrics.md.

    `mfu` is the model FLOPs utilization (Chowdhery et al. 2022, PaLM): the fraction of the devices' peak FLOP/s that
    forward and backward passes of the policy use (`pipeline.train.model.model_flops`). Other models, and forward passes
    before the update, do not count.
    """
    speeds = {"seconds/step": seconds}
    if "tokens/batch" in metrics:
        trained = metrics["tokens/batch"] - metrics.get("tokens/left_out", 0.0)
        speeds["tokens_per_second"] = trained / seconds
        speeds["tokens_per_second_per_process"] = speeds["tokens_per_second"] / machine.processes
    if machine.peak and "flops" in metrics:
        speeds["mfu"] = metrics["flops"] / seconds / machine.processes / machine.peak
    if "seconds/data" in metrics:
        speeds["idle/trainer"] = metrics["seconds/data"] / seconds
    return speeds


def machine_of(config: RunConfig) -> DeviceSpeed:
    """The trainer's devices; their peak is 0 on a CPU and on a device that is not in `PEAKS`."""
    trainer = config.resources.trainer
    return DeviceSpeed(trainer.nodes * trainer.processes, _peak(config.resources.device))


def _peak(device: str) -> float:
    if device != "cuda":
        return 0.0
    import torch

    return peak_flops(torch.cuda.get_device_name())
