"""Scenarios of `dispatch_ranks`: clients' models in one commit, and back from it."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.checkpoints import TrainerState
from pipeline.tinker.tinker_records import Adapter, Datum, Pass, Step
from pipeline.train.controller.model_saving import await_save, forget_models, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model import adapter_swap
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.row_shards import gather
from pipeline.train.service import service_checkpoints as service
from pipeline.train.service.client_models import ServedModels
from pipeline.train.service.service_checkpoints import ServiceCheckpoints
from tests.support.models.jobs import config_of
from tests.support.ranks.dispatch_cases import Scenario

STEP = Step(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)
MODELS = {"a": Adapter(4, seed=1), "b": Adapter(4, seed=2), "c": Adapter(3, mlp=False, seed=3), "whole": Adapter(0)}


def clients_models_go_on_from_a_commit_bit_by_bit(dispatch: RankGroup, path: Path) -> None:
    forget_models(dispatch)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(path)
        models = ServedModels(dispatch, config, Path(folder), "1-0")
        for id, adapter in MODELS.items():
            models.create(id, adapter)
        for at, id in enumerate("abac"):
            train(models, id, at)
        train(models, "whole", 0)
        commits = ServiceCheckpoints(f"{folder}/commits", "1-0", dispatch, 2)
        commits.restore(models, "")
        together = needed_at_once(dispatch, lambda: commits.start(models, dict.fromkeys(MODELS, 7)))
        assert together == 1, "there may be room for one base only"
        after = [[train(models, id, seed) for seed in (9, 10)] for id in MODELS]  # while the commit is under way
        assert commits.finish() == dict.fromkeys(MODELS, 7)
        forget_models(dispatch)

        restored = ServedModels(dispatch, config, Path(folder), "1-1")
        assert ServiceCheckpoints(f"{folder}/commits", "1-1", dispatch, 2).restore(restored, "") == dict.fromkeys(
            MODELS, 7
        )
        assert restored.adapters == MODELS
        # What the model says before the second step comes from the moments that were restored.
        assert [[train(restored, id, seed) for seed in (9, 10)] for id in MODELS] == after
        forget_models(dispatch)


def needed_at_once(dispatch: RankGroup, act: Callable[[], None]) -> int:
    """The most models that an operation needed on the device while something was done."""
    counts, stock = [0], dispatch.run_on_all_models
    with pytest.MonkeyPatch.context() as patch:

        def run_on_all_models(*args: Any, **kwargs: Any) -> list[Any]:
            counts.append(len(kwargs.get("needs", ())))
            return stock(*args, **kwargs)

        patch.setattr(dispatch, "run_on_all_models", run_on_all_models)
        act()
    return max(counts)


def an_adapter_comes_back_from_what_any_number_of_ranks_committed(dispatch: RankGroup, path: Path) -> None:
    for ranks in (1, 5):  # as many as there are now: the scenario before
        forget_models(dispatch)
        with tempfile.TemporaryDirectory() as folder:
            models = ServedModels(dispatch, config_of(path), Path(folder), "1-0")
            models.create("a", MODELS["a"])
            train(models, "a", 0)
            staged = dispatch.run_on_all_models(stage_as, models.location("a")[0], ranks, needs={})
            parts, before = staged[0][0], [mine for _, mine in staged]
            known = {"a": service._Model(MODELS["a"], 7, ranks)}
            state = TrainerState(job="serve", step=1, models=("a",), served=msgspec.msgpack.encode(known))
            start_save(dispatch, f"{folder}/commits", "1-0", state, parts, 2)
            await_save(dispatch, "the commit")
            forget_models(dispatch)

            restored = ServedModels(dispatch, config_of(path), Path(folder), "1-1")
            commits = ServiceCheckpoints(f"{folder}/commits", "1-1", dispatch, 2)
            assert commits.restore(restored, "") == {"a": 7}
            assert all(dispatch.run_on_all_models(is_as, restored.location("a")[0], before, needs={})), ranks
    forget_models(dispatch)


def stage_as(site: RankState, name: str, ranks: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Stage the adapter on the model as so many ranks would have packed it; the parts, and what this rank packs."""
    worker = site.worker(name)
    packs = dealt(worker, ranks)
    assert [shapes_of(pack) for pack in packs] == [shapes_of(pack) for pack in adapter_swap.empty_packs(worker, ranks)]
    for vector in adapter_swap.VECTORS:
        mine = {f"rank-{i}": pack[vector] for i, pack in enumerate(packs) if i % site.ranks == site.rank}
        site.saver.stage(f"a/{vector}", mine)
    return [f"a/{vector}" for vector in adapter_swap.VECTORS], here(worker)


def dealt(worker: ModelWorker, ranks: int) -> list[dict[str, torch.Tensor]]:
    """What each of so many ranks would pack of the adapter on the model."""
    assert worker.optimizer is not None
    state = worker.optimizer.adamw.state
    trained = [parameter for parameter in worker.model.parameters() if parameter.requires_grad]
    tensors = {part: [state[each][part] for each in trained] for part in adapter_swap.MOMENTS} | {"parameters": trained}
    alike = {part: adapter_swap.packed(worker, None, part) for part in ("step", "progress")}
    packs: list[dict[str, torch.Tensor]] = [dict(alike) for _ in range(ranks)]
    for part, each in tensors.items():
        blocks = [deal(gather(tensor, torch.float32, worker.group), ranks) for tensor in each]
        for rank, pack in enumerate(packs):
            pack[part] = torch.cat([rows[rank].reshape(-1) for rows in blocks])
    return packs


def here(worker: ModelWorker) -> dict[str, torch.Tensor]:
    return {vector: adapter_swap.packed(worker, None, vector) for vector in adapter_swap.VECTORS}


def is_as(site: RankState, name: str, before: list[dict[str, torch.Tensor]]) -> bool:
    """Whether this rank has of the adapter what it had."""
    now = here(site.worker(name))
    return all(torch.equal(now[vector], before[site.rank][vector]) for vector in adapter_swap.VECTORS)


def shapes_of(pack: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {vector: pack[vector].shape for vector in adapter_swap.VECTORS}


def deal(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The rows of each rank, as `torch.chunk` gives them, and none for those that it leaves out."""
    blocks = tensor.chunk(ranks)
    return [*blocks, *(tensor[:0] for _ in range(ranks - len(blocks)))]


def train(models: ServedModels, id: str, seed: int, step: Step = STEP) -> list[bytes]:
    """One step on data of this seed; what the model says of them before it."""
    tokens = np.random.default_rng(seed).integers(1, 11, 9).astype(np.int32)
    ones = {"weights": np.ones(8, np.float32).tobytes()}
    datum = Datum(tokens[:-1].tobytes(), np.arange(8).tobytes(), tokens[1:].tobytes(), ones)
    said = models.run_pass(id, Pass((datum,), "cross_entropy", {}, backward=True)).logprobs
    models.step(id, step)
    return said


SERVED: tuple[Scenario, ...] = (
    clients_models_go_on_from_a_commit_bit_by_bit,
    an_adapter_comes_back_from_what_any_number_of_ranks_committed,
)
