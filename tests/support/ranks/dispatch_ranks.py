"""What each rank runs for `test_dispatch`: scenarios on the controller, each with its own assertions.

    torchrun --nproc-per-node 2 -m tests.support.ranks.dispatch_ranks <model directory> <file for the results> [names]

Writes what became of each scenario: None, or the traceback. A `breakage` ends the world, so it is the only one.
"""

import copy
import json
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.config import OptimConfig
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.overflow_retries import MAX_OVERFLOWS, train_batch
from pipeline.train.loss_specs import SFT
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.models import build_model
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.waiting import wait_for
from tests.support.oracle.cases import VOCABULARY, make_batch, make_rows, model_config
from tests.support.ranks.dispatch_cases import BUDGET, GRPO, OPTIM, PATIENCE, Scenario, fresh, parameters, refusal, step
from tests.support.ranks.dispatch_residency import RESIDENCY
from tests.support.ranks.dispatch_staging import STAGING
from tests.support.ranks.served_commits import SERVED
from tests.support.ranks.training_ranks import gradients

_saved: dict[str, Any] = {}


def calls_accumulate_until_the_step(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    dispatch.forward_backward("policy", batch, GRPO)
    (whole, _) = dispatch.run_on_ranks("policy", gradients)
    fresh(dispatch, path)
    for part in ([0, 5, 7], [1, 2, 3, 4, 6, 8, 9]):
        dispatch.forward_backward("policy", batch.take(part), GRPO)
    (added, _) = dispatch.run_on_ranks("policy", gradients)
    for name, slope in whole.items():
        np.testing.assert_allclose(added[name], slope, rtol=1e-4, atol=1e-6, err_msg=name)


def a_loss_weight_multiplies_the_gradient_but_not_the_metric(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    plain = dispatch.forward_backward("policy", batch, GRPO)
    (whole, _) = dispatch.run_on_ranks("policy", gradients)
    fresh(dispatch, path)
    weighted = dispatch.forward_backward("policy", batch, GRPO, loss_weight=0.25)
    (quarter, _) = dispatch.run_on_ranks("policy", gradients)
    assert weighted == plain
    for name, slope in whole.items():
        np.testing.assert_allclose(quarter[name], slope / 4, rtol=1e-5, atol=1e-8, err_msg=name)


def a_gradient_that_is_not_finite_skips_the_step(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    before = parameters(dispatch)
    rows = [TrainSequence(row.tokens, row.mask, 3e38, row.sampler_logprobs, row.reference) for row in make_rows()]
    dispatch.forward_backward("policy", Batch.of(rows, "token"), GRPO, loss_weight=100.0)
    assert dispatch.optim_step("policy")["skipped"] == 1
    after = parameters(dispatch)
    assert all(torch.equal(after[name], before[name]) for name in before)
    dispatch.forward_backward("policy", batch, GRPO)
    assert dispatch.optim_step("policy")["skipped"] == 0
    assert dispatch.run_on_ranks("policy", progress) == [{"taken": 1, "skipped": 1}] * 2


def a_batch_whose_float16_gradients_overflow_is_trained_at_a_smaller_scale(dispatch: RankGroup, path: Path) -> None:
    """As by a model that began at that scale, to the last bit, staged or not."""
    batch, half = make_batch("grpo"), model_config(path).model_copy(update={"dtype": "float16"})
    spec = ModelSpec("policy", half, OPTIM, steps=10, loss_scale=1 << 18)
    dispatch.init_model("policy", spec)
    first = train_batch(dispatch, "policy", batch, GRPO)
    assert (first["skipped"], first["overflows"]) == (0, 2)
    assert first["loss_scale"] == (1 << 18) / 2 ** first["overflows"]
    state = dispatch.run_on_ranks("policy", progress)
    assert (
        state == [{"taken": 1, "skipped": first["overflows"], "loss_scale": first["loss_scale"], "good_steps": 1}] * 2
    )
    after = parameters(dispatch)

    dispatch.init_model("policy", replace(spec, loss_scale=int(first["loss_scale"])))
    one_pass = {"overflows": 0.0, "flops": first["flops"] / 3}
    assert train_batch(dispatch, "policy", batch, GRPO) == first | one_pass
    assert_equal(parameters(dispatch), after)

    dispatch.init_model("policy", spec)
    staged = dispatch.stage([batch])
    assert train_batch(dispatch, "policy", staged[0], GRPO) == first
    dispatch.unstage(staged)
    assert_equal(parameters(dispatch), after)


def a_batch_that_overflows_at_every_scale_is_left_out_after_a_few(dispatch: RankGroup, path: Path) -> None:
    half = model_config(path).model_copy(update={"dtype": "float16"})
    dispatch.init_model("policy", ModelSpec("policy", half, OPTIM, steps=10, loss_scale=1 << 24))
    before = parameters(dispatch)
    metrics = train_batch(dispatch, "policy", make_batch("grpo"), GRPO)
    assert (metrics["skipped"], metrics["overflows"], metrics["loss_scale"]) == (1, MAX_OVERFLOWS, 1 << 21)
    assert_equal(parameters(dispatch), before)
    assert dispatch.run_on_ranks("policy", progress)[0] == {
        "taken": 0,
        "skipped": MAX_OVERFLOWS,
        "loss_scale": 1 << 20,
        "good_steps": 0,
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def progress(worker: ModelWorker) -> dict[str, int]:
    return worker.optimizer.progress()


def a_step_without_gradients_is_refused(dispatch: RankGroup, path: Path) -> None:
    fresh(dispatch, path)
    assert "call forward_backward first" in refusal(lambda: dispatch.optim_step("policy"))


def random_weights_depend_on_the_seed_alone(dispatch: RankGroup, path: Path) -> None:
    random = model_config(path).model_copy(update={"init": "random"})
    dispatch.init_model("policy", ModelSpec("policy", random, OPTIM, steps=10, seed=7))
    found = parameters(dispatch)
    alone = dict(build_model(random, seed=7).network.named_parameters())
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], alone[name]) for name in found)
    other = dict(build_model(random, seed=8).network.named_parameters())
    assert not torch.equal(
        found["model.norm.weight"] + other["model.embed_tokens.weight"][0], alone["model.norm.weight"]
    )


def a_tied_head_is_sent_once_as_the_embedding(dispatch: RankGroup, path: Path) -> None:
    fresh(dispatch, path)
    found, stored = parameters(dispatch), load_file(path / "model.safetensors")
    assert found.keys() == stored.keys()
    assert "lm_head.weight" not in found
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def an_abandoned_transfer_leaves_the_ranks_together(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    for _ in dispatch.full_parameters("policy"):
        break
    assert len(dispatch.forward("policy", batch)) == len(batch.rows)


def nothing_runs_in_the_middle_of_a_transfer(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    transfer = dispatch.full_parameters("policy")
    next(transfer)
    assert "full_parameters is still running" in refusal(lambda: dispatch.forward("policy", batch))
    transfer.close()
    dispatch.forward("policy", batch)


def an_export_is_a_model_that_transformers_loads(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    dispatch.forward_backward("policy", batch, GRPO)
    dispatch.optim_step("policy")
    target = path.parent / "export"
    dispatch.save_hf_model("policy", target)
    assert (target / "tokenizer.json").read_text() == (path / "tokenizer.json").read_text()
    network = AutoModelForCausalLM.from_pretrained(target)
    for row, found in zip(batch.rows, dispatch.forward("policy", batch), strict=True):
        logits = network(torch.tensor(row.tokens[None].astype(np.int64))).logits[0, :-1] / batch.temperature
        truth = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens[1:, None].astype(np.int64)))[:, 0].detach()
        np.testing.assert_allclose(found[1:], truth * torch.tensor(row.mask[1:]), rtol=0, atol=1e-5)


def a_loaded_state_continues_bit_by_bit(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    step(dispatch, batch)
    dispatch.run_on_ranks("policy", remember)
    first = [step(dispatch, batch), step(dispatch, batch)]
    ended = parameters(dispatch)
    fresh(dispatch, path)
    dispatch.run_on_ranks("policy", recall)
    assert [step(dispatch, batch), step(dispatch, batch)] == first
    again = parameters(dispatch)
    assert all(torch.equal(again[name], ended[name]) for name in ended)


def remember(worker: ModelWorker) -> None:
    _saved.update(copy.deepcopy(worker.state()))


def recall(worker: ModelWorker) -> None:
    worker.load_state(_saved)


def a_new_job_starts_with_a_fresh_optimizer(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    assert [step(dispatch, batch)["lr"] for _ in range(2)] == [OPTIM.lr / 2, OPTIM.lr]
    dispatch.forward_backward("policy", batch, GRPO)
    before = parameters(dispatch)
    dispatch.reset_optimizer("policy", OptimConfig(lr=1e-3), steps=5)
    after = parameters(dispatch)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "call forward_backward first" in refusal(lambda: dispatch.optim_step("policy"))
    assert step(dispatch, batch)["lr"] == 1e-3


def a_failure_on_every_rank_names_one_and_spares_the_world(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    text = refusal(lambda: dispatch.run_on_ranks("policy", fail_on, (0, 1)))
    assert text.startswith("fail_on failed on rank ")
    assert "OSError: disk full" in text.splitlines()[0]
    assert "Traceback" in text
    dispatch.forward("policy", batch)


def a_failure_on_one_rank_that_hinders_nobody_spares_the_world(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    text = refusal(lambda: dispatch.run_on_ranks("policy", fail_on, (1,)))
    assert text.startswith("fail_on failed on rank 1: OSError: disk full")
    dispatch.forward("policy", batch)


def fail_on(worker: ModelWorker, ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise OSError("disk full")


def bad_input_is_refused_before_anything_is_sent(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    short = TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8))
    foreign = TrainSequence(np.array([1, VOCABULARY], np.int32), np.array([0, 1], np.uint8))
    long = TrainSequence(np.zeros(97, np.int32), np.zeros(97, np.uint8))
    assert "no model 'critic'; there are: policy" in refusal(lambda: dispatch.forward("critic", batch))
    assert "row 1 has a token outside the model's vocabulary of 17" in refusal(
        lambda: dispatch.forward("policy", Batch.of([short, foreign]))
    )
    assert "row 0 has 97 tokens" in refusal(lambda: dispatch.forward("policy", Batch.of([long])))
    dispatch.forward("policy", batch)


def what_cannot_travel_harms_nobody(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        dispatch.run_on_ranks("policy", lambda worker: None)
    dispatch.forward("policy", batch)


def a_batch_smaller_than_the_world_trains(dispatch: RankGroup, path: Path) -> None:
    fresh(dispatch, path)
    metrics = dispatch.forward_backward("policy", Batch.of(make_rows()[:1]), SFT)
    assert metrics["loss"] > 0
    assert dispatch.optim_step("policy")["grad_norm"] > 0


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        calls_accumulate_until_the_step,
        a_loss_weight_multiplies_the_gradient_but_not_the_metric,
        a_gradient_that_is_not_finite_skips_the_step,
        a_step_without_gradients_is_refused,
        a_batch_whose_float16_gradients_overflow_is_trained_at_a_smaller_scale,
        a_batch_that_overflows_at_every_scale_is_left_out_after_a_few,
        random_weights_depend_on_the_seed_alone,
        a_tied_head_is_sent_once_as_the_embedding,
        an_abandoned_transfer_leaves_the_ranks_together,
        nothing_runs_in_the_middle_of_a_transfer,
        an_export_is_a_model_that_transformers_loads,
        a_loaded_state_continues_bit_by_bit,
        a_new_job_starts_with_a_fresh_optimizer,
        a_failure_on_every_rank_names_one_and_spares_the_world,
        a_failure_on_one_rank_that_hinders_nobody_spares_the_world,
        bad_input_is_refused_before_anything_is_sent,
        what_cannot_travel_harms_nobody,
        a_batch_smaller_than_the_world_trains,
        *STAGING,
        *RESIDENCY,
        *SERVED,
    )
}


def one_rank_fails_while_the_other_waits_for_it(dispatch: RankGroup, path: Path) -> None:
    text = refusal(lambda: dispatch.run_on_ranks("policy", fail_before_barrier, 1))
    assert text.startswith("fail_before_barrier failed on rank 1: OSError: disk full"), text
    assert "the world is broken" in refusal(lambda: dispatch.forward("policy", make_batch("grpo")))


def the_controller_fails_while_the_other_waits_for_it(dispatch: RankGroup, path: Path) -> None:
    text = refusal(lambda: dispatch.run_on_ranks("policy", fail_before_barrier, 0))
    assert text.startswith("fail_before_barrier failed on rank 0: OSError: disk full"), text
    assert dispatch.broken


def fail_before_barrier(worker: ModelWorker, rank: int) -> None:
    if dist.get_rank() == rank:
        raise OSError("disk full")
    dist.barrier()


def a_rank_dies_in_an_operation(dispatch: RankGroup, path: Path) -> None:
    assert refusal(lambda: dispatch.run_on_ranks("policy", die, 1)).startswith("die failed")
    assert dispatch.broken


def die(worker: ModelWorker, rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(9)
    dist.barrier()


def a_controller_that_shows_it_lives_is_waited_for(dispatch: RankGroup, path: Path) -> None:
    """Waits for longer than the ranks would bear silence."""
    end = time.monotonic() + 1.5 * PATIENCE.control

    def probe() -> bool:
        dispatch.keepalive()
        return time.monotonic() > end

    wait_for("the end of a long pause", probe, 3 * PATIENCE.control)
    dispatch.forward("policy", make_batch("grpo"))


BREAKAGES: dict[str, Scenario] = {
    breakage.__name__: breakage
    for breakage in (
        one_rank_fails_while_the_other_waits_for_it,
        the_controller_fails_while_the_other_waits_for_it,
        a_rank_dies_in_an_operation,
        a_controller_that_shows_it_lives_is_waited_for,
    )
}


def outcome_of(scenario: Scenario, dispatch: RankGroup, path: Path) -> str | None:
    try:
        scenario(dispatch, path)
    except Exception:  # noqa: BLE001 - reported to the test
        return traceback.format_exc()
    return None


def work(rank: int, path: Path, results: Path, *names: str) -> None:
    """Run the scenarios or breakages of these names, or all scenarios."""
    known = SCENARIOS | BREAKAGES
    chosen = {name: known[name] for name in names or SCENARIOS}
    torch.set_num_threads(1)

    def algorithm(dispatch: RankGroup) -> None:
        # torchrun ends the controller when another rank dies; it has to tell first what it saw.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fresh(dispatch, path)
        outcomes = {name: outcome_of(scenario, dispatch, path) for name, scenario in chosen.items()}
        results.write_text(json.dumps(outcomes))

    run_controller_or_worker(algorithm, BUDGET, patience=PATIENCE)


if __name__ == "__main__":
    work(int(os.environ["RANK"]), Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
