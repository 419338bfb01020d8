"""What each rank runs for the trial of `test_trainer_mesh` that loads the checkpoint of each mesh on each mesh."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.checkpoints import newest_checkpoint
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.model_saving import load_models
from pipeline.train.controller.rank_group import RankGroup
from tests.support.oracle.cases import make_batch
from tests.support.ranks.dispatch_cases import BUDGET, parameters, step
from tests.support.ranks.mesh_ranks import PATIENCE, assert_equal, make, save

Mesh = dict[str, int]
WORLDS = (1, 2, 4, 8)


def meshes(ranks: int, mixture: bool) -> list[Mesh]:
    """All meshes of so many ranks, with two ranks at most of a context, and of a mixture with each number of `ep`."""
    return [
        {"dp_replicate": replicas, "cp": cp, "ep": ep}
        for replicas in (1, 2, 4)
        for cp in (1, 2)
        for ep in ((1, 2, 4, 8) if mixture else (1,))
        if ranks % (replicas * cp) == 0 and (ranks // replicas) % ep == 0
    ]


def name_of(ranks: int, mesh: Mesh) -> str:
    return "-".join([str(ranks), *map(str, mesh.values())])


def work(rank: int, ranks: int, model: Path, folder: Path, mixture: bool, saves: bool) -> None:
    """Save a checkpoint on each mesh of this world, or load all that there are on each."""

    def lead(dispatch: RankGroup) -> None:
        for mesh in meshes(ranks, mixture):
            make(dispatch, model, **mesh)
            if saves:
                save_after_a_step(dispatch, folder / name_of(ranks, mesh))
            else:
                load_each(dispatch, folder, name_of(ranks, mesh))

    run_controller_or_worker(lead, BUDGET, device="cpu", patience=PATIENCE)


def save_after_a_step(dispatch: RankGroup, folder: Path) -> None:
    """Leaves the checkpoint, all parameters, and the metrics of the step after it."""
    next_step(dispatch)
    save(dispatch, str(folder))
    torch.save(parameters(dispatch), folder / "parameters.pt")
    (folder / "next.json").write_text(json.dumps(next_step(dispatch)))


def next_step(dispatch: RankGroup) -> dict[str, float]:
    """The metrics of a step; not its FLOPs, since ranks that share a group compute its prompt each."""
    metrics = step(dispatch, make_batch("grpo"))
    return {name: value for name, value in metrics.items() if name != "flops"}


def load_each(dispatch: RankGroup, folder: Path, here: str) -> None:
    """The loaded bits are the saved ones, and the next step is the same within rounding, so moments are too."""
    for saved in sorted(folder.iterdir()):
        checkpoint = newest_checkpoint(str(saved))
        assert checkpoint is not None
        load_models(dispatch, checkpoint, ["policy"])
        assert_equal(parameters(dispatch), torch.load(saved / "parameters.pt"))
        found, wanted = next_step(dispatch), json.loads((saved / "next.json").read_text())
        numbers: list[Any] = [found[key] for key in wanted]
        np.testing.assert_allclose(
            numbers, list(wanted.values()), rtol=1e-4, atol=1e-6, err_msg=f"{saved.name} on {here}"
        )
