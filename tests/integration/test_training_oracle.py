"""The real trainer (FSDP2 over gloo) against a float64 computation that shares no code with it.

Every loss runs on one rank and on two, every switch with a policy and with a critic or adapters, and what combines
shards with replicas, shared lines or experts on four ranks; a case whose every pair of options others have too is left
out. The trial `some` has more of each: every loss packed,
padded and with shared prefixes, and a third of that on four ranks.
Tolerances, float32 against float64 (`training_truth.FLOAT32`): log-probabilities, values and losses 1e-5, gradients
3e-5 of the largest entry of their tensor plus 1e-6 and 3e-5 of their whole length, parameters after three AdamW steps
5e-6 and 2e-5 of the whole way. The full product of all that, compiled layers, and the matrix of families of mixtures ×
what is trained × packing on 1, 2, 4 and 8 ranks, are trials:

    python -m pytest -m trial tests/integration/test_training_oracle.py
    python -m pytest -m trial tests/integration/test_training_oracle.py -k families
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.config import LossConfig
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.loss_specs import ValueLoss
from tests.support.oracle.cases import BALANCED, LAYERS, RECIPES, STEPS, make_rows, write_models
from tests.support.oracle.losses import CLIPPED
from tests.support.oracle.truth import FLOAT32, answers, errors, excess
from tests.support.oracle.ways import (
    MUTATIONS,
    WORLDS,
    Case,
    Mutation,
    Result,
    all_cases,
    cases,
    compiled_cases,
    context_cases,
    family_cases,
    mixture_cases,
    pairs_of,
    suite_candidates,
    suite_cases,
)
from tests.support.ranks import forked_ranks, training_ranks

pytestmark = pytest.mark.integration
Results = Callable[[int], dict[object, Result]]
NEAR = {"rel": 1e-4, "abs": 1e-6}
ALWAYS = {"loss", "grad_norm", "lr", "skipped", "flops"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The oracle's tensors are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the ranks computed, by case or mutation; each world is started when it is first asked for."""
    folder = tmp_path_factory.mktemp("ranks")
    return cache(lambda ranks: run_ranks(models, ranks, folder / str(ranks)))


def run_ranks(
    models: Path, ranks: int, results: Path, choice: str = "suite", seconds: float = 480
) -> dict[object, Result]:
    forked_ranks.run_ranks(ranks, training_ranks.work, models, results, choice, seconds=seconds)
    return training_ranks.read_results(results)


def check(result: Result, models: Path, case: Case, ranks: int) -> None:
    """Assert that the result is the oracle's, and that every switch of the case did something."""
    assert excess(errors(result, case.model(models), case.recipe, case.aux, case.replayed), FLOAT32) == {}
    shards = ranks // case.replicas
    assert result.seen["shards"] == ranks * shards
    assert result.seen["units"] == ranks * (
        (3 if case.layers else 1) + (LAYERS - (case.family in BALANCED) if case.ep > 1 else 0)
    )
    assert result.seen.get("evicted", 0) == (ranks * STEPS if case.offload else 0)
    assert (result.seen["graphs"] > 0) == case.compile
    if not case.compile:
        assert (result.seen.get("recomputed", 0) > 0) == (case.checkpointing != "none")
        if ranks < 4:
            assert (result.seen.get("shared", 0) > 0) == (case.budget.packing == "shared" and case.rows != 1)


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in WORLDS for case in suite_cases(ranks)], ids=str)
def test_ranks_micro_batches_and_switches_compute_what_the_oracle_does(
    case: Case, ranks: int, models: Path, results: Results
) -> None:
    check(results(ranks)[case], models, case, ranks)


def test_the_suite_has_each_pair_of_options_of_its_candidates() -> None:
    chosen = {ranks: suite_cases(ranks) for ranks in WORLDS}
    assert all(set(chosen[ranks]) < set(suite_candidates(ranks)) for ranks in WORLDS)
    covered = {pair for ranks in WORLDS for case in chosen[ranks] for pair in pairs_of(ranks, case)}
    assert covered == {pair for ranks in WORLDS for case in suite_candidates(ranks) for pair in pairs_of(ranks, case)}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices(mutation: Mutation, models: Path, results: Results) -> None:
    result = results(2)[mutation]
    assert result.seen["mutated"] > 0, "the mutation changed nothing"
    case = MUTATIONS[mutation]
    found = excess(errors(result, case.model(models), case.recipe, case.aux, case.replayed), FLOAT32)
    assert {"parameter", "update"} <= set(found)
    assert "answer" not in found, "the forward pass before the mutation was right"


@pytest.mark.parametrize("recipe", RECIPES)
def test_metrics_do_not_depend_on_ranks_micro_batches_or_level(recipe: str, results: Results) -> None:
    whole: dict[str, float] = {}
    levels: Counter[str] = Counter()
    for ranks in WORLDS:
        for case in suite_cases(ranks):
            if case.recipe == recipe and case.tied:
                metrics = results(ranks)[case].metrics[0]
                compared = {name: value for name, value in metrics.items() if not fewer_are_computed(name, case)}
                expected = {name: whole.setdefault(name, value) for name, value in compared.items()}
                assert compared == pytest.approx(expected, **NEAR), case
                assert (set(metrics) == ALWAYS) == (case.level == "none"), case
                assert ("entropy" in metrics) == measures_entropy(case), case
                levels[case.level] += 1
    assert levels.total() >= 3
    assert len(levels) >= 2


def fewer_are_computed(name: str, case: Case) -> bool:
    """Whether the metric counts computed tokens, of which shared prefixes leave fewer."""
    return name == "flops" and case.budget.packing == "shared"


def measures_entropy(case: Case) -> bool:
    """A bonus measures it anyway; a critic has none."""
    objective = RECIPES[case.recipe].objective
    if isinstance(objective, ValueLoss) or case.level == "none":
        return False
    return case.level == "with_entropy" or objective.entropy > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rows_meet_both_sides_of_every_bound(recipe: str, models: Path) -> None:
    """A bound that never binds would be right wherever it is."""
    for values, bound in bounded(recipe, models / "tied"):
        assert (values < bound).any()
        assert (values > bound).any()


def bounded(name: str, model: Path) -> Iterator[tuple[NDArray[np.float64], float]]:
    """What the recipe's loss bounds, of each counted token, with the bound."""
    objective, rows = RECIPES[name].objective, make_rows(name)
    counted = np.concatenate([row.mask for row in rows]).astype(bool)

    def of_rows(values: Sequence[object]) -> NDArray[np.float64]:
        return np.concatenate([np.asarray(value, np.float64) for value in values])[counted]

    given = of_rows(answers(model, name))
    if isinstance(objective, ValueLoss) and objective.clip:
        yield np.abs(given - of_rows([row.values for row in rows])), objective.clip
    if isinstance(objective, LossConfig):
        sampler_logprobs = of_rows([row.sampler_logprobs for row in rows])
        old_logprobs = of_rows([row.old_logprobs for row in rows]) if RECIPES[name].old_logprobs else sampler_logprobs
        if objective.name in (*CLIPPED, "cispo"):
            yield np.exp(given - old_logprobs), 1 - objective.clip_low
            yield np.exp(given - old_logprobs), 1 + objective.clip_high
        if objective.tis != "none":
            yield np.exp(old_logprobs - sampler_logprobs), objective.tis_cap
            yield np.exp(old_logprobs - sampler_logprobs), objective.tis_low
        if objective.sequence_mask:
            parts = [each for each in np.split(old_logprobs - sampler_logprobs, ends_of(rows)) if len(each)]
            yield np.exp(np.abs([each.mean() for each in parts])), 1 + objective.sequence_mask


def ends_of(rows: Sequence[TrainSequence]) -> NDArray[np.int64]:
    """Where each row but the last ends among the counted tokens of all."""
    return np.cumsum([int(row.mask.sum()) for row in rows])[:-1]


@pytest.mark.trial
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", WORLDS)
def test_the_full_product_computes_what_the_oracle_does(ranks: int, models: Path, tmp_path: Path) -> None:
    computed = run_ranks(models, ranks, tmp_path / "results", "all", seconds=2900)
    for case in all_cases(ranks):
        check(computed[case], models, case, ranks)


TRIALS = {
    "some": cases,
    "families": family_cases,
    "mixtures": mixture_cases,
    "context": context_cases,
    "compiled": compiled_cases,
}
"""What a trial of one list of cases is called, and its cases on so many ranks."""


@pytest.mark.trial
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("trial", "ranks"),
    [
        *product(["some"], WORLDS),
        *product(["families"], [*WORLDS, 8]),
        *product(["mixtures"], WORLDS),
        *product(["context"], [2, 4]),
        *product(["compiled"], [1, 2]),
    ],
)
def test_all_cases_of_a_list_compute_what_the_oracle_does(trial: str, ranks: int, models: Path, tmp_path: Path) -> None:
    computed = run_ranks(models, ranks, tmp_path / "results", trial, seconds=1400)
    for case in TRIALS[trial](ranks):
        check(computed[case], models, case, ranks)
