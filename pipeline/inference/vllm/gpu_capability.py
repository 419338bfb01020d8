"""The compute capability that `inference.quantization=fp8` needs, and that of this machine's GPUs.

vLLM quantizes with `fp8_per_channel`, which rounds activations for each token. Below 8.9 its only kernel is Marlin, for
weights alone, which it refuses for this scheme: `Fp8PtpcOnlineLinearMethod` raises an error while a worker builds the
model (0.32). Imports no vLLM, and does not initialize CUDA.
"""

import re
import subprocess
from collections.abc import Sequence

from pipeline.config import RunConfig
from pipeline.errors import ConfigError

FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with FP8 tensor cores: Ada; Hopper has 9.0."""
_QUERY = ("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader")
_ROW = re.compile(r"(\d+), *(\d+)\.(\d+)")
_PROBE_SECONDS = 20.0
Capability = tuple[int, int]


def check_capability(config: RunConfig, gpus: Sequence[int]) -> None:
    """`ConfigError` for FP8 if one of these GPUs of this machine lacks it.

    Without a working nvidia-smi nothing is known, and vLLM's own error stands.
    """
    if config.inference.quantization == "none":
        return
    known = capabilities()
    for gpu in gpus:
        capability = known.get(gpu, FP8_CAPABILITY)
        if capability < FP8_CAPABILITY:
            major, minor = capability
            expected = f"none on GPU {gpu}, whose compute capability is {major}.{minor}; FP8 needs 8.9 or newer"
            raise ConfigError("inference.quantization", config.inference.quantization, expected, "leave it out")


def capabilities() -> dict[int, Capability]:
    """The compute capability of each GPU of this machine, by nvidia-smi's index; empty without a working nvidia-smi."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = (_ROW.fullmatch(line.strip()) for line in done.stdout.splitlines())
    return {int(row[1]): (int(row[2]), int(row[3])) for row in rows if row}
