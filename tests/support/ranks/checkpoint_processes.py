"""What the processes of the tests of checkpoints run: importable by name, so that spawned processes find it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline.checkpoints import TrainerState, newest_checkpoint
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.errors import CheckpointError, DamagedCheckpointError


@contextmanager
def joined() -> Iterator[None]:
    """This process as a member of its world."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small sharded model and its optimizer after one step, so that there are moments to keep."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 13)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tree(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "taken": 17}


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a tree, unsharded, by its place; collective."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": tensor for inner, tensor in whole(value).items()}
        elif isinstance(value, torch.Tensor):
            found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


@joined()
def save_model(rank: int, root: str, folder: Path, step: int) -> None:
    """Commit a model and write its whole tensors beside, as the truth to compare with."""
    tensors = tree(*make_model(seed=1))
    state = TrainerState(job="rl", step=step, ledger=b"ledger of rank %d" % rank)
    checkpoint = save(root, "1-0", state, tensors)
    assert checkpoint.manifest.world_size == dist.get_world_size()
    truth = whole(tensors)
    if rank == 0:
        torch.save(truth, folder / "truth.pt")


@joined()
def load_model(rank: int, root: str, folder: Path) -> None:
    """Load into a model of other values and compare every tensor with the truth, bit for bit."""
    found = newest_checkpoint(root, hashes=True)
    assert found is not None
    model, optimizer = make_model(seed=2)
    tensors = tree(model, optimizer)
    tensors["taken"] = 0
    state = load_shards(found, tensors)
    set_state_dict(model, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
    assert (state.step, state.ledger) == (5, b"ledger of rank 0"), "rank 0's position counts on every rank"
    assert tensors["taken"] == 17
    truth, mine = torch.load(folder / "truth.pt", weights_only=True), whole(tree(model, optimizer))
    assert truth.keys() == mine.keys()
    assert len(truth) > 10
    assert all(torch.equal(truth[name], mine[name]) for name in truth)


@joined()
def load_damaged(rank: int, root: str, folder: Path) -> None:
    """The shards of rank 1 are damaged, which only it reads; both ranks must learn it, from the same words."""
    found = newest_checkpoint(root)
    assert found is not None
    try:
        load_shards(found, {"model": tree(*make_model(seed=2))["model"]})
    except DamagedCheckpointError as error:
        (folder / f"error-{rank}").write_text(str(error))


@joined()
def fail_together(rank: int, root: str, folder: Path) -> None:
    """Rank 1's shard cannot be written; both ranks must learn it, and from the same words."""
    tensors = {"w": torch.ones(3), f"own-{rank}": Unsaveable() if rank == 1 else torch.ones(1)}
    try:
        save(root, "1-0", TrainerState(job="rl", step=1), tensors)
    except CheckpointError as error:
        (folder / f"error-{rank}").write_text(str(error))


@joined()
def fail_on_rank_0(rank: int, root: str, folder: Path) -> None:
    """Rank 0 cannot encode its position, an error of no filesystem; the next save must not be disturbed."""
    for step, ledger in ((1, cast(bytes, object())), (2, b"")):
        try:
            save(root, "1-0", TrainerState(job="rl", step=step, ledger=ledger), {f"own-{rank}": torch.ones(3)})
        except CheckpointError as error:
            (folder / f"error-{rank}").write_text(str(error))


@joined()
def save_and_stop(rank: int, root: str, folder: Path, step: int) -> None:
    """Begin to save, and stop for ever in the middle of writing the shards of rank 0."""
    tensors: dict[str, Any] = {"w": torch.full((64,), float(step))}
    if rank == 0:
        tensors["stop"] = Stop(folder / "reached")
    save(root, "2-0", TrainerState(job="rl", step=step), tensors)


class Unsaveable:
    """Something that cannot be written."""

    def __reduce__(self) -> str:
        raise OSError(28, "No space left on device")


class Stop:
    """Marks that it is being written and never lets that end."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> str:
        self.mark.touch()
        reading, _ = os.pipe()
        os.read(reading, 1)
        raise AssertionError("unreachable: nobody writes into that pipe")
