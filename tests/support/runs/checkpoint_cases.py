"""Checkpoints of a few numbers for tests: how one is made, what is found, and how a file of one is damaged."""

from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import Checkpoint, TrainerState, newest_checkpoint
from pipeline.checkpoints.sharded_state import save

Tree = dict[str, Any]


def tensors(value: float) -> Tree:
    return {"model": {"w": torch.full((4, 3), value), "b": torch.full((3,), -value)}, "taken": int(value)}


def commit(root: str, step: int, attempt: str = "1-0", job: Any = "rl") -> Checkpoint:
    return save(root, attempt, TrainerState(job=job, step=step, ledger=b"x" * step), tensors(float(step)))


def newest_step(root: str, **options: bool) -> int | None:
    found = newest_checkpoint(root, **options)
    return found.manifest.step if found else None


def checkpoint_names(root: str) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir() if path.is_dir())


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def changed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
