"""Scenarios of `dispatch_ranks`: clients' models in one commit, and back from it."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from pipeline.api.records import Adapter, Datum, Pass, Step
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.dispatch.saving import forget_models
from pipeline.training.service.commits import ServiceCommits
from pipeline.training.service.models import ServedModels
from pipeline.training.workers import guests
from pipeline.training.workers.shards import gathered
from pipeline.training.workers.worker import ModelWorker
from tests.support.models.jobs import config_of
from tests.support.ranks.dispatch_cases import Scenario

STEP = Step(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)
MODELS = {"a": Adapter(4, seed=1), "b": Adapter(4, seed=2), "c": Adapter(3, mlp=False, seed=3), "whole": Adapter(0)}


def clients_models_go_on_from_a_commit_bit_by_bit(dispatch: Dispatch, path: Path) -> None:
    forget_models(dispatch)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(path)
        models = ServedModels(dispatch, config, Path(folder), "1-0")
        for id, adapter in MODELS.items():
            models.create(id, adapter)
        for at, id in enumerate("abac"):
            train(models, id, at)
        train(models, "whole", 0)
        commits = ServiceCommits(f"{folder}/commits", "1-0", dispatch, 2)
        commits.restore(models, "")
        commits.start(models, dict.fromkeys(MODELS, 7))
        after = [train(models, id, 9) for id in MODELS]  # while the commit is under way
        assert commits.finish() == dict.fromkeys(MODELS, 7)
        forget_models(dispatch)

        restored = ServedModels(dispatch, config, Path(folder), "1-1")
        assert ServiceCommits(f"{folder}/commits", "1-1", dispatch, 2).restore(restored, "") == dict.fromkeys(MODELS, 7)
        assert restored.adapters == MODELS
        assert [train(restored, id, 9) for id in MODELS] == after
        forget_models(dispatch)


def an_adapter_is_put_together_from_any_number_of_ranks(dispatch: Dispatch, path: Path) -> None:
    forget_models(dispatch)
    with tempfile.TemporaryDirectory() as folder:
        models = ServedModels(dispatch, config_of(path), Path(folder), "1-0")
        models.create("a", MODELS["a"])
        train(models, "a", 0)
        (slot, _) = models.place("a")
        for ranks in (1, 2, 3, 5):
            assert all(dispatch.pass_through(slot, comes_back, ranks)), ranks
        forget_models(dispatch)


def comes_back(worker: ModelWorker, ranks: int) -> bool:
    """Whether the adapter on the model is what it was, once it was put together from what so many would have packed."""
    assert worker.optimizer is not None
    before, state = guests.packed(worker, None), worker.optimizer.adamw.state
    trained = [parameter for parameter in worker.model.parameters() if parameter.requires_grad]
    tensors = {part: [state[each][part] for each in trained] for part in guests.MOMENTS} | {"parameters": trained}
    packs: list[dict[str, torch.Tensor]] = [{part: before[part] for part in ("step", "progress")} for _ in range(ranks)]
    for part, each in tensors.items():
        dealt = [deal(gathered(tensor, torch.float32), ranks) for tensor in each]
        for rank, pack in enumerate(packs):
            pack[part] = torch.cat([blocks[rank].reshape(-1) for blocks in dealt])
    alike = guests.empty_packs(worker, ranks)
    assert [{part: each.shape for part, each in pack.items()} for pack in packs] == [
        {part: pack[part].shape for part in packs[0]} for pack in alike
    ]
    guests.admit(worker, seed=99)
    assert not torch.equal(guests.packed(worker, None)["exp_avg"], before["exp_avg"])
    guests.unpack(worker, packs)
    after = guests.packed(worker, None)
    return all(torch.equal(after[part], before[part]) for part in before)


def deal(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The rows of each rank, as `torch.chunk` gives them, and none for those that it leaves out."""
    blocks = tensor.chunk(ranks)
    return [*blocks, *(tensor[:0] for _ in range(ranks - len(blocks)))]


def train(models: ServedModels, id: str, seed: int) -> list[bytes]:
    """One step on data of this seed; what the model says of them before it."""
    tokens = np.random.default_rng(seed).integers(1, 11, 9).astype(np.int32)
    ones = {"weights": np.ones(8, np.float32).tobytes()}
    datum = Datum(tokens[:-1].tobytes(), np.arange(8).tobytes(), tokens[1:].tobytes(), ones)
    said = models.run_pass(id, Pass((datum,), "cross_entropy", {}, backward=True)).logprobs
    models.step(id, STEP)
    return said


SERVED: tuple[Scenario, ...] = (
    clients_models_go_on_from_a_commit_bit_by_bit,
    an_adapter_is_put_together_from_any_number_of_ranks,
)
