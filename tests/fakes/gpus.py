"""A machine with GPUs, as its nvidia-smi tells, and claims that are the test's own."""

import os
from pathlib import Path

import pytest

from slurm.agent import gpu_locks


def give_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, *used: int) -> Path:
    """Give this process one GPU of 1,000 MiB for each number, of which so many MiB are used; the folder of claims."""
    tools = folder / "gpu-tools"
    tools.mkdir()
    lines = "".join(f"echo '{index}, GPU-{index}aa, H200, {mib}, 1000'\n" for index, mib in enumerate(used))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_locks, "DEFAULT_FOLDER", folder)
    return gpu_locks.folder_of_this_boot()


def give_capabilities(monkeypatch: pytest.MonkeyPatch, folder: Path, *capabilities: str) -> None:
    """Give this process one free GPU for each compute capability, which its nvidia-smi tells when asked for it."""
    give_gpus(monkeypatch, folder, *(0 for _ in capabilities))
    tool = folder / "gpu-tools" / "nvidia-smi"
    lines = "".join(f"echo '{index}, {each}'\n" for index, each in enumerate(capabilities))
    others = tool.read_text().removeprefix("#!/bin/sh\n")
    tool.write_text(f'#!/bin/sh\ncase "$*" in *compute_cap*)\n{lines}exit;;\nesac\n{others}')
