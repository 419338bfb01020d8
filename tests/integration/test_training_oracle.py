"""The real trainer (FSDP2 over gloo, under torchrun) against a float64 computation that shares no code with it.

Tolerances, float32 against float64: log-probabilities and losses 1e-5, gradients 3e-5 of the largest entry of their
tensor plus 1e-6, parameters after three AdamW steps 5e-6.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.losses import Supervised
from pipeline.training.rows import Row
from tests.integration import oracle
from tests.integration.training_cases import (
    CASES,
    LOSSES,
    MAX_LENGTH,
    MUTATIONS,
    OPTIM,
    STEPS,
    Case,
    Mutation,
    Result,
    make_rows,
    write_model,
)

pytestmark = pytest.mark.integration
SHAPE = oracle.Shape(layers=2, heads=2, groups=1, size=32)
Results = Callable[[int], dict[object, Result]]
TIED = {1: False, 2: True}
"""Whether the head is tied to the embedding, for each number of ranks."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The oracle's tensors are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("models")
    for ranks, tied in TIED.items():
        write_model(folder / str(ranks), tied)
    return {ranks: folder / str(ranks) for ranks in TIED}


@pytest.fixture(scope="module")
def results(models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What 1 or 2 ranks computed, by case or mutation; each world is started when it is first asked for."""
    folder = tmp_path_factory.mktemp("ranks")
    return cache(lambda ranks: run_ranks(models[ranks], ranks, folder / str(ranks)))


def run_ranks(model: Path, ranks: int, results: Path) -> dict[object, Result]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "-m", "tests.integration.training_ranks", str(model), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcome: dict[object, Result] = pickle.loads(results.read_bytes())
    return outcome


@cache
def expected(model: Path, loss: str) -> oracle.Training:
    rows = [plain(row) for row in make_rows()]
    adam = oracle.Adam(OPTIM.lr, OPTIM.beta1, OPTIM.beta2, OPTIM.eps, OPTIM.weight_decay, OPTIM.clip_norm)
    return oracle.train(load_file(model / "model.safetensors"), rows, SHAPE, goal(loss), adam, STEPS)


def goal(loss: str) -> oracle.Goal:
    objective, normalise, temperature = LOSSES[loss]
    if isinstance(objective, Supervised):
        return oracle.Goal("sft", normalise, temperature)
    return oracle.Goal(
        objective.name,
        normalise,
        temperature,
        objective.clip_low,
        objective.clip_high,
        objective.ratio_cap,
        objective.kl,
        objective.kl_estimator,
        objective.entropy,
        MAX_LENGTH,
    )


def plain(row: Row) -> oracle.Sequence64:
    assert row.behaviour is not None
    assert row.reference is not None
    return oracle.Sequence64(
        tokens=row.tokens.tolist(),
        counted=[bool(counted) for counted in row.mask],
        advantages=np.broadcast_to(np.asarray(row.advantages, np.float64), len(row)).tolist(),
        behaviour=row.behaviour.astype(np.float64).tolist(),
        reference=row.reference.astype(np.float64).tolist(),
        prompt=row.prompt,
    )


def compare(result: Result, truth: oracle.Training) -> None:
    """Assert that losses, gradients, norms and parameters agree within the tolerances above."""
    for step in range(STEPS):
        assert result.metrics[step]["loss"] == pytest.approx(truth.losses[step], abs=1e-5, rel=1e-5)
        assert result.metrics[step]["grad_norm"] == pytest.approx(truth.norms[step], rel=1e-4)
        assert set(result.gradients[step]) == set(truth.gradients[step])
        for name, slope in truth.gradients[step].items():
            bound = 1e-6 + 3e-5 * slope.abs().max().item()
            np.testing.assert_allclose(result.gradients[step][name], slope, rtol=0, atol=bound, err_msg=name)
    for name, value in truth.parameters.items():
        np.testing.assert_allclose(result.parameters[name], value, rtol=0, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("ranks", TIED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_and_micro_batches_compute_what_the_oracle_does(
    case: Case, ranks: int, models: dict[int, Path], results: Results
) -> None:
    compare(results(ranks)[case], expected(models[ranks], case.loss))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices(mutation: Mutation, models: dict[int, Path], results: Results) -> None:
    with pytest.raises(AssertionError):
        compare(results(2)[mutation], expected(models[2], MUTATIONS[mutation].loss))


@pytest.mark.parametrize("ranks", TIED)
def test_log_probabilities_come_back_in_the_order_of_the_rows(
    ranks: int, models: dict[int, Path], results: Results
) -> None:
    start = {name: value.double() for name, value in load_file(models[ranks] / "model.safetensors").items()}
    temperature = LOSSES["grpo"][2]
    tables = [oracle.predictions(start, row.tokens.tolist(), SHAPE, temperature) for row in make_rows()]
    for case in CASES:
        if case.loss == "grpo":
            for row, table, found in zip(make_rows(), tables, results(ranks)[case].logprobs, strict=True):
                truth = torch.zeros(len(row), dtype=torch.float64)
                truth[1:] = table[:-1].gather(1, torch.tensor(row.tokens[1:].astype(np.int64))[:, None])[:, 0]
                np.testing.assert_allclose(found, truth * torch.tensor(row.mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_do_not_depend_on_ranks_or_micro_batches(loss: str, results: Results) -> None:
    cases = [case for case in CASES if case.loss == loss]
    for ranks in TIED:
        reference = results(ranks)[cases[0]].metrics[0]
        for case in cases[1:]:
            assert results(ranks)[case].metrics[0] == pytest.approx(reference, rel=1e-4, abs=1e-6)
