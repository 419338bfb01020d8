"""Scenarios of `dispatch_ranks`: whatever the controller asks, what it needs is on the device and nothing else."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import OptimConfig
from pipeline.train.controller.batch_staging import Staged
from pipeline.train.controller.device_placement import REQUIREMENTS, Purpose, Requirements
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model.cpu_offload import Part, local
from pipeline.train.model.model_worker import ModelWorker
from tests.support.oracle.cases import RECIPES, make_batch, policy_spec
from tests.support.ranks.dispatch_cases import BUDGET, GRPO, OPTIM, Scenario, fresh, refusal, step

APART = {"close", "cut", "layout"}
"""What is not played: the end, and what asks nothing of the ranks."""
MINDLESS = {"stage", "set_column", "unstage", "finish_weight_sync", "remove_model"}
MINDLESS |= {"memory", "offload_all", "empty_cache", "keepalive"}
"""What needs no model on the device."""
COMBINED = {"forward_models", "run_on_all_models", "full_parameters"}
"""What needs models for purposes of other names."""
VALUE = RECIPES["value"].objective
Call = Callable[[RankGroup], object]


@dataclass(frozen=True)
class Step:
    """A call of one public operation, and what it counts as for each model that it leaves on the device."""

    operation: str
    needs: Requirements
    call: Call


class Script:
    """Every public operation, in an order in which each sees what those before it did."""

    def __init__(self, path: Path, export: Path) -> None:
        self._path, self._export = path, export
        self._staged: list[Staged] = []

    def steps(self) -> list[Step]:
        return [*self._making(), *self._training(), *self._sending(), *self._ending()]

    def _making(self) -> list[Step]:
        specs = {
            "policy": policy_spec(self._path, optim=OPTIM, steps=10),
            "critic": policy_spec(self._path, kind="critic", optim=OPTIM, steps=10),
            "reference": policy_spec(self._path, optim=None, seed=1),
        }
        return [
            *(on(name, "init_model", lambda d, n=name: d.init_model(n, specs[n])) for name in specs),
            *(copy_step(name) for name in ("critic", "reference")),
            Step("stage", {}, lambda d: self._staged.append(d.stage([make_batch("grpo")]))),
        ]

    def _training(self) -> list[Step]:
        values = make_batch("value")
        return [
            on("policy", "forward", lambda d: d.forward("policy", self._rows)),
            Step("forward_models", {"critic": "forward"}, self._answer_and_amend),
            on("policy", "forward_backward", lambda d: d.forward_backward("policy", self._rows, GRPO)),
            on("critic", "forward_backward", lambda d: d.forward_backward("critic", values, VALUE)),
            on("policy", "forward_backward", lambda d: d.forward_backward("policy", make_batch("grpo"), GRPO)),
            on("policy", "set_lr", lambda d: d.set_lr("policy", 0.02)),
            on("policy", "optim_step", lambda d: d.optim_step("policy")),
            on("critic", "optim_step", lambda d: d.optim_step("critic")),
            on("policy", "forward_backward", lambda d: d.forward_backward("policy", self._rows, GRPO)),
            on("policy", "optim_step", lambda d: d.optim_step("policy")),
            on("policy", "run_on_ranks", lambda d: d.run_on_ranks("policy", numbers)),
            Step(
                "run_on_ranks", {"critic": "forward"}, lambda d: d.run_on_ranks("critic", parameters, needs="forward")
            ),
            Step("set_column", {}, lambda d: d.set_column(self._staged[-1], "advantages", [self._halves])),
            on("critic", "forward", lambda d: d.forward("critic", self._rows)),
        ]

    def _sending(self) -> list[Step]:
        both: Requirements = {"policy": "save_checkpoint", "critic": "load_checkpoint"}
        return [
            on("policy", "prepare_weight_sync", lambda d: d.prepare_weight_sync("policy")),
            Step("full_parameters", {"policy": "prepare_weight_sync"}, self._gather),
            Step("finish_weight_sync", {}, lambda d: d.finish_weight_sync("policy")),
            on("policy", "save_hf_model", self._save),
            Step("run_on_all_models", both, lambda d: d.run_on_all_models(all_numbers, needs=both)),
        ]

    def _ending(self) -> list[Step]:
        optim = OptimConfig(lr=1e-3)
        return [
            on("policy", "reset_optimizer", lambda d: d.reset_optimizer("policy", optim, steps=3)),
            on("policy", "forward_backward", lambda d: d.forward_backward("policy", self._rows, GRPO)),
            on("policy", "optim_step", lambda d: d.optim_step("policy")),
            on("policy", "forward", lambda d: d.forward("policy", self._rows)),
            on("reference", "forward", lambda d: d.forward("reference", self._rows)),
            Step("unstage", {}, lambda d: d.unstage(self._staged.pop())),
            Step("memory", {}, lambda d: [list(of_rank) for of_rank in d.memory()]),
            Step("empty_cache", {}, lambda d: d.empty_cache()),
            Step("keepalive", {}, lambda d: d.keepalive()),
            Step("offload_all", {}, lambda d: d.offload_all()),
            *(
                Step("remove_model", {}, lambda d, n=name: d.remove_model(n))
                for name in ("critic", "policy", "reference")
            ),
        ]

    @property
    def _rows(self) -> Any:
        return self._staged[-1][0]

    @property
    def _halves(self) -> list[Any]:
        return [np.full(len(row), 0.5, np.float32) for row in self._rows.batch.rows]

    def _answer_and_amend(self, dispatch: RankGroup) -> object:
        answers = dispatch.forward_models(("policy", "reference", "critic"), self._rows)
        dispatch.set_column(self._staged[-1], "old_logprobs", [answers["policy"]])
        return answers, dispatch.forward_models(("policy", "critic"), make_batch("grpo"))

    def _gather(self, dispatch: RankGroup) -> object:
        return [(name, tensor.clone()) for name, tensor in dispatch.full_parameters("policy")]

    def _save(self, dispatch: RankGroup) -> object:
        dispatch.save_hf_model("policy", self._export)
        return load_file(self._export / "model.safetensors")


def on(name: str, purpose: Purpose, call: Call) -> Step:
    return Step(purpose, {name: purpose}, call)


def copy_step(target: str) -> Step:
    needs: Requirements = {"policy": "copy_parameters", target: "copy_parameters"}
    return Step("copy_parameters", needs, lambda d: d.copy_parameters("policy", target))


def numbers(worker: ModelWorker) -> dict[str, Any]:
    """Everything that this rank holds of a model."""
    moments = worker.optimizer.moments() if worker.optimizer else []
    return {**parameters(worker), **{str(i): local(tensor).clone().numpy() for i, tensor in enumerate(moments)}}


def parameters(worker: ModelWorker) -> dict[str, Any]:
    return {name: local(p.detach()).clone().numpy() for name, p in worker.model.named_parameters()}


def all_numbers(site: RankState) -> dict[str, Any]:
    return {name: numbers(site.worker(name)) for name in ("policy", "critic")}


def play(dispatch: RankGroup, steps: Sequence[Step]) -> list[object]:
    """What each step returns; with colocated models each begins on an empty device, which is then measured."""
    results = []
    for each in steps:
        if dispatch._control.colocated:
            dispatch.offload_all()
        results.append(each.call(dispatch))
        if dispatch._control.colocated:
            measure(dispatch, each)
    return results


def measure(dispatch: RankGroup, done: Step) -> None:
    """What has bytes on the device, on any rank, is what the table says."""
    needed = {(name, part) for name, purpose in done.needs.items() for part in REQUIREMENTS[purpose]}
    needed &= {(name, part) for name in dispatch.models for part in ("model", "optimizer")}
    needed -= {("reference", "optimizer")}
    for rank, of_rank in enumerate(dispatch.memory()):
        held = {(name, part) for name, memory in of_rank.items() for part, size in bytes_of(memory) if size}
        assert held == needed, f"after {done.operation}, rank {rank} holds {sorted(held)}, not {sorted(needed)}"


def bytes_of(memory: Any) -> list[tuple[Part, int]]:
    return [("model", memory.model), ("optimizer", memory.optimizer)]


def colocated(dispatch: RankGroup) -> RankGroup:
    return RankGroup(dispatch._site, BUDGET, colocated=True)


def alike(one: object, other: object) -> bool:
    """Equal to the last bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def every_public_operation_is_in_the_table_and_is_played(dispatch: RankGroup, path: Path) -> None:
    public = {name for name, _ in inspect.getmembers(RankGroup, inspect.isfunction) if not name.startswith("_")}
    steps = Script(path, path).steps()
    assert {each.operation for each in steps} == public - APART
    assert public - APART - MINDLESS - COMBINED | {"save_checkpoint", "load_checkpoint"} == set(REQUIREMENTS)
    assert {operation for each in steps for operation in each.needs.values()} == set(REQUIREMENTS)


def every_operation_does_the_same_when_models_have_to_move(dispatch: RankGroup, path: Path) -> None:
    steps = Script(path, path.parent / "stayed").steps()
    stayed = play(dispatch, steps)
    moved = play(colocated(dispatch), Script(path, path.parent / "moved").steps())
    for each, one, other in zip(steps, stayed, moved, strict=True):
        assert alike(one, other), each.operation


def models_that_are_not_colocated_stay(dispatch: RankGroup, path: Path) -> None:
    play(dispatch, Script(path, path.parent / "kept").steps()[:-4])
    for of_rank in dispatch.memory():
        assert all(memory.model > 0 for memory in of_rank.values())
        assert all(of_rank[name].optimizer > 0 for name in ("policy", "critic"))


def a_missing_offload_is_noticed(dispatch: RankGroup, path: Path) -> None:
    """On one rank of two, a part stays where it is although it was told to leave."""
    for part in ("model", "optimizer"):
        dispatch.run_on_all_models(remove_models)
        dispatch.run_on_all_models(forget_offload, part)
        try:
            with pytest.raises(AssertionError, match=rf"rank 1 holds .*'{part}'"):
                play(colocated(dispatch), Script(path, path.parent / "mutated").steps())
        finally:
            forgotten = dispatch.run_on_all_models(restore)
        assert forgotten[0] == 0 < forgotten[1]


def a_move_that_failed_is_made_up_for(dispatch: RankGroup, path: Path) -> None:
    batch = fresh(dispatch, path)
    expected = [step(dispatch, batch) for _ in range(3)]
    others = colocated(dispatch)
    fresh(others, path)
    assert step(others, batch) == expected[0]
    others.offload_all()
    others.run_on_all_models(fail_load)
    assert refusal(lambda: others.run_on_ranks("policy", parameters)).splitlines()[0].endswith("OSError: disk full")
    others.run_on_all_models(restore)
    assert [step(others, batch) for _ in range(2)] == expected[1:]


_patches = ExitStack()
_seen: Counter[str] = Counter()


def forget_offload(site: RankState, forgotten: Part) -> None:
    offload = ModelWorker.offload

    def forget(worker: ModelWorker, part: Part) -> None:
        if part == forgotten:
            _seen["forgotten"] += 1
        else:
            offload(worker, part)

    if site.rank == 1:
        _patches.enter_context(mock.patch.object(ModelWorker, "offload", forget))


def fail_load(site: RankState) -> None:
    if site.rank == 1:
        _patches.enter_context(mock.patch.object(ModelWorker, "load", side_effect=OSError("disk full")))


def restore(site: RankState) -> int:
    """Undo what was patched; how often an offload was forgotten."""
    _patches.close()
    return _seen.pop("forgotten", 0)


def remove_models(site: RankState) -> None:
    """Those of a script that was not played to its end."""
    site.workers.clear()
    site.staged.clear()


RESIDENCY: tuple[Scenario, ...] = (
    every_public_operation_is_in_the_table_and_is_played,
    every_operation_does_the_same_when_models_have_to_move,
    models_that_are_not_colocated_stay,
    a_missing_offload_is_noticed,
    a_move_that_failed_is_made_up_for,
)
