"""What each rank runs for `test_trainer_mesh`: the same steps on meshes with and without replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoints import Fence, TrainerState, newest_committed
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.lead_or_serve import lead_or_serve
from pipeline.train.controller.model_saving import await_save, load_models, stage_models, start_save
from pipeline.train.controller.rank_group import Dispatch
from pipeline.train.controller.rank_process import Deadlines, Site
from pipeline.train.model.cpu_offload import local
from tests.support.oracle.cases import make_batch, policy_spec
from tests.support.ranks.dispatch_cases import BUDGET, OPTIM, parameters, step

PATIENCE = Deadlines(operation=60, control=120, grace=2)
Shards = dict[str, NDArray[np.float32]]


def work(rank: int, model: Path, folder: Path) -> None:
    lead_or_serve(lambda dispatch: compare_meshes(dispatch, model, folder), BUDGET, device="cpu", patience=PATIENCE)


def compare_meshes(dispatch: Dispatch, model: Path, folder: Path) -> None:
    """Four ranks: sharded over all of them, and in two replicas of two shards; then from each mesh to the other."""
    batch = make_batch("grpo")
    make(dispatch, model, 1)
    plain = [step(dispatch, batch) for _ in range(3)]
    wanted = parameters(dispatch)
    make(dispatch, model, 2)
    assert [worker["replica"] for worker in dispatch.on_sites(place)] == [0, 0, 1, 1]
    for metrics in plain:
        found = step(dispatch, batch)
        np.testing.assert_allclose([found[key] for key in metrics], list(metrics.values()), rtol=1e-4, atol=1e-6)
    for name, tensor in parameters(dispatch).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)
    assert_replicas_are_equal(dispatch)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-one", replicas=1)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-two", replicas=2)


def make(dispatch: Dispatch, model: Path, replicas: int) -> None:
    dispatch.init_model("policy", policy_spec(model, optim=OPTIM, steps=10, dp_replicate=replicas))


def resume_on_another_mesh(dispatch: Dispatch, model: Path, batch: Batch, folder: Path, replicas: int) -> None:
    """Save, make the model on the other mesh, load: the same bits, and the next step is the same within rounding."""
    save(dispatch, str(folder))
    saved, after = parameters(dispatch), step(dispatch, batch)
    make(dispatch, model, replicas)
    checkpoint = newest_committed(str(folder))
    assert checkpoint is not None
    load_models(dispatch, checkpoint, ["policy"])
    for name, tensor in parameters(dispatch).items():
        assert torch.equal(tensor, saved[name]), name
    found = step(dispatch, batch)
    np.testing.assert_allclose([found[key] for key in after], list(after.values()), rtol=1e-4, atol=1e-6)
    if replicas > 1:
        assert_replicas_are_equal(dispatch)


def save(dispatch: Dispatch, root: str) -> None:
    Fence(root, "1-0").claim()
    parts = stage_models(dispatch, ["policy"])
    start_save(dispatch, root, "1-0", TrainerState(job="rl", step=1, models=("policy",)), parts, 2)
    await_save(dispatch, "the checkpoint")
    dispatch.saver.result()


def assert_replicas_are_equal(dispatch: Dispatch) -> None:
    """To the last bit: parameters and moments of ranks 0 and 2, and of 1 and 3."""
    shards: list[Shards] = dispatch.on_sites(own_shards, needs={"policy": "save_checkpoint"})
    for first, second in ((shards[0], shards[2]), (shards[1], shards[3])):
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)


def own_shards(site: Site) -> Shards:
    worker = site.worker("policy")
    assert worker.optimizer is not None
    tensors = {name: parameter.detach() for name, parameter in worker.model.named_parameters()}
    tensors |= {f"moment {number}": moment for number, moment in enumerate(worker.optimizer.moments())}
    return {name: local(tensor).cpu().numpy().copy() for name, tensor in tensors.items()}


def place(site: Site) -> dict[str, Any]:
    return {"replica": site.worker("policy").replica}
