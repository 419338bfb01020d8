"""What the measurements of cold and warm starts share: caches, and the time of a call, divided over its starts."""

import argparse
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu import children

END_SECONDS = 30.0
"""For a start that is told to end."""
CACHES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "CUTE_DSL_CACHE_DIR"),
    *("FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR"),
)
Start = tuple[str, str]
"""A side, and `cold` or `warm`."""


def seconds_of_first(left: float, weights: Sequence[float]) -> float:
    """The seconds of the first of several starts, of those that are `left` for all; its end comes on top."""
    return max(left * weights[0] / sum(weights) - END_SECONDS, 10.0)


def is_empty(caches: Path) -> bool:
    """Whether a folder of caches has no file yet, if it exists."""
    return not any(path.is_file() for path in caches.glob("**/*"))


def with_caches(caches: Path) -> dict[str, str]:
    """This environment, with all compiled code below a folder."""
    return dict(os.environ) | {name: str(caches / name.lower()) for name in CACHES} | {"HF_HUB_OFFLINE": "1"}


def end_at_once(process: subprocess.Popen[bytes]) -> None:
    """End a launcher without a last checkpoint: the second INT says that nothing is waited for."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        if children.wait(process, 2.0) is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            children.wait(process, END_SECONDS)


def gpu_name() -> str:
    """The GPUs and their driver; empty without any."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True, timeout=60).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def command_of(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a measurement as JSON, without the places of what it writes."""
    values = {name: value for name, value in vars(given).items() if name not in ("out", "logs")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
