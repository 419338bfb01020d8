"""How a model gets its first weights: what is refused by name, and what every rank of any world holds alike."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import LoraConfig, ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout
from pipeline.train.model import fsdp, public_tensors, row_shards, safetensors_files
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.models import build_model, build_on_meta, materialize
from pipeline.train.model.safetensors_files import TensorFiles
from pipeline.train.model.weight_loading import WeightLoader
from pipeline.train.worker_spec import ModelKind, ModelSpec
from tests.fakes.full_disk import room_for
from tests.fakes.shards import rank_of
from tests.support.models.tiny import write_tiny
from tests.support.models.written import whole_blocks

SIZE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 19, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = LATENT | {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
}
DOWN = "model.layers.1.mlp.down_proj.weight"


def config_in(folder: Path, model_type: str = "qwen3", **keys: Any) -> Path:
    """A directory with a config alone."""
    folder.mkdir(exist_ok=True)
    tree = {"model_type": model_type, "tie_word_embeddings": False, **SIZE, **HEADS, **TOKENS, **keys}
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def weights_in(folder: Path, model_type: str = "qwen3", **keys: Any) -> Path:
    """A directory that transformers itself wrote, with lasting buffers that are not what they start with."""
    config = AutoConfig.from_pretrained(config_in(folder, model_type, **keys))
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(config)
    for name, tensor in network.state_dict().items():
        if not any(name == each for each, _ in network.named_parameters()):
            tensor.copy_(torch.randn_like(tensor))
    network.save_pretrained(folder)
    return folder


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def built(folder: Path, kind: ModelKind = "policy", **keys: Any) -> Any:
    return build_model(ModelConfig(path=str(folder), **keys), 7, kind).network


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return weights_in(tmp_path / "model")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tensors: tensors.pop(DOWN), rf"not in its files: {DOWN}"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"not in its files: lm_head\.weight"),
        (lambda tensors: [tensors.pop(n) for n in list(tensors) if ".mlp." in n], r"not in its files.* and 1 more"),
        (lambda tensors: tensors.update({"score.weight": torch.ones(1)}), r"also in its files: score\.weight"),
        (lambda tensors: tensors.update({DOWN: torch.ones(16, 25)}), rf"{DOWN} to be \[16, 24\].*not \[16, 25\]"),
    ],
    ids=["a matrix", "a head", "many", "a stranger", "a shape"],
)
def test_a_directory_whose_tensors_are_not_the_models_is_refused_by_their_names(
    folder: Path, edit: Callable[[dict[str, Tensor]], object], named: str
) -> None:
    change(folder, edit)
    with pytest.raises(ConfigError, match=named):
        built(folder)


def test_a_parameter_that_no_file_fills_is_refused_whatever_wraps_it(folder: Path) -> None:
    config = ModelConfig(path=str(folder))
    wrapped = build_on_meta(config)
    layer = wrapped.network.model.layers[1].mlp
    layer.down_proj = torch.nn.Sequential(layer.down_proj)
    with pytest.raises(ConfigError, match=r"not in its files: model\.layers\.1\.mlp\.down_proj\.0\.weight"):
        materialize(wrapped, WeightLoader(config), config, 7, torch.device("cpu"))


def test_layers_that_the_config_does_not_have_are_refused(folder: Path) -> None:
    config_in(folder, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"also in its files: model\.layers\.1\..* and 6 more"):
        built(folder)


@pytest.mark.parametrize("lost", ["experts.2.up_proj", "experts.2."])
def test_an_expert_that_is_missing_is_named(tmp_path: Path, lost: str) -> None:
    folder = weights_in(tmp_path, "qwen3_moe", **EXPERTS)
    change(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if f"layers.0.mlp.{lost}" in n])
    with pytest.raises(ConfigError, match=r"not in its files.*layers\.0\.mlp\.experts\.2\."):
        built(folder)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_head_may_be_there_once_under_either_name(tmp_path: Path, kept: str) -> None:
    folder = weights_in(tmp_path, tie_word_embeddings=True)
    truth = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lambda tensors: tensors.update({kept: tensors.pop("model.embed_tokens.weight")}))
    network = built(folder)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert torch.equal(network.lm_head.weight, truth)


def test_a_tied_head_that_is_there_twice_must_be_the_same(tmp_path: Path) -> None:
    folder = weights_in(tmp_path, tie_word_embeddings=True)
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    built(folder)
    change(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight and model\.embed_tokens\.weight to be equal; set tie_word_embed"
    ):
        built(folder)


def test_a_critic_needs_no_head(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    critic = built(folder, "critic")
    assert torch.equal(critic.layers[1].mlp.down_proj.weight, load_file(folder / "model.safetensors")[DOWN])


def test_files_that_are_torn_or_not_there_are_refused_with_a_remedy(folder: Path) -> None:
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{path} cannot be read: .*; copy the whole model"):
        built(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{folder} has no model\.safetensors.*No such file.*; model\.path must"):
        built(folder)
    for text in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{index} has no weight_map.*; copy the whole model"):
            built(folder)
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(
        CheckpointError, match=rf"{folder}/model-1\.safetensors cannot be read: .*; copy the whole model"
    ):
        built(folder)


@pytest.mark.parametrize(
    "read",
    [lambda files: files.whole(DOWN), lambda files: files.slice(DOWN)[:1]],
    ids=["whole", "slice"],
)
def test_a_file_that_is_cut_while_it_is_read_is_named_with_a_remedy(
    folder: Path, read: Callable[[safetensors_files.TensorFiles], Tensor]
) -> None:
    path = folder / "model.safetensors"
    files = safetensors_files.TensorFiles(folder)
    with path.open("r+b") as file:
        file.truncate(8)
    with pytest.raises(CheckpointError, match=rf"{path} cannot be read: .*; copy the whole model"):
        read(files)


def test_a_file_that_the_disk_does_not_take_is_named_with_a_remedy(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1000)}
    layout = WeightLayout(tuple(Parameter.of(name, tensor) for name, tensor in tensors.items()))
    with (
        room_for(1000),
        pytest.raises(CheckpointError, match=rf"{tmp_path}/model\.safetensors cannot be written: .*; free disk space"),
    ):
        safetensors_files.write_tensors(tmp_path, layout, whole_blocks(tensors))


FAMILIES = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", EXPERTS),
    ("mixtral", {"num_local_experts": 3}),
    ("deepseek_v3", ROUTED),
    ("gemma3_text", {"tie_word_embeddings": True}),
    ("phi3", {}),
]


def family(each: tuple[str, dict[str, Any]]) -> str:
    return f"{each[0]}{'-tied' if each[1].get('tie_word_embeddings') else ''}"


@pytest.fixture(params=FAMILIES, ids=family)
def any_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name, keys = request.param
    return weights_in(tmp_path / "model", name, **keys)


def shards(folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Iterator[ModelWorker]:
    """The policy as each rank of a world has it."""
    monkeypatch.setattr(fsdp, "LAYER_UNIT", 1)
    for rank in range(ranks):
        with rank_of(ranks, rank) as mesh:
            yield ModelWorker(ModelSpec("policy", ModelConfig(path=str(folder), **keys), seed=7), mesh)


def state_of(network: Any) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_shards_together_are_what_transformers_reads(
    any_model: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = state_of(AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32))
    parts = [
        {name: local(tensor.detach()) for name, tensor in state_of(each.model.network).items()}
        for each in shards(any_model, ranks, monkeypatch)
    ]
    assert parts[0].keys() == truth.keys()
    for name, tensor in truth.items():
        held = [part[name] for part in parts]
        whole = torch.cat(held) if isinstance(tensor, torch.nn.Parameter) else held[0]
        assert torch.equal(whole, tensor), name


@pytest.mark.parametrize("lora", [0, 2])
def test_random_weights_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, lora: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config_in(tmp_path, "qwen3_moe", **EXPERTS)
    settings = {"init": "random", "lora": LoraConfig(rank=lora, targets=("q_proj", "o_proj"))}
    worlds = []
    for ranks in (1, 2, 3):
        parts = [dict(each.model.network.named_parameters()) for each in shards(folder, ranks, monkeypatch, **settings)]
        worlds.append({name: torch.cat([local(part[name].detach()) for part in parts]) for name in parts[0]})
    for world in worlds[1:]:
        assert world.keys() == worlds[0].keys()
        assert all(torch.equal(world[name], worlds[0][name]) for name in world)


def test_random_weights_are_spread_as_those_of_transformers(tmp_path: Path) -> None:
    folder = config_in(tmp_path, "qwen3_moe", **EXPERTS, hidden_size=64, vocab_size=199, initializer_range=0.3)
    found = state_of(built(folder, init="random"))
    torch.manual_seed(1)
    truth = state_of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        near = 5 / tensor.numel() ** 0.5
        assert found[name].mean().item() == pytest.approx(tensor.mean().item(), abs=near * 0.3), name
        assert found[name].std().item() == pytest.approx(tensor.std().item(), rel=near), name
    assert found["model.embed_tokens.weight"][0].abs().max() == 0, "the padding's embedding"
    assert not torch.equal(*(found[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1)))


def test_what_transformers_fills_while_it_makes_a_network_is_filled(tmp_path: Path) -> None:
    keys = {"full_attention_interval": 2, "shared_expert_intermediate_size": 8, **EXPERTS}
    folder = config_in(tmp_path, "qwen3_next", **keys, linear_num_value_heads=2, linear_num_key_heads=1)
    assert all(tensor.isfinite().all() for tensor in state_of(built(folder, init="random")).values())


@pytest.mark.parametrize("most", [1 << 30, 2000], ids=["one file", "several files"])
def test_a_model_is_written_as_it_was_read(any_model: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "FILE_BYTES", most)
    monkeypatch.setattr(row_shards, "BLOCK_BYTES", most // 10)
    out = any_model.parent / "out"
    for one in shards(any_model, 1, monkeypatch):
        one.save_hf_model(out)
        held = {name: local(tensor.detach()) for name, tensor in state_of(one.model.network).items()}
    assert (out / "model.safetensors.index.json").is_file() == (most == 2000)
    written = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    truth = load_file(any_model / "model.safetensors")
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name]) for name in truth)
    again = state_of(AutoModelForCausalLM.from_pretrained(out))
    assert all(torch.equal(again[name], tensor) for name, tensor in held.items())


def test_blocks_of_rows_make_the_same_files_as_whole_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "FILE_BYTES", 2000)
    monkeypatch.setattr(row_shards, "BLOCK_BYTES", 200)
    for one in shards(weights_in(tmp_path / "model", "qwen3_moe", **EXPERTS), 1, monkeypatch):
        blocks = [(name, first, rows.clone()) for name, first, rows in one.public.blocks(torch.float32)]
        tensors = {name: tensor.clone() for name, tensor in one.full_parameters()}
    assert len(blocks) > len(tensors)
    written = []
    for folder, parts in ((tmp_path / "whole", whole_blocks(tensors)), (tmp_path / "blocks", reversed(blocks))):
        folder.mkdir()
        safetensors_files.write_tensors(folder, one.layout, parts)
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert written[0] == written[1]
    with pytest.raises(CheckpointError, match=r"is incomplete: its header has \d+ bytes of .* more than came"):
        safetensors_files.write_tensors(tmp_path, one.layout, blocks[1:])


def test_the_layout_says_what_is_gathered(any_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in shards(any_model, 1, monkeypatch, dtype="bfloat16"):
        views = dict(one.layout.views(one.layout.pack(one.full_parameters())))
    assert views.keys() == load_file(any_model / "model.safetensors").keys()
    assert {str(view.dtype) for name, view in views.items() if name.endswith(".weight")} == {"torch.bfloat16"}


def test_a_model_that_cannot_be_written_has_been_gathered_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other ranks would wait for a rank that gave up."""
    calls = []

    def gathered(tensor: Tensor, dtype: torch.dtype, group: object, rows: slice) -> Tensor:
        calls.append(tensor)
        return local(tensor.detach())

    def full(tensor: Tensor) -> memoryview:
        raise OSError("disk full")

    monkeypatch.setattr(public_tensors, "gather", gathered)
    monkeypatch.setattr(safetensors_files, "_bytes", full)
    for one in shards(folder, 1, monkeypatch):
        with pytest.raises(CheckpointError, match="disk full"):
            one.save_hf_model(folder.parent / "out")
        assert len(calls) == len(one.layout.parameters) > 1


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    folder = write_tiny(tmp_path / "mixture", 5, model_type="qwen3_moe", **experts)
    reads: list[str] = []
    whole = TensorFiles.whole

    def read(files: TensorFiles, key: str) -> Tensor:
        reads.append(key)
        return whole(files, key)

    monkeypatch.setattr(TensorFiles, "whole", read)
    for rank, one in enumerate(shards(folder, ranks, monkeypatch)):
        share = -(-4 // ranks)
        own = {*range(4)[rank * share : (rank + 1) * share]} or {0}
        found = {int(match[1]) for key in reads if (match := re.search(r"experts\.(\d+)\.", key))}
        assert found == own, f"of rank {rank}"
        assert len(reads) == len(own) * 3 * one.model.network.config.num_hidden_layers
        reads.clear()
