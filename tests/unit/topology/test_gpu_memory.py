"""The arithmetic of memory: against what was measured, and what it refuses."""

from typing import Any

import pytest
from msgspec.structs import replace

from docs import memory as page
from pipeline.config import ModelConfig, OptimConfig, RunConfig
from pipeline.config.schema import MomentType
from pipeline.config.value_types import memory_bytes
from pipeline.errors import ConfigError
from pipeline.topology.gpu_memory import describe_memory, describe_mesh, host_memory, micro_batch_tokens, trainer_memory
from pipeline.topology.memory_budget import GIB, WEIGHT_CHUNK, trainer_ranks
from pipeline.topology.memory_fit import check_memory, max_gpu_memory_utilization, trainer_allowance
from pipeline.topology.plan import make_plan
from pipeline.topology.server_memory import sequence_bytes, sequences, server_memory
from pipeline.topology.sizes import Sizes, sizes_of_run
from tests.fakes.configs import make_config

SAVING = {"reshard_after_forward": True, "activation_checkpointing": "full"}

B8 = Sizes(
    parameters=8_000_000_000,
    trained=8_000_000_000,
    outside_layers=1_200_000_000,
    layer=190_000_000,
    layers=36,
    hidden=4096,
    vocabulary=150_000,
    head_trained=True,
    logits=1 << 26,
    activations=8e6,
    selected=3e6,
    kv=36 * 2 * 8 * 128,
    kv_heads=8,
    width=2,
)
"""About an 8B."""


def config_of(
    *, processes: int = 2, gpus: int = 1, memory: str = "", loss: dict[str, Any] | None = None, **training: Any
) -> RunConfig:
    return make_config(
        resources={
            "device": "cuda",
            "gpu_memory": memory,
            "trainer": {"processes": processes, "gpus": 1},
            "inference": {"gpus": gpus},
        },
        model={"path": "tiny", "dtype": "bfloat16", "max_length": 4096},
        training={"steps": 1, "prompts_per_step": 64, "micro_batch_tokens": 16_384} | training,
        loss={"name": "grpo"} | (loss or {}),
    )


@pytest.mark.parametrize("case", page.MEASURED, ids=str)
def test_it_is_an_upper_bound_near_what_was_measured_on_h200s(case: page.Measured) -> None:
    assert 1.0 <= page.computed(case) / case.gib <= 1.1


def test_the_tables_of_the_page_are_those_of_the_arithmetic() -> None:
    for path, tables in ((page.PAGE, page.tables), (page.LARGER_PAGE, page.larger_table)):
        text = path.read_text()
        assert page.page(text, tables()) == text, "stale: python -m docs.memory writes it"


@pytest.mark.parametrize("plan", page.LARGER, ids=lambda plan: plan.shape)
def test_the_plans_of_larger_models_fit_80_gb(plan: page.LargerPlan) -> None:
    sizes = plan.sizes
    config = plan.config("resources.gpu_memory=80G")
    check_memory(config, sizes)
    assert sequences(config, sizes, 80 * GIB) > 50
    assert sum(node.gpus for node in make_plan(config).bundles) <= plan.nodes * plan.gpus
    with pytest.raises(ConfigError, match=r"resources\.gpu_memory"):
        check_memory(plan.config("resources.gpu_memory=40G"), sizes)


def test_a_page_without_a_place_for_the_tables_is_told() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        page.page(f"# GPUs\n{page.BEGIN}", "")


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 0), ("512", 512 << 20), ("1K", 1 << 10), ("3M", 3 << 20), ("80G", 80 << 30), ("1T", 1 << 40)],
)
def test_memory_is_counted_as_slurm_counts_it(text: str, size: int) -> None:
    assert memory_bytes(text) == size


def test_what_is_kept_is_divided_by_the_processes_and_what_crosses_them_is_not() -> None:
    few, many = (trainer_memory(config_of(processes=count), B8).parts for count in (2, 8))
    assert few["parameters and moments"] == 4 * many["parameters and moments"] == 12 * B8.parameters // 2
    assert few["gradients"] == many["gradients"] == 4 * B8.parameters
    assert few["weights for the servers"] == 4 * many["weights for the servers"] == 2 * B8.weights // 2
    assert (
        trainer_memory(config_of(processes=8, reshard_after_forward=True), B8).parts["gradients"]
        == 4 * B8.parameters // 8
    )


@pytest.mark.parametrize(
    "saving",
    [
        {"reshard_after_forward": True},
        {"activation_checkpointing": "full"},
        {"compile": True},
        {"staging_device": "host"},
    ],
    ids=str,
)
def test_each_way_to_save_memory_saves(saving: dict[str, Any]) -> None:
    assert trainer_memory(config_of(**saving), B8).total < trainer_memory(config_of(), B8).total


@pytest.mark.parametrize(("place", "gpus", "parts"), [("gpu", 1, 0), ("gpu", 4, 1), ("host", 1, 1), ("host", 4, 1)])
def test_weights_wait_on_the_gpu_or_its_host_and_chunks_of_them_for_who_takes_no_version_as_it_lies(
    place: str, gpus: int, parts: int
) -> None:
    config = config_of(gpus=gpus, staging_device=place)
    waiting, chunks = 2 * B8.weights // trainer_ranks(config), parts * 2 * WEIGHT_CHUNK
    on_gpu = place == "gpu"
    assert trainer_memory(config, B8).parts["weights for the servers"] == on_gpu * waiting + chunks
    assert host_memory(config, B8).parts["weights for the servers"] == (not on_gpu) * waiting


@pytest.mark.parametrize(("model", "processes", "gpus"), [("8B", 8, 1), ("32B", 16, 4), ("32B", 24, 8)])
def test_half_of_two_nodes_of_eight_trains_8b_and_half_of_four_32b_on_80_gb(
    model: str, processes: int, gpus: int
) -> None:
    ways = ("compile", *page.SAVED)
    sizes = page.sizes_from(page.settings_of(model))
    config = page.config_of(*ways, processes=processes, gpus=gpus, memory="80G", staging_device="host")
    fitting = with_share(config, max_gpu_memory_utilization(config, sizes, 80 * GIB))
    check_memory(fitting, sizes)
    assert sequences(fitting, sizes, 80 * GIB) > 64


def test_smaller_micro_batches_need_less_and_small_batches_never_fill_them() -> None:
    assert trainer_memory(config_of(micro_batch_tokens=4096), B8).total < trainer_memory(config_of(), B8).total
    assert micro_batch_tokens(config_of(prompts_per_step=1, micro_batch_tokens=1 << 20), ranks=4) == 2 * 4096


def test_other_models_take_their_part_unless_they_wait_elsewhere() -> None:
    losses = [{"kl": 0.1}, {"advantage_estimator": "gae"}, {"kl": 0.1, "advantage_estimator": "gae"}]
    parts = [trainer_memory(config_of(loss=loss), B8).parts["other models"] for loss in losses]
    assert parts == [B8.parameters, 8 * B8.parameters, 9 * B8.parameters]
    waiting = config_of(loss=losses[2], offload_idle_models=True)
    assert trainer_memory(waiting, B8).parts["other models"] == 0
    assert host_memory(waiting, B8).total > host_memory(config_of(loss=losses[2]), B8).total


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    adapters = replace(B8, trained=10**7, head_trained=False)
    whole, small = trainer_memory(config_of(), B8), trainer_memory(config_of(), adapters)
    assert small.parts["gradients"] == 4 * 10**7
    assert small.parts["parameters and moments"] == B8.parameters + 5 * 10**7, "the base is in bfloat16"
    assert small.total < whole.total


def test_the_cache_of_a_server_is_spread_over_its_gpus_as_far_as_it_has_heads() -> None:
    length = config_of().model.max_length
    each = [sequence_bytes(config_of(gpus=gpus), B8) for gpus in (1, 2, 8, 16)]
    assert each == [length * token for token in (147_456, 73_728, 18_432, 18_432)]
    windows = replace(B8, kv=6 * 2 * 8 * 128, kv_window=30 * 2 * 8 * 128, window=256)
    assert sequence_bytes(config_of(), windows) == 2 * 2 * 8 * 128 * (6 * length + 30 * min(256, length))
    unknown = replace(B8, kv=0)
    assert sequences(config_of(), unknown, 80 * GIB) == 0
    assert sequences(config_of(), B8, 80 * GIB) > sequences(config_of(), B8, 40 * GIB)


def test_a_run_without_rl_has_no_servers() -> None:
    config = config_of(processes=4, memory="80G", steps=0, sft={"steps": 1, "batch": 4}, **SAVING)
    assert micro_batch_tokens(config, ranks=4) == 4096
    assert trainer_memory(config, B8).parts["weights for the servers"] == 0
    assert not any("server" in line for line in describe_memory(config, B8))
    check_memory(config, B8)


def said(config: RunConfig, sizes: Sizes = B8) -> str:
    with pytest.raises(ConfigError) as caught:
        check_memory(config, sizes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_share(config: RunConfig, share: float) -> RunConfig:
    return config.model_copy(update={"inference": config.inference.model_copy(update={"gpu_memory": share})})


def test_a_trainer_that_does_not_fit_is_refused_with_what_makes_it_fit() -> None:
    told = said(config_of(processes=8, memory="80G"))
    assert told.startswith("resources.gpu_memory='80G': expected enough for a trainer process, ")
    assert told.endswith("; set training.activation_checkpointing=full")
    told = said(config_of(processes=8, memory="32G"))
    assert told.endswith(
        "; set training.staging_device=host training.reshard_after_forward=true training.activation_checkpointing=full"
    )
    check_memory(with_share(config_of(processes=8, memory="80G", **SAVING), 0.7), B8)


def test_the_mend_of_a_trainer_that_needs_more_processes_says_how_many() -> None:
    told = said(config_of(processes=2, memory="60G"))
    assert told.endswith(
        "; set training.staging_device=host training.reshard_after_forward=true training.activation_checkpointing=full "
        "and spread the trainer over 4 processes"
    )
    config = config_of(processes=4, memory="60G", staging_device="host", **SAVING)
    check_memory(with_share(config, 0.7), B8)


def test_a_trainer_whose_replicas_do_not_fit_is_told_to_have_one() -> None:
    told = said(config_of(processes=8, memory="60G", mesh={"dp_replicate": 4}, **SAVING, staging_device="host"))
    assert told.endswith("; set training.mesh.dp_replicate=1")


def test_when_no_number_of_processes_would_do_it_says_so() -> None:
    assert "no number of trainer processes would do" in said(config_of(memory="8G"))


def test_a_server_that_does_not_fit_is_refused_with_how_many_gpus_do() -> None:
    config = config_of(processes=64, memory="45G", **SAVING)
    wide = replace(B8, kv=B8.kv * 20, trained=10**6, head_trained=False)
    told = said(config, wide)
    assert told.startswith("resources.gpu_memory='45G': expected enough for each GPU of a server, ")
    assert told.endswith("; set resources.inference.gpus=2")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.85, "expected at most 0.79: weights that arrive and CUDA take 16.5 GiB outside of it; lower it"),
        (0.1, "expected at least 0.24"),
    ],
)
def test_a_part_of_the_gpu_that_is_too_large_or_too_small_is_refused(share: float, words: str) -> None:
    config = config_of(processes=8, memory="80G", **SAVING)
    assert words in said(with_share(config, share))
    for fine in (0.24, max_gpu_memory_utilization(config, B8, 80 * GIB)):
        check_memory(with_share(config, fine), B8)


def shared(config: RunConfig, servers: int = 1) -> RunConfig:
    resources = config.resources
    inference = resources.inference.model_copy(update={"servers": servers, "servers_per_gpu": servers})
    return config.model_copy(
        update={"resources": resources.model_copy(update={"colocate": True, "inference": inference})}
    )


def test_a_gpu_that_is_shared_holds_trainer_and_servers() -> None:
    config = shared(config_of(processes=8, memory="141G", **SAVING))
    trainer, server = trainer_memory(config, B8).total, server_memory(config, B8).total
    assert f"GPU that they share, at least: {(trainer + server) / GIB:.1f} GiB" in describe_memory(config, B8)
    assert "expected at most 0.64: the trainer, weights that arrive and CUDA take 49.4 GiB" in said(config)
    check_memory(with_share(config, 0.64), B8)
    told = said(shared(config_of(processes=4, memory="80G", **SAVING)))
    assert told.startswith(
        "resources.gpu_memory='80G': expected enough for its servers, 35.0 GiB, and a trainer process, "
    )
    assert told.endswith("; set training.staging_device=host")


@pytest.mark.parametrize("servers", [1, 2])
def test_a_trainer_on_a_shared_gpu_may_have_what_it_needs_and_leaves_the_servers_theirs(servers: int) -> None:
    config, memory = shared(config_of(processes=8, **SAVING), servers), 200 * GIB
    config = with_share(config, max_gpu_memory_utilization(config, B8, memory))
    need, allowed = trainer_memory(config, B8), trainer_allowance(config, B8, memory)
    assert need.total - need.parts["CUDA"] <= allowed <= 1.02 * need.total
    beside = server_memory(config, B8).parts["weights that arrive"]
    assert allowed + config.inference.gpu_memory * memory + servers * beside < memory
    for too_small in (GIB, 100 * GIB):
        with pytest.raises(ConfigError, match="gpu_memory"):
            trainer_allowance(config, B8, too_small)


def test_a_trainer_for_clients_gets_what_servers_leave_if_that_is_anything() -> None:
    """What they will ask for is not known."""
    config = shared(config_of(processes=8))
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"enabled": True})})
    assert 0 < trainer_allowance(config, B8, 100 * GIB) < (1 - config.inference.gpu_memory) * 100 * GIB
    with pytest.raises(ConfigError, match=r"resources\.gpu_memory='1024M'.* lower inference\.gpu_memory"):
        trainer_allowance(config, B8, GIB)


def test_each_of_the_servers_of_one_gpu_takes_its_part() -> None:
    one, two = (shared(config_of(), servers) for servers in (1, 2))
    assert sequences(two, B8, 200 * GIB) < sequences(one, B8, 200 * GIB) / 2
    assert max_gpu_memory_utilization(two, B8, 400 * GIB) < max_gpu_memory_utilization(one, B8, 400 * GIB)


def test_without_a_known_memory_or_a_gpu_nothing_is_refused() -> None:
    check_memory(config_of(), B8)
    config = config_of(memory="1G")
    check_memory(config.model_copy(update={"resources": config.resources.model_copy(update={"device": "cpu"})}), B8)


def test_the_lines_say_what_is_not_known() -> None:
    unknown = replace(B8, kv=0, activations=0.0)
    lines = describe_memory(config_of(memory="80G"), unknown)
    assert "  without activations, whose size is unknown for this model" in lines
    assert not any("a token takes" in line for line in lines)
    known = describe_memory(with_share(config_of(memory="80G"), 0.7), B8)
    assert any("a token takes 144.0 KiB of its cache; 67 sequences of 4096 fit" in line for line in known)


def test_a_server_holds_the_weights_that_arrive_beside_those_that_it_serves() -> None:
    parts = server_memory(config_of(gpus=4), B8).parts
    assert (parts["weights"], parts["weights that arrive"]) == (B8.weights // 4, B8.weights // 4 + WEIGHT_CHUNK)
    alone = server_memory(config_of(processes=1, gpus=4), B8).parts
    assert alone["weights that arrive"] == B8.weights // 4, "a single trainer process sends to where the bytes belong"


def test_a_server_that_stages_on_its_host_holds_a_chunk_of_what_arrives() -> None:
    config = config_of(gpus=4)
    staged = config.model_copy(update={"inference": config.inference.model_copy(update={"staging_device": "host"})})
    assert server_memory(staged, B8).parts["weights that arrive"] == WEIGHT_CHUNK
    assert any(
        line.startswith(f"host memory of a server process: {B8.weights / 4 / GIB:.1f} GiB")
        for line in describe_memory(staged, B8)
    )
    assert not any("host memory of a server" in line for line in describe_memory(config, B8))
    adapter = config_of(gpus=4)
    lora = adapter.model.model_copy(update={"lora": adapter.model.lora.model_copy(update={"rank": 8})})
    adapter = adapter.model_copy(
        update={"model": lora, "inference": staged.inference.model_copy(update={"backend": "nccl"})}
    )
    assert server_memory(adapter, B8).parts["weights that arrive"] >= 4 * B8.trained, "adapters use the GPU"


def test_quantized_layers_take_one_byte_a_weight_and_arrive_whole_on_each_gpu_of_a_server() -> None:
    config = config_of(gpus=4)
    inference = config.inference.model_copy(update={"quantization": "fp8"})
    parts = server_memory(config.model_copy(update={"inference": inference}), B8).parts
    layers = B8.parameters - B8.outside_layers
    assert parts["weights"] == (layers + 2 * B8.outside_layers) // 4
    assert parts["weights that arrive"] == B8.weights + WEIGHT_CHUNK, "a reload reads whole tensors"


B1 = replace(B8, parameters=10**9, outside_layers=10**8, kv=28 * 2 * 4 * 64, kv_heads=4)
"""About a 1B, which drafts."""


def with_drafts(config: RunConfig, **speculation: Any) -> RunConfig:
    drafts = config.inference.speculation.model_copy(update={"method": "draft"} | speculation)
    return config.model_copy(
        update={"inference": config.inference.model_copy(update={"speculation": drafts, "quantization": "fp8"})}
    )


def test_a_drafting_model_takes_weights_and_cache_of_a_server_and_its_drafts_logits_beside_them() -> None:
    config = with_drafts(config_of(gpus=2), tokens=3)
    alone, both = server_memory(config, B8).parts, server_memory(config, replace(B8, draft=B1)).parts
    assert both["drafting model"] == B1.weights // 2, "whole numbers of 16 bits, though the policy's layers are FP8"
    assert both["one sequence"] - alone["one sequence"] == 4096 * B1.kv * 2 // 2
    assert both["logits of drafted tokens"] == 20 * 256 * 3 * B8.vocabulary, "each GPU of a server has all of them"
    wide = with_drafts(config_of(gpus=8))
    assert server_memory(wide, replace(B8, draft=B1)).parts["one sequence"] == 4096 * (B8.kv * 2 // 8 + B1.kv * 2 // 4)
    many = server_memory(with_drafts(config, tokens=128), B8).parts
    assert many["logits of drafted tokens"] == 20 * 8192 * B8.vocabulary, "a step has no more tokens"
    lookup = with_drafts(config, method="ngram", tokens=3)
    assert server_memory(lookup, B8).parts["logits of drafted tokens"] == both["logits of drafted tokens"]
    plain = server_memory(config_of(gpus=2), B8).parts
    assert plain["drafting model"] == plain["logits of drafted tokens"] == 0


def test_a_drafting_model_leaves_room_for_fewer_sequences_and_the_lines_say_so() -> None:
    config, sizes = with_share(with_drafts(config_of(memory="80G")), 0.7), replace(B8, draft=B1)
    (needed,) = (line for line in describe_memory(config, sizes) if line.startswith("GPU of a server"))
    assert "drafting model 1.9" in needed
    assert "logits of drafted tokens 2.9" in needed
    assert any("a token takes 172.0 KiB of its cache" in line for line in describe_memory(config, sizes))
    left = int(0.7 * 80 * GIB) - server_memory(config, B8).parts["weights"] - 3 * GIB
    assert sequences(config, B8, 80 * GIB) == left // sequence_bytes(config, B8)
    assert sequences(config, sizes, 80 * GIB) == (left - B1.weights) // sequence_bytes(config, sizes)


def test_a_drafting_model_that_does_not_fit_is_refused() -> None:
    config = with_share(with_drafts(config_of(processes=8, memory="80G", **SAVING)), 0.5)
    check_memory(config, replace(B8, draft=B1))
    large = replace(B1, parameters=20_000_000_000)
    told = said(config, replace(B8, draft=large))
    assert told.startswith("inference.gpu_memory=0.5: expected at least 0.62, for weights, a drafting model, engine")
    larger = replace(B1, parameters=35_000_000_000)
    told = said(config, replace(B8, draft=larger))
    assert told.startswith("resources.gpu_memory='80G': expected enough for each GPU of a server, ")
    assert "drafting model 65.2" in told
    assert told.endswith("; set resources.inference.gpus=2")
    vast = replace(B1, parameters=35 * 10**10)
    assert said(config, replace(B8, draft=vast)).endswith("; choose a smaller drafting model")
    told = said(with_share(config, 0.9), replace(B8, draft=B1))
    assert "weights that arrive, logits of drafted tokens and CUDA take" in told


def test_the_sizes_of_a_run_have_those_of_its_drafting_model() -> None:
    counted = {"tiny": B8, "/models/small": B1}
    run = with_drafts(config_of(), model="/models/small")
    assert sizes_of_run(run, lambda model: counted[model.path]) == replace(B8, draft=B1)
    assert sizes_of_run(with_drafts(run, method="ngram"), lambda model: counted[model.path]).draft is None
    assert sizes_of_run(config_of(steps=0, sft={"steps": 1}), lambda model: counted[model.path]) == B8

    def refuse(model: ModelConfig) -> Sizes:
        if model.path == "tiny":
            return B8
        raise ConfigError("model.path", model.path, "a model that transformers supports", "none")

    with pytest.raises(ConfigError, match=r"inference\.speculation\.model='/models/small': expected a model that"):
        sizes_of_run(run, refuse)


def test_a_server_that_only_fits_without_a_second_copy_is_told_to_stage_on_its_host() -> None:
    wide = replace(B8, trained=10**6, head_trained=False, parameters=60 * 10**9)
    told = said(config_of(processes=64, gpus=8, memory="30G", **SAVING), wide)
    assert told.endswith("; set inference.staging_device=host")


def test_each_replica_could_publish_and_only_its_processes_share_the_weights_that_wait() -> None:
    one, two = (config_of(processes=8, mesh={"dp_replicate": count}) for count in (1, 2))
    assert trainer_memory(one, B8).parts["weights for the servers"] == 2 * B8.weights // 8
    assert trainer_memory(two, B8).parts["weights for the servers"] == 2 * B8.weights // 4


def test_spread_experts_are_gathered_by_none_and_tokens_travel_instead() -> None:
    experts = {"experts": 6_000_000_000, "experts_layer": 170_000_000, "experts_per_token": 8}
    mixture = replace(B8, outside_layers=10_000_000, vocabulary=1000, logits=1 << 20, **experts)
    alone, spread = config_of(processes=8, **SAVING), config_of(processes=8, mesh={"ep": 4}, **SAVING)
    assert describe_mesh(spread) == "dp_replicate 1 × dp_shard 8; experts: efsdp 2 × ep 4"
    before, after = trainer_memory(alone, mixture).parts, trainer_memory(spread, mixture).parts
    elsewhere = 170_000_000 * 3 // 4  # parameters of a layer, of two gathered and one reduced at a time
    assert before["copies in compute type"] - after["copies in compute type"] == 2 * 2 * elsewhere
    assert before["gradients of a layer"] - after["gradients of a layer"] == 6 * elsewhere
    assert after["tokens on their way to experts"] == 2 * 2 * 16_384 * 8 * mixture.hidden * 2
    assert {name for name in before if before[name] != after[name]} == {
        "copies in compute type",
        "gradients of a layer",
        "tokens on their way to experts",
    }
    balanced = spread.model_copy(update={"optim": OptimConfig(router_aux_loss_coef=0.01)})
    logits = trainer_memory(balanced, replace(mixture, experts_of_layer=128)).parts["logits of routers"]
    assert (after["logits of routers"], logits) == (0, 2 * 4 * 16_384 * 128 * mixture.layers)
    whole = trainer_memory(config_of(processes=8, mesh={"ep": 4}), mixture).parts
    assert whole["gradients"] == 4 * (8_000_000_000 - 4_500_000_000)
    assert whole["copies in compute type"] == 2 * (8_000_000_000 - 4_500_000_000)


def test_spread_experts_are_proposed_before_more_processes() -> None:
    wide = replace(B8, layer=1_000_000_000, experts_layer=900_000_000, experts_of_layer=6, experts_per_token=2)
    with pytest.raises(ConfigError) as refused:
        check_memory(config_of(processes=8, memory="34G", staging_device="host", **SAVING), wide)
    saving = "training.staging_device=host training.reshard_after_forward=true training.activation_checkpointing=full"
    assert str(refused.value).endswith(f"; set {saving} training.mesh.ep=2")


def test_processes_that_share_a_line_have_a_part_of_its_tokens_each_and_shard_the_model_over_all() -> None:
    shared, alone = config_of(processes=8, mesh={"cp": 4}, **SAVING), config_of(processes=8, **SAVING)
    assert describe_mesh(shared) == "dp_replicate 1 × dp_shard 2 × cp 4"
    before, after = trainer_memory(alone, B8).parts, trainer_memory(shared, B8).parts
    assert {name for name in before if before[name] != after[name]} == {"tables of shared rows"}
    assert after["tables of shared rows"] == 4 * 8 * 4 * 16_384
    few = config_of(processes=8, mesh={"cp": 4}, prompts_per_step=1, micro_batch_tokens=1 << 20)
    assert micro_batch_tokens(few, 8) == 4 * 4096 // 4  # 8 samples, of which two ranks-of-four get four each


@pytest.mark.parametrize(("moment_type", "saved"), [("bfloat16", 4), ("float8", 8 - 2 * (1 + 4 / 128))])
def test_rounded_moments_take_less_memory(moment_type: MomentType, saved: float) -> None:
    full = config_of(processes=1)
    rounded = full.model_copy(update={"optim": OptimConfig(state_dtype=moment_type)})
    before, after = trainer_memory(full, B8).parts, trainer_memory(rounded, B8).parts
    assert before["parameters and moments"] - after["parameters and moments"] == int(saved * B8.trained)
    assert host_memory(full, B8).total > host_memory(rounded, B8).total


@pytest.mark.parametrize("offloads", [False, True])
def test_a_critic_beside_adapters_is_gathered_whole_and_is_the_largest_model(offloads: bool) -> None:
    adapters = replace(B8, trained=40_000_000, head_trained=False)
    config = config_of(processes=1, loss={"advantage_estimator": "gae"}, offload_idle_models=offloads)
    critic = (12 + 4) * adapters.parameters  # float32 with moments and gradients
    policy = 2 * (adapters.parameters - adapters.trained) + 16 * adapters.trained
    parts, grpo = trainer_memory(config, adapters).parts, trainer_memory(config_of(processes=1), adapters).parts
    assert parts["copies in compute type"] == 2 * adapters.parameters
    assert grpo["copies in compute type"] == 2 * adapters.trained
    assert parts["other models"] == critic - offloads * policy
    waiting = host_memory(config, adapters).parts["models that wait"]
    assert waiting == offloads * (policy - 4 * adapters.trained + critic)


def test_a_replica_takes_the_memory_of_a_trainer_of_its_ranks() -> None:
    replicated = config_of(processes=8, mesh={"dp_replicate": 2}, **SAVING)
    assert describe_mesh(replicated) == "dp_replicate 2 × dp_shard 4"
    four, eight = (config_of(processes=count, **SAVING) for count in (4, 8))
    parts = trainer_memory(replicated, B8).parts
    for part in ("parameters and moments", "gradients"):
        assert parts[part] == trainer_memory(four, B8).parts[part] > trainer_memory(eight, B8).parts[part]
