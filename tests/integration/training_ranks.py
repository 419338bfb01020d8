"""What each process of torchrun runs for `test_training_oracle`: every mutation and every case, by the real dispatch.

torchrun --nproc-per-node N -m tests.integration.training_ranks <model directory> <file for the results>
"""

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from pipeline import packing
from pipeline.packing import Bins, Budget, Layout
from pipeline.training import collate, model, worker
from pipeline.training.attention import Segments
from pipeline.training.dispatch import Dispatch, lead_or_serve
from pipeline.training.ranks import Patience
from pipeline.training.rows import Batch
from pipeline.training.worker import Worker
from tests.integration.training_cases import (
    CASES,
    LOSSES,
    MUTATIONS,
    STEPS,
    Arrays,
    Case,
    Mutation,
    Result,
    make_batch,
    policy_spec,
)


def gradients(rank: Worker) -> Arrays:
    """The accumulated gradients, whole, under Hugging Face names."""
    whole = {name: p.grad.full_tensor() for name, p in rank.model.named_parameters()}  # type: ignore[union-attr]
    return {name.removeprefix("network."): tensor.numpy() for name, tensor in whole.items()}


def set_layer_unit(rank: Worker, parameters: int) -> None:
    worker.LAYER_UNIT = parameters


def run_case(dispatch: Dispatch, path: Path, case: Case, mutation: Mutation | None = None) -> Result:
    objective, _, _ = LOSSES[case.loss]
    batch, result = make_batch(case.loss), Result()
    dispatch._budget = case.budget
    dispatch.pass_through("policy", set_layer_unit, 1 if case.layer_units else 1 << 20)
    dispatch.init_model("policy", policy_spec(path))
    result.logprobs = dispatch.forward("policy", batch)
    if mutation is not None:
        dispatch.pass_through("policy", MUTATE[mutation])
    for _ in range(STEPS):
        metrics = dispatch.forward_backward("policy", batch, objective)
        result.gradients.append(dispatch.pass_through("policy", gradients)[0])
        result.metrics.append(metrics | dispatch.optim_step("policy"))
    result.parameters = {name: tensor.numpy().copy() for name, tensor in dispatch.full_parameters("policy")}
    dispatch.pass_through("policy", restore)
    return result


_mutation = ExitStack()


def patch(target: object, name: str, substitute: object) -> None:
    _mutation.enter_context(mock.patch.object(target, name, substitute))


def restore(rank: Worker) -> None:
    """Undo the mutation."""
    _mutation.close()


def local_normalisation(rank: Worker) -> None:
    """Each micro-batch takes the mean over its own tokens, and the means are averaged."""
    take = Batch.take

    def local(batch: Batch, indices: Sequence[int]) -> Batch:
        part = take(batch, indices)
        return replace(part, weights=tuple(1 / max(1, part.counted) / 6 for _ in part.rows))

    patch(Batch, "take", local)


def dropped_micro_batch(rank: Worker) -> None:
    cut = Dispatch._cut

    def dropping(batch: Batch, shares: list[Bins]) -> list[list[Batch]]:
        first, *others = cut(batch, shares)
        return [[*first[:-1], batch.take([])], *others]

    patch(Dispatch, "_cut", staticmethod(dropping))


def duplicated_shard(rank: Worker) -> None:
    split = packing.split

    def twice(lengths: Sequence[int], ranks: int, budget: Budget) -> list[Bins]:
        return [split(lengths, ranks, budget)[0]] * ranks

    patch(packing, "split", twice)


def averaged_gradients(rank: Worker) -> None:
    for module in rank.model.modules():
        if isinstance(module, worker.FSDPModule):
            module.set_gradient_divide_factor(2.0)


def leaking_attention(rank: Worker) -> None:
    class OneSegment(Segments):
        @classmethod
        def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
            return Segments.of([sum(lengths)], device)

    patch(collate, "Segments", OneSegment)


def wrong_positions(rank: Worker) -> None:
    """Positions restart one token late. (Never restarting is invisible: rotary embeddings see differences only.)"""
    pack = packing.pack

    def late(lengths: Sequence[int]) -> Layout:
        layout = pack(lengths)
        return replace(layout, positions=np.roll(layout.positions, 1))

    patch(packing, "pack", late)


def shifted_targets(rank: Worker) -> None:
    logprobs = model.head_logprobs

    def shifted(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *rest: float) -> object:
        return logprobs(hidden, weight, targets.roll(1), *rest)  # type: ignore[arg-type]

    patch(model, "head_logprobs", shifted)


MUTATE: dict[Mutation, Callable[[Worker], None]] = {
    "local_normalisation": local_normalisation,
    "dropped_micro_batch": dropped_micro_batch,
    "duplicated_shard": duplicated_shard,
    "averaged_gradients": averaged_gradients,
    "leaking_attention": leaking_attention,
    "wrong_positions": wrong_positions,
    "shifted_targets": shifted_targets,
}


def main() -> None:
    path, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)

    def algorithm(dispatch: Dispatch) -> None:
        dispatch.init_model("policy", policy_spec(path))
        outcome: dict[object, Result] = {}
        if dispatch._site.ranks > 1:
            outcome |= {name: run_case(dispatch, path, case, name) for name, case in MUTATIONS.items()}
        outcome |= {case: run_case(dispatch, path, case) for case in CASES}
        results.write_bytes(pickle.dumps(outcome))

    lead_or_serve(algorithm, Budget(96), patience=Patience(operation=30, control=60, grace=2))


if __name__ == "__main__":
    main()
