"""What each process of torchrun runs for `test_training_oracle`: cases and mutations, by the real dispatch.

torchrun --nproc-per-node N -m tests.support.ranks.training_ranks MODELS RESULTS [--cases …] [--device …] [--dtype …]
"""

import argparse
import gc
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.train.batching import packing
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, Device, RankState, joined_world
from pipeline.train.model import attention_sinks, fsdp
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.row_shards import fill_shard
from pipeline.train.worker_spec import ModelSpec
from tests.support.oracle import mutations as training_mutations
from tests.support.oracle.cases import (
    BALANCED,
    BIAS_RATE,
    FAMILIES,
    OPTIM,
    RECIPES,
    STEPS,
    Arrays,
    drawn,
    make_batch,
    model_config,
    oracle_name,
    policy_spec,
)
from tests.support.oracle.ways import (
    Case,
    Dtype,
    Mutation,
    Result,
    all_cases,
    cases,
    compiled_cases,
    context_cases,
    family_cases,
    few_compiled_cases,
    mixture_cases,
    mutations,
    suite_cases,
)

_STACK = re.compile(r"(.+\.experts)(\.base_layer)?\.(lora_[AB])\.weight")
_FAMILIES = ("Qwen3", "Qwen3Moe", "Glm4Moe", "GptOss", "DeepseekV3", "Mixtral")
_ATTENTIONS = tuple(f"{family}Attention" for family in _FAMILIES)


def plain_name(name: str) -> str:
    """A parameter's name as the oracle has it: that of the Hugging Face model, adapters below it."""
    name = oracle_name(name.removeprefix("network.").removeprefix("base_model.model.").replace(".default.", "."))
    return name if name.startswith(("model.", "head.", "lm_head.")) else f"model.{name}"


def gradients(rank: ModelWorker) -> Arrays:
    """The accumulated gradients, whole."""
    whole = {name: p.grad.full_tensor() for name, p in rank.model.named_parameters() if isinstance(p.grad, DTensor)}
    named = {plain_name(name): tensor.float().cpu().numpy() / rank.loss_scale for name, tensor in whole.items()}
    return {name: matrix for fused, array in named.items() for name, matrix in matrices_of(fused, array, named)}


def matrices_of(
    name: str, array: NDArray[np.float32], names: Collection[str]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The matrices of each expert, which lie in one array [experts, …], by the oracle's names; another as it is.
    `names` are those of all arrays."""
    layer, _, fused = name.rpartition(".")
    if ".experts.adapters." in name:
        yield from zip(names_of_experts(name, len(array)), array, strict=True)
        return
    if stack := _STACK.fullmatch(name):
        yield from unpacked(f"{stack[1]}.adapters", "gate_up_proj" if stack[2] else "down_proj", stack[3], array)
        return
    if not layer.endswith(".experts") or f"{layer}.gate_up_proj_bias" in names:
        yield name, array  # gpt-oss has such arrays in its files too
        return
    for expert, matrices in enumerate(array):
        parts = np.split(matrices, 2) if fused == "gate_up_proj" else [matrices]
        for part, matrix in zip(fused.replace("gate_up_proj", "gate_proj up_proj").split(), parts, strict=True):
            yield f"{layer}.{expert}.{part}.weight", matrix


def unpacked(
    adapters: str, matrix: str, part: str, array: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The matrices of each expert from the adapter of a stack as peft has it: A [experts · rank, in], or B
    [out, rank · experts]."""
    experts = FAMILIES["gpt_oss"]["num_local_experts"]
    each = array.reshape(experts, -1, array.shape[1])
    if part == "lora_B":
        each = array.reshape(len(array), -1, experts).transpose(2, 0, 1)
    yield from zip(names_of_experts(f"{adapters}.{matrix}.{matrix}.{part}", experts), each, strict=True)


def names_of_experts(name: str, experts: int) -> list[str]:
    """The oracle's names of the adapters' matrices that lie in one array: …experts.adapters.TENSOR.MATRIX.lora_A."""
    layer, _, adapter = name.partition(".adapters.")
    _, matrix, part = adapter.split(".")
    return [oracle_name(f"{layer}.{expert}.{matrix}.{part}.weight") for expert in range(experts)]


def first_numbers(name: str, shape: torch.Size) -> Tensor:
    """What the oracle starts a value head or an adapter with."""
    if ".experts.adapters." not in name:
        return torch.from_numpy(drawn(name, shape))
    return torch.stack([torch.from_numpy(drawn(each, shape[1:])) for each in names_of_experts(name, shape[0])])


def parameters(dispatch: RankGroup, name: str) -> Arrays:
    """The trained parameters, whole."""
    dispatch.prepare_weight_sync(name)
    whole = {plain_name(key): tensor.float().cpu().numpy().copy() for key, tensor in dispatch.full_parameters(name)}
    dispatch.finish_weight_sync(name)
    return {each: matrix for fused, array in whole.items() for each, matrix in matrices_of(fused, array, whole)}


def set_units(rank: ModelWorker, layers: bool) -> None:
    """Make each layer its own unit, on one rank too, or the whole of these small models one."""
    fsdp.LAYER_UNIT, fsdp.WHOLE_UNIT = (1, 0) if layers else (1 << 20, 1 << 28)


def begin(rank: ModelWorker) -> None:
    """Give value heads and adapters the numbers of the oracle, and watch what the switches do."""
    for name, parameter in rank.model.named_parameters():
        plain = plain_name(name)
        if plain.startswith("head.") or ".lora_" in plain:
            fill_shard(parameter, first_numbers(plain, parameter.shape))
    training_mutations.seen.clear()
    training_mutations.seen["units"] = sum(isinstance(module, FSDPModule) for module in rank.model.modules())
    mesh = next(p.device_mesh for p in rank.model.parameters() if isinstance(p, DTensor))
    training_mutations.seen["shards"] = mesh.size(mesh.ndim - 1)
    torch._dynamo.utils.counters.clear()


def watch(rank: ModelWorker) -> None:
    """Count attention that is computed inside of a backward pass, and by the kernel for packed rows; and micro-batches
    whose rows share tokens."""
    seen, kernel, share = training_mutations.seen, attention_sinks.varlen_attn, packing.pack_shared_prefix

    def before(*_: object) -> None:
        seen["recomputed"] += torch._C._current_graph_task_id() != -1

    def counted(*given: Any, **options: Any) -> Any:
        seen["kernel"] += 1
        return kernel(*given, **options)

    def shared(*given: Any) -> packing.Layout:
        seen["shared"] += 1
        return share(*given)

    training_mutations.patch(attention_sinks, "varlen_attn", counted)
    training_mutations.patch(packing, "pack_shared_prefix", shared)
    for module in rank.model.modules():
        if type(module).__name__ in _ATTENTIONS:
            module.register_forward_pre_hook(before)


def end(rank: ModelWorker) -> Counter[str]:
    """What was seen in this process."""
    training_mutations.restore(rank)
    training_mutations.seen["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return training_mutations.seen.copy()


def run_case(site: RankState, models: Path, case: Case, mutation: Mutation | None = None) -> Result:
    """Controller: the case from the first parameters to the last."""
    recipe, name, result = RECIPES[case.recipe], RECIPES[case.recipe].model, Result()
    dispatch, batch = (
        RankGroup(site, case.budget, colocated=case.offload),
        make_batch(case.recipe, replayed=case.replayed),
    )
    init_models(dispatch, case.model(models), case)
    dispatch.run_on_ranks(name, begin)
    if not case.compile:
        dispatch.run_on_ranks(name, watch)
    result.start = parameters(dispatch, name)
    result.answers = dispatch.forward(name, batch)
    if mutation is not None:
        dispatch.run_on_ranks(name, training_mutations.mutate, mutation)
    staged = dispatch.stage([batch]) if case.staged else None
    for _ in range(STEPS):
        if case.offload:
            compete(dispatch, case, result)
        data = batch if staged is None else staged[0]
        metrics = dispatch.forward_backward(name, data, recipe.objective, level=case.level)
        result.gradients.append(dispatch.run_on_ranks(name, gradients)[0])
        result.metrics.append(metrics | dispatch.optim_step(name))
    if staged is not None:
        dispatch.unstage(staged)
    if case.offload:
        dispatch.offload_all()
    result.parameters = parameters(dispatch, name)
    finish(dispatch, name, result)
    return result


def spec_of(case: Case, path: Path) -> ModelSpec:
    """The model that the case trains."""
    recipe = RECIPES[case.recipe]
    rate = BIAS_RATE if case.family in BALANCED and not recipe.lora else 0.0
    return policy_spec(
        path,
        kind=recipe.model,
        model=model_config(path, recipe.lora, recipe.experts).model_copy(update={"dtype": case.dtype}),
        activation_checkpointing=case.checkpointing,
        compile=case.compile,
        reshard=case.reshard,
        dp_replicate=case.replicas,
        ep=max(1, case.ep),
        cp=case.cp,
        routing_replay=case.replayed,
        optim=OPTIM.model_copy(update={"router_bias_rate": rate, "router_aux_loss_coef": case.aux}),
    )


def init_models(dispatch: RankGroup, path: Path, case: Case) -> None:
    """The model of the case; when it is to be offloaded, two others that want the device as well."""
    name, spec = RECIPES[case.recipe].model, spec_of(case, path)
    for other in ("reference", "rival") if case.offload else ():
        dispatch.init_model(other, spec_of(Case("sft", dtype=case.dtype), path))
    dispatch.init_model(name, spec)
    if case.layers:
        dispatch.run_on_ranks(name, set_units, True)
        dispatch.init_model(name, spec)
        dispatch.run_on_ranks(name, set_units, False)


def compete(dispatch: RankGroup, case: Case, result: Result) -> None:
    """Let the other models compute and step, and see that the case's model made room for them."""
    name, sft = RECIPES[case.recipe].model, RECIPES["sft"]
    dispatch.forward("reference", make_batch("sft"))
    dispatch.forward_backward("rival", make_batch("sft"), sft.objective)
    dispatch.optim_step("rival")
    held = [of_rank[name] for of_rank in dispatch.memory()]
    away = sum(memory.model == memory.optimizer == 0 for memory in held)
    result.seen["evicted"] = result.seen.get("evicted", 0) + away


def finish(dispatch: RankGroup, name: str, result: Result) -> None:
    """Collect what was seen, and remove all models."""
    for counted in dispatch.run_on_ranks(name, end):
        for key, count in counted.items():
            result.seen[key] = result.seen.get(key, 0) + count
    for model in tuple(dispatch.models):
        dispatch.remove_model(model)


def lead(
    site: RankState, models: Path, chosen: Sequence[Case], mutations: Mapping[Mutation, Case], results: Path
) -> None:
    """Controller: every mutation, then every case, each written to `results` as soon as it is there."""
    with results.open("wb") as file:
        for mutation, case in mutations.items():
            pickle.dump((mutation, run_case(site, models, case, mutation)), file)
        for case in chosen:
            pickle.dump((case, run_case(site, models, case)), file)
            file.flush()


def read_results(path: Path) -> dict[object, Result]:
    """What `lead` wrote, also if it was cut off."""
    found: dict[object, Result] = {}
    with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            name, result = pickle.load(file)
            found[name] = result
    return found


CHOICES: dict[str, Callable[[int], list[Case]]] = {
    "suite": suite_cases,
    "some": cases,
    "all": all_cases,
    "context": context_cases,
    "compiled": compiled_cases,
    "few_compiled": few_compiled_cases,
    "mixtures": mixture_cases,
    "families": family_cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--cases", choices=CHOICES, default="some")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    compute(given.models, given.results, given.cases, given.device, given.dtype)


def work(rank: int, models: Path, results: Path, choice: str) -> None:
    """`compute` in a rank of `forked_ranks`."""
    compute(models, results, choice, "cpu", "float32")


def compute(models: Path, results: Path, choice: str, device: Device, dtype: Dtype) -> None:
    """One rank of a world that computes the cases of a choice; rank 0 writes what they gave."""
    gc.freeze()  # removing a model collects garbage, which need not look at all of torch each time
    with joined_world(device, Deadlines(operation=60, control=120, grace=2)) as site:
        if site.rank:
            site.serve()
            return
        adapters = find_spec("peft") is not None
        every = CHOICES[choice](site.ranks)
        chosen = [replace(case, dtype=dtype) for case in every if adapters or not RECIPES[case.recipe].lora]
        mutated = mutations(dtype) if choice in ("suite", "some") and site.ranks == 2 else {}
        lead(site, models, chosen, mutated, results)
        RankGroup(site, Case("sft").budget).close()


if __name__ == "__main__":
    main()
