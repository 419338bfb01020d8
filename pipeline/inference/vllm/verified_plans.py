"""Which copy plans have been verified against vLLM's own reload, remembered across starts.

Owns the key of a verification, and its file. The check of a plan reloads the model twice, which takes seconds on every
start. Its result depends on nothing but the key's parts: the plan, the model's tensors and their weights' layout, the
releases of vLLM and torch, the settings of vLLM, the GPU, and this project's code of updates. A success is remembered
in vLLM's cache, to which only this user can write (`slurm.agent.tmpdir`); a failure never is.
"""

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import one_line
from pipeline.inference.vllm.copy_plan import CopyPlan, NamedTensors
from pipeline.utils import shared_files
from pipeline.utils.source_digest import source_digest

log = logging.getLogger(__name__)
_CHOICES = re.compile(r"VLLM_.*(USE|MOE|MARLIN|QUANT|FP8|BACKEND|KERNEL)")
"""The names of variables that choose vLLM's kernels, and so the layout of weights in memory."""
_SOURCES = ("pipeline/inference/vllm", "pipeline/inference/weight_sync")


Reload = Callable[[NamedTensors], None]


def difference_from_reload(
    plan: CopyPlan, model: nn.Module, settings: Any, reload: Reload, folder: Path | None = None
) -> str:
    """How a plan differs from vLLM's `reload`; empty if it does not, now or in an earlier start with the same key.

    `settings` is vLLM's `VllmConfig`; `folder` has the records, by default in vLLM's cache. Afterwards the model has
    the constants that loading sets, whether it was verified or not.
    """
    key, folder = plan_key(plan, model, settings), folder or plan_folder()
    if is_verified(key, folder):
        plan.fill_constants()  # as the verification's reload does
        log.info("the copies of the weights were verified in an earlier start: %s", folder / key)
        return ""
    difference = plan.verify_against_reload(model, reload)
    if not difference and (problem := remember(key, folder)):
        log.warning("the next start verifies the copies of the weights again: %s", problem)
    return difference


def plan_key(plan: CopyPlan, model: nn.Module, settings: Any, environment: Mapping[str, str] = os.environ) -> str:
    """A digest of everything that decides whether a plan does what a reload does.

    Any difference in a part gives another key.
    """
    parts = {
        "plan": [[list(part), *_geometry(target)] for part, target in zip(plan.slices, plan.targets, strict=True)],
        "fills": [[*_geometry(target), value] for target, value in plan.fills],
        "layout": plan.layout.plain(),
        "tensors": [[name, *_geometry(tensor)] for name, tensor in _tensors(model)],
        "model": [type(module).__qualname__ for module in model.modules()],
        "settings": settings.compute_hash(),
        "rank": settings.parallel_config.rank,
        "releases": [_release_of_vllm(), torch.__version__],
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type,
        "variables": sorted(item for item in environment.items() if _CHOICES.match(item[0])),
        "sources": source_digest(_SOURCES),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def is_verified(key: str, folder: Path) -> bool:
    """Whether a verification with this key has succeeded before."""
    return (folder / key).is_file()


def remember(key: str, folder: Path) -> str:
    """Record the success of a verification, also from several processes at once.

    Returns why this is not possible; empty if it is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shared_files.write_atomic(folder / key, b"verified\n")
    except OSError as error:
        return one_line(error)
    return ""


def plan_folder() -> Path:
    """The folder of the records: in vLLM's cache, whose compiled code this process executes too."""
    import vllm.envs

    return Path(vllm.envs.VLLM_CACHE_ROOT) / "rollcall-verified-plans"


def _geometry(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _release_of_vllm() -> str:
    vllm = sys.modules.get("vllm")
    return str(getattr(vllm, "__version__", None)) if vllm else ""
