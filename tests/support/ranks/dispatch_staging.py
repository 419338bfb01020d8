"""Scenarios of `dispatch_ranks`: rows that stay on the ranks, models with replicas, and models that answer together."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model.model_worker import ModelWorker
from tests.support.oracle.cases import VOCABULARY, make_rows, policy_spec
from tests.support.ranks.dispatch_cases import GRPO, OPTIM, PATIENCE, Scenario, fresh, parameters, refusal, step
from tests.support.ranks.training_ranks import gradients

PARTS = ([0, 3, 8], [1, 2, 4, 5, 6, 7])


def staged_rows_train_as_those_that_travel(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    parts = [batch.take(part) for part in PARTS]
    told = [dispatch.forward_backward("policy", part, GRPO) for part in parts]
    (whole, _) = dispatch.run_on_ranks("policy", gradients)
    fresh(dispatch, path)
    staged = dispatch.stage(parts)
    assert [dispatch.forward_backward("policy", each, GRPO) for each in staged.batches] == told
    (again, _) = dispatch.run_on_ranks("policy", gradients)
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
    dispatch.unstage(staged)


def the_first_ratio_of_amended_rows_is_exactly_one(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    staged = dispatch.stage([batch.take(part) for part in PARTS])
    old = [dispatch.forward("policy", each) for each in staged.batches]
    before = [dispatch.forward_backward("policy", each, GRPO) for each in staged.batches]
    assert all(metrics["log_ratio_max"] > 0.1 for metrics in before)
    dispatch.set_column(staged, "old_logprobs", old)
    for each in staged.batches:
        assert dispatch.forward_backward("policy", each, GRPO)["log_ratio_max"] == 0
    dispatch.optim_step("policy")
    assert dispatch.forward_backward("policy", staged[0], GRPO)["log_ratio_max"] > 0
    dispatch.unstage(staged)


def amended_rows_are_those_with_the_column_from_the_start(dispatch: RankGroup, path: Path) -> None:
    rows = make_rows("grpo")
    draw = np.random.default_rng(8)
    columns = [draw.normal(size=len(row)).astype(np.float32) for row in rows]
    fresh(dispatch, path)
    whole = Batch.of(
        [TrainSequence(r.tokens, r.mask, a, r.sampler_logprobs) for r, a in zip(rows, columns, strict=True)]
    )
    expected = dispatch.forward_backward("policy", whole, GRPO)
    staged = dispatch.stage(
        [Batch.of([TrainSequence(row.tokens, row.mask, 1.0, row.sampler_logprobs) for row in rows])]
    )
    assert dispatch.forward_backward("policy", staged[0], GRPO) != expected
    dispatch.set_column(staged, "advantages", [columns])
    assert dispatch.forward_backward("policy", staged[0], GRPO) == expected
    dispatch.unstage(staged)


def stagings_do_not_mind_each_other_and_leave_nothing(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    expected = dispatch.forward("policy", batch)
    first, second = (dispatch.stage([batch.take(part)]) for part in PARTS)
    dispatch.unstage(first)
    for part, row in zip(PARTS[1], dispatch.forward("policy", second[0]), strict=True):
        np.testing.assert_allclose(row, expected[part], rtol=0, atol=1e-5)
    assert "staged no longer" in refusal(lambda: dispatch.forward("policy", first[0]))
    assert "staged no longer" in refusal(lambda: dispatch.set_column(first, "advantages", []))
    assert "staged no longer" in refusal(lambda: dispatch.unstage(first))
    assert dispatch.run_on_all_models(count_staged) == [1, 1]
    dispatch.unstage(second)
    assert dispatch.run_on_all_models(count_staged) == [0, 0]


def count_staged(site: RankState) -> int:
    return len(site.staged)


def bad_rows_are_not_staged_and_bad_columns_change_nothing(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    long = TrainSequence(np.zeros(97, np.int32), np.zeros(97, np.uint8))
    foreign = TrainSequence(np.array([1, VOCABULARY], np.int32), np.array([0, 1], np.uint8))
    for row, said in ((long, "batch 1: row 1 has 97 tokens"), (foreign, "batch 1: row 1 has a token outside")):
        bad = Batch.of([TrainSequence(np.zeros(2, np.int32), np.zeros(2, np.uint8)), row])
        assert said in refusal(lambda bad=bad: dispatch.stage([batch, bad]))
    assert dispatch.run_on_all_models(count_staged) == [0, 0]
    staged = dispatch.stage([batch])
    expected = dispatch.forward_backward("policy", staged[0], GRPO)
    columns = [np.ones(len(row), np.float32) for row in batch.rows]
    columns[6][2] = np.nan
    assert "batch 0: row 6: advantages holds a value that is not finite" in refusal(
        lambda: dispatch.set_column(staged, "advantages", [columns])
    )
    assert dispatch.forward_backward("policy", staged[0], GRPO) == expected
    dispatch.unstage(staged)


def rows_are_not_staged_before_there_is_a_model(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    dispatch.remove_model("policy")
    assert "there is none yet: init_model first" in refusal(lambda: dispatch.stage([batch]))
    assert dispatch.run_on_all_models(count_staged) == [0, 0]


def nothing_to_train_is_no_error(dispatch: RankGroup, path: Path) -> None:
    fresh(dispatch, path)
    assert dispatch.forward("policy", Batch.of([])) == []
    assert dispatch.forward_backward("policy", Batch.of([]), GRPO)["loss"] == 0


def replicas_train_as_one_model_and_stay_equal_to_the_last_bit(dispatch: RankGroup, path: Path) -> None:
    """Two replicas of a model in one shard against one model in two shards."""
    batch = fresh(dispatch, path)
    expected = dispatch.forward("policy", batch)
    told = [step(dispatch, batch) for _ in range(3)]
    ended = parameters(dispatch)
    dispatch.init_model("policy", policy_spec(path, optim=OPTIM, steps=10, dp_replicate=2))
    assert dispatch.run_on_ranks("policy", shards) == [1, 1]
    for row, answer in zip(expected, dispatch.forward("policy", batch), strict=True):
        np.testing.assert_allclose(answer, row, rtol=0, atol=1e-5)
    for metrics in told:
        assert step(dispatch, batch) == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    for name, tensor in parameters(dispatch).items():
        torch.testing.assert_close(tensor, ended[name], rtol=1e-3, atol=1e-4)
    first, second = dispatch.run_on_all_models(own_parameters)
    assert first.keys() == ended.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def own_parameters(site: RankState) -> dict[str, NDArray[np.float32]]:
    return {name: tensor.numpy() for name, tensor in site.worker("policy").full_parameters()}


def shards(worker: ModelWorker) -> int:
    """Over how many ranks the model is sharded."""
    return next(p.device_mesh["dp_shard"].size() for p in worker.model.parameters() if isinstance(p, DTensor))


def models_of_other_meshes_take_the_same_staged_rows(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    staged = dispatch.stage([batch])
    dispatch.init_model("reference", policy_spec(path, optim=None, dp_replicate=2))
    answers = dispatch.forward_models(["policy", "reference"], staged[0])
    for one, other in zip(answers["policy"], answers["reference"], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert "as many replicas" in refusal(lambda: dispatch.copy_parameters("policy", "reference"))
    dispatch.unstage(staged)
    dispatch.remove_model("reference")
    assert "expected a divisor of 2 ranks" in refusal(
        lambda: dispatch.init_model("reference", policy_spec(path, dp_replicate=3))
    )


def models_that_answer_together_answer_as_alone(dispatch: RankGroup, path: Path) -> None:
    batch = three_models(dispatch, path)
    staged = dispatch.stage([batch])
    for data in (batch, staged[0]):
        alone = {name: dispatch.forward(name, data) for name in THREE}
        (only,) = dispatch.forward_models(["policy"], data).values()
        assert all(np.array_equal(a, b) for a, b in zip(only, alone["policy"], strict=True))
        for _ in range(5):
            together = dispatch.forward_models(THREE, data)
            assert list(together) == list(THREE)
            for name in THREE:
                assert all(np.array_equal(a, b) for a, b in zip(together[name], alone[name], strict=True))
    dispatch.unstage(staged)
    leave_policy(dispatch)


def models_that_answer_together_compute_at_the_same_time(dispatch: RankGroup, path: Path) -> None:
    """None of them ends before all have begun."""
    batch = three_models(dispatch, path)
    dispatch.run_on_all_models(meet_in_forward)
    try:
        dispatch.forward_models(THREE, batch)
    finally:
        dispatch.run_on_all_models(restore)
    leave_policy(dispatch)


def a_model_that_fails_beside_others_is_reported(dispatch: RankGroup, path: Path) -> None:
    batch = three_models(dispatch, path)
    dispatch.run_on_all_models(fail_in_forward)
    try:
        text = refusal(lambda: dispatch.forward_models(THREE, batch))
    finally:
        dispatch.run_on_all_models(restore)
    assert "RuntimeError: the critic is out of sorts" in text.splitlines()[0]
    assert text.startswith("forward_models failed on rank ")
    dispatch.forward_models(THREE, batch)
    leave_policy(dispatch)


THREE = ("policy", "reference", "critic")


def three_models(dispatch: RankGroup, path: Path) -> Batch:
    batch = fresh(dispatch, path)
    dispatch.init_model("reference", policy_spec(path, optim=None))
    dispatch.init_model("critic", policy_spec(path, kind="critic", optim=OPTIM))
    dispatch.run_on_ranks("critic", give_values)
    return batch


def give_values(critic: ModelWorker) -> None:
    """A head that is not zero."""
    with torch.no_grad():
        for name, parameter in critic.model.named_parameters():
            if name.startswith("head."):
                parameter.fill_(0.1)


def leave_policy(dispatch: RankGroup) -> None:
    for name in THREE[1:]:
        dispatch.remove_model(name)
    assert set(dispatch.models) == {"policy"}


_patches = ExitStack()


def patch_forward(substitute: Callable[..., object]) -> None:
    _patches.enter_context(mock.patch.object(ModelWorker, "forward", substitute))


def restore(site: RankState) -> None:
    _patches.close()


def meet_in_forward(site: RankState) -> None:
    together, forward = threading.Barrier(len(THREE)), ModelWorker.forward

    def meeting(worker: ModelWorker, *args: Any) -> object:
        together.wait(timeout=PATIENCE.operation / 2)
        return forward(worker, *args)

    patch_forward(meeting)


def fail_in_forward(site: RankState) -> None:
    forward = ModelWorker.forward

    def failing(worker: ModelWorker, *args: Any) -> object:
        if worker is site.worker("critic"):
            raise RuntimeError("the critic is out of sorts")
        return forward(worker, *args)

    patch_forward(failing)


STAGING: tuple[Scenario, ...] = (
    staged_rows_train_as_those_that_travel,
    the_first_ratio_of_amended_rows_is_exactly_one,
    amended_rows_are_those_with_the_column_from_the_start,
    stagings_do_not_mind_each_other_and_leave_nothing,
    bad_rows_are_not_staged_and_bad_columns_change_nothing,
    rows_are_not_staged_before_there_is_a_model,
    nothing_to_train_is_no_error,
    replicas_train_as_one_model_and_stay_equal_to_the_last_bit,
    models_of_other_meshes_take_the_same_staged_rows,
    models_that_answer_together_answer_as_alone,
    models_that_answer_together_compute_at_the_same_time,
    a_model_that_fails_beside_others_is_reported,
)
