"""What each rank runs for `test_trainer_mesh`: the same steps on meshes with and without replicas, with the experts of
a mixture spread over ranks, and with ranks that share lines."""

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from pipeline.checkpoints import Fence, TrainerState, newest_checkpoint
from pipeline.tinker.tinker_records import Adapter
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.model_saving import await_save, forget_models, load_models, stage_models, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState
from pipeline.train.model import fsdp
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.expert_load import BIAS
from pipeline.train.model.experts import is_fused
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.service.client_models import RefusedRequest, ServedModels
from tests.support.models.jobs import config_of
from tests.support.oracle.cases import make_batch, model_config, policy_spec
from tests.support.ranks.dispatch_cases import BUDGET, OPTIM, parameters, refusal, step
from tests.support.ranks.served_commits import STEP, train

PATIENCE = Deadlines(operation=60, control=120, grace=2)
Shards = dict[str, NDArray[np.float32]]


def work(rank: int, model: Path, folder: Path) -> None:
    run_controller_or_worker(
        lambda dispatch: compare_meshes(dispatch, model, folder), BUDGET, device="cpu", patience=PATIENCE
    )


def compare_meshes(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """Four ranks: sharded over all of them, and in two replicas of two shards; then from each mesh to the other."""
    batch = make_batch("grpo")
    make(dispatch, model)
    plain = [step(dispatch, batch) for _ in range(3)]
    wanted = parameters(dispatch)
    make(dispatch, model, dp_replicate=2)
    assert [worker["replica"] for worker in dispatch.run_on_all_models(place)] == [0, 0, 1, 1]
    assert_same_steps(dispatch, batch, plain, wanted)
    assert_replicas_are_equal(dispatch)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-one")
    resume_on_another_mesh(dispatch, model, batch, folder / "to-two", dp_replicate=2)


def work_of_context(rank: int, model: Path, folder: Path) -> None:
    run_controller_or_worker(
        lambda dispatch: share_lines(dispatch, model, folder), BUDGET, device="cpu", patience=PATIENCE
    )


def share_lines(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """Four ranks: each with rows of its own, and in pairs that share them; then from mesh to mesh."""
    batch = make_batch("grpo")
    make(dispatch, model)
    first = dispatch.forward("policy", batch)
    plain = [step(dispatch, batch) for _ in range(3)]
    wanted = parameters(dispatch)
    staged = dispatch.stage([batch])
    make(dispatch, model, cp=2)
    assert "staged before a model with another cp" in refusal(lambda: dispatch.forward("policy", staged[0]))
    assert dispatch.run_on_all_models(place_in_context) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    for found, answer in zip(dispatch.forward("policy", batch), first, strict=True):
        np.testing.assert_allclose(found, answer, rtol=1e-4, atol=1e-5)
    assert_same_steps(dispatch, batch, plain, wanted)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-own-rows")
    resume_on_another_mesh(dispatch, model, batch, folder / "to-pairs", cp=2)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-replicas-of-pairs", cp=2, dp_replicate=2)
    over_three = policy_spec(model, cp=3)
    assert "cp=3 of 'policy'; expected a divisor of 4" in refusal(lambda: dispatch.init_model("policy", over_three))


def work_of_mixture(rank: int, model: Path, folder: Path) -> None:
    run_controller_or_worker(
        lambda dispatch: spread_experts(dispatch, model, folder), BUDGET, device="cpu", patience=PATIENCE
    )


def spread_experts(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """Four ranks: the experts of a mixture whole on each, spread over all of them, over pairs, and in two replicas;
    then from mesh to mesh, and to a directory that any mesh reads."""
    batch = make_batch("grpo")
    make(dispatch, model)
    dispatch.run_on_ranks("policy", gather_each_layer)
    first = dispatch.forward("policy", batch)
    plain = [step(dispatch, batch) for _ in range(3)]
    wanted = parameters(dispatch)
    for mesh in (
        {"ep": 4},
        {"ep": 2, "reshard": True, "activation_checkpointing": "full"},
        {"ep": 2, "dp_replicate": 2},
    ):
        make(dispatch, model, **mesh)
        assert dispatch.run_on_all_models(experts_at_once) == [EXPERTS // mesh["ep"]] * 4
        for found, answer in zip(dispatch.forward("policy", batch), first, strict=True):
            np.testing.assert_allclose(found, answer, rtol=1e-4, atol=1e-5)
        assert_same_steps(dispatch, batch, plain, wanted)
    assert_replicas_are_equal(dispatch)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-pairs", ep=2)
    dispatch.save_hf_model("policy", folder / "exported")
    written = parameters(dispatch)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-whole")
    resume_on_another_mesh(dispatch, model, batch, folder / "to-all", ep=4)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-replicas", ep=2, dp_replicate=2)
    for mesh in ({}, {"ep": 4}):
        make(dispatch, folder / "exported", **mesh)
        assert_equal(parameters(dispatch), written)
    refuse_what_cannot_be_spread_or_copied(dispatch, model)
    compare_clients(dispatch, folder / "exported", folder)


def work_of_biases(rank: int, model: Path, folder: Path) -> None:
    run_controller_or_worker(
        lambda dispatch: balance_experts(dispatch, model, folder), BUDGET, device="cpu", patience=PATIENCE
    )


def balance_experts(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """Four ranks: biases move by whole steps, equally on all ranks and meshes; they are saved, loaded and copied."""
    batch, optim = make_batch("grpo"), OPTIM.model_copy(update={"router_bias_rate": 0.01})
    make(dispatch, model, optim=optim)
    first = parameters(dispatch)
    plain = [step(dispatch, batch) for _ in range(3)]
    wanted = parameters(dispatch)
    (name,) = (name for name in wanted if name.endswith(BIAS))
    moved = (wanted[name] - first[name]) / 0.01
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-4)
    assert 1 <= moved.abs().max() <= 3 + 1e-4
    make(dispatch, model, optim=optim, ep=2)
    assert_same_steps(dispatch, batch, plain, wanted)
    assert torch.equal(parameters(dispatch)[name], wanted[name])
    of_ranks = dispatch.run_on_all_models(own_biases)
    assert all(np.array_equal(each, of_ranks[0]) for each in of_ranks)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-whole", optim=optim)
    dispatch.init_model("reference", policy_spec(model, optim=None))
    dispatch.copy_parameters("policy", "reference")
    assert torch.equal(parameters(dispatch, "reference")[name], parameters(dispatch)[name])
    said = refusal(lambda: make(dispatch, model.parent / "mixture", optim=optim))
    assert "optim.router_bias_rate=0.01: expected 0 for a model without e_score_correction_bias" in said


def own_biases(site: RankState) -> NDArray[np.float32]:
    found = [buffer for name, buffer in site.worker("policy").model.named_buffers() if name.endswith(BIAS)]
    return torch.cat(found).numpy().copy()


def work_of_adapters(rank: int, model: Path, folder: Path) -> None:
    run_controller_or_worker(
        lambda dispatch: move_adapters(dispatch, model, folder), BUDGET, device="cpu", patience=PATIENCE
    )


def move_adapters(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """Four ranks: adapters on the experts of a mixture, whole and spread; then from mesh to mesh, and by an export that
    any mesh reads."""
    batch, adapted = make_batch("grpo"), {"model": model_config(model, lora=2)}
    make(dispatch, model, **adapted)
    plain = [step(dispatch, batch) for _ in range(3)]
    wanted = parameters(dispatch)
    for mesh in ({"ep": 4}, {"ep": 2, "reshard": True}, {"ep": 2, "dp_replicate": 2}):
        make(dispatch, model, **mesh, **adapted)
        assert_same_steps(dispatch, batch, plain, wanted)
    assert_replicas_are_equal(dispatch)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-pairs", ep=2, **adapted)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-whole", **adapted)
    resume_on_another_mesh(dispatch, model, batch, folder / "to-all", ep=4, **adapted)
    dispatch.save_hf_model("policy", folder / "exported")
    written = parameters(dispatch)
    lora = adapted["model"].lora.model_copy(update={"adapter": str(folder / "exported")})
    for mesh in ({}, {"ep": 4}):
        make(dispatch, model, model=adapted["model"].model_copy(update={"lora": lora}), **mesh)
        assert_equal(parameters(dispatch), written)
    merge_on_every_mesh(dispatch, model, folder)
    refuse_spread_clients(dispatch, model, folder)


def merge_on_every_mesh(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """What servers get of a merged policy, and its export, are the base and what peft adds of the exported adapter."""
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder / "exported"))
    whole = peft.merge_and_unload()
    wanted = dict(revert_weight_conversion(whole, whole.state_dict()))
    lora = model_config(model, lora=2).lora.model_copy(update={"merge": True, "adapter": str(folder / "exported")})
    for number, mesh in enumerate(({}, {"ep": 4}, {"ep": 2, "dp_replicate": 2})):
        make(dispatch, model, model=model_config(model).model_copy(update={"lora": lora}), **mesh)
        sent = parameters(dispatch)
        assert sent.keys() == wanted.keys()
        for name, tensor in sent.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-6)
        dispatch.save_hf_model("policy", folder / f"merged-{number}")
        assert_equal(load_file(folder / f"merged-{number}" / "model.safetensors"), sent)
    base = load_file(model / "model.safetensors")
    changed = {name for name, tensor in sent.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if "_proj." in name}


def refuse_spread_clients(dispatch: RankGroup, model: Path, folder: Path) -> None:
    forget_models(dispatch)
    models = ServedModels(dispatch, config_of(model, mesh={"ep": 2}), folder / "clients", "1-0")
    with pytest.raises(RefusedRequest, match="attention layers alone for adapters of clients on experts"):
        models.create("a", Adapter(4))


def refuse_what_cannot_be_spread_or_copied(dispatch: RankGroup, model: Path) -> None:
    over_three = policy_spec(model, ep=3)
    assert "ep=3 of 'policy'; expected a divisor of 4" in refusal(lambda: dispatch.init_model("policy", over_three))
    make(dispatch, model, ep=2)
    dispatch.init_model("reference", policy_spec(model, optim=None))
    said = refusal(lambda: dispatch.copy_parameters("policy", "reference"))
    assert (
        "the other model has no network.model.layers.0.mlp.experts.gate_up_proj of the same shape and sharding" in said
    )
    dispatch.init_model("reference", policy_spec(model, optim=None, ep=2))
    step(dispatch, make_batch("grpo"))
    dispatch.copy_parameters("policy", "reference")
    answers = dispatch.forward_models(["policy", "reference"], make_batch("grpo"))  # at the same time, in two threads
    for one, other in zip(answers["policy"], answers["reference"], strict=True):
        assert np.array_equal(one, other)
    dispatch.remove_model("reference")


def compare_clients(dispatch: RankGroup, model: Path, folder: Path) -> None:
    """Adapters that take turns on a mixture, and a whole one, say the same with spread experts as with whole ones."""
    said = []
    for ep in (1, 2):
        forget_models(dispatch)
        models = ServedModels(dispatch, config_of(model, mesh={"ep": ep}), folder / f"clients-{ep}", "1-0")
        for name, adapter in {"a": Adapter(4, mlp=False), "b": Adapter(4, mlp=False), "whole": Adapter(0)}.items():
            models.create(name, adapter)
        turns = enumerate(["a", "b", "whole", "a", "b", "whole"])
        said.append([train(models, name, seed, SMOOTH) for seed, name in turns])
    for wanted, found in zip(*said, strict=True):
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(np.frombuffer(other, np.float32), np.frombuffer(one, np.float32), atol=1e-5)


EXPERTS = 8
SMOOTH = msgspec.structs.replace(STEP, eps=1e-3)
"""AdamW whose steps do not depend on how gradients near zero are rounded."""


def gather_each_layer(worker: ModelWorker) -> None:
    """From the next model on, each layer is a unit by itself."""
    fsdp.LAYER_UNIT = 1


def place_in_context(site: RankState) -> tuple[int, int]:
    context = site.worker("policy").context
    assert context is not None
    return context.rank, context.size


def experts_at_once(site: RankState) -> int:
    """How many experts of a layer this rank computes."""
    modules = [each for each in site.worker("policy").model.modules() if is_fused(each)]
    with torch.no_grad():
        for each in modules:
            cast(FSDPModule, each).unshard()
        counts = {len(local(cast(Any, each).down_proj)) for each in modules}
        for each in modules:
            cast(FSDPModule, each).reshard()
    (count,) = counts
    return count


def make(dispatch: RankGroup, model: Path, /, **mesh: Any) -> None:
    dispatch.init_model("policy", policy_spec(model, **{"optim": OPTIM, "steps": 10, **mesh}))


def assert_same_steps(
    dispatch: RankGroup, batch: Batch, plain: list[dict[str, float]], wanted: dict[str, torch.Tensor]
) -> None:
    for metrics in plain:
        found = step(dispatch, batch)
        np.testing.assert_allclose([found[key] for key in metrics], list(metrics.values()), rtol=1e-4, atol=1e-6)
    for name, tensor in parameters(dispatch).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To the last bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def resume_on_another_mesh(dispatch: RankGroup, model: Path, batch: Batch, folder: Path, /, **mesh: Any) -> None:
    """Save, make the model on the other mesh, load: the same bits, and the next step is the same within rounding."""
    save(dispatch, str(folder))
    saved, after = parameters(dispatch), step(dispatch, batch)
    make(dispatch, model, **mesh)
    checkpoint = newest_checkpoint(str(folder))
    assert checkpoint is not None
    load_models(dispatch, checkpoint, ["policy"])
    assert_equal(parameters(dispatch), saved)
    found = step(dispatch, batch)
    np.testing.assert_allclose([found[key] for key in after], list(after.values()), rtol=1e-4, atol=1e-6)
    if "dp_replicate" in mesh:
        assert_replicas_are_equal(dispatch)


def save(dispatch: RankGroup, root: str) -> None:
    Fence(root, "1-0").claim()
    parts = stage_models(dispatch, ["policy"])
    start_save(dispatch, root, "1-0", TrainerState(job="rl", step=1, models=("policy",)), parts, 2)
    await_save(dispatch, "the checkpoint")
    dispatch.saver.result()


def assert_replicas_are_equal(dispatch: RankGroup) -> None:
    """To the last bit: parameters and moments of ranks 0 and 2, and of 1 and 3."""
    shards: list[Shards] = dispatch.run_on_all_models(own_shards, needs={"policy": "save_checkpoint"})
    for first, second in ((shards[0], shards[2]), (shards[1], shards[3])):
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)


def own_shards(site: RankState) -> Shards:
    worker = site.worker("policy")
    assert worker.optimizer is not None
    tensors = {name: parameter.detach() for name, parameter in worker.model.named_parameters()}
    tensors |= {f"moment {number}": moment for number, moment in enumerate(worker.optimizer.moments())}
    return {name: local(tensor).cpu().numpy().copy() for name, tensor in tensors.items()}


def place(site: RankState) -> dict[str, Any]:
    return {"replica": site.worker("policy").replica}
