"""What the oracle and the ranks compute both: the recipes (what is trained for), the model, and the rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pipeline.config import LoraConfig, LossConfig, ModelConfig, OptimConfig
from pipeline.train.batching.sequences import Batch, Normalization, TrainSequence
from pipeline.train.loss_specs import SFT, LossSpec, ValueLoss
from pipeline.train.worker_spec import ModelSpec
from tests.support.models.tiny import VOCABULARY, write_tiny
from tests.support.oracle.layers import experts_after

STEPS = 3
LAYERS, HEADS, GROUPS, SIZE = 2, 2, 1, 32
ALPHA, MAX_LENGTH = 6.0, 12
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""Of each layer of the mixture."""
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
Family = Literal["", "glm", "gpt_oss", "deepseek", "mixtral"]
"""A mixture's kind; the empty one is Qwen3-MoE's."""
FAMILIES: dict[Family, dict[str, Any]] = {
    "": {"model_type": "qwen3_moe", "norm_topk_prob": True, **EXPERTS},
    "glm": {
        "model_type": "glm4_moe",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        **ROUTED,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "sliding_window": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-6,
    },
    "deepseek": {
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 10,
        "num_nextn_predict_layers": 0,
        **ROUTED,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-6,
    },
}


def expert_count(family: Family) -> int:
    """Experts of a layer of the mixture."""
    settings = FAMILIES[family]
    return int(
        next(settings[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in settings)
    )


BALANCED: tuple[Family, ...] = ("glm", "deepseek")
"""Families that are balanced by biases, and whose first layer has no experts."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
TARGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mixture": (_ATTENTION, ()),
    "glm": (_ATTENTION, ()),
    "gpt_oss": (_ATTENTION, (*_ATTENTION, "gate_up_proj", "down_proj")),
    "deepseek": (_LATENT, (*_LATENT, "gate_proj", "up_proj", "down_proj")),
    "mixtral": (_ATTENTION, (*_ATTENTION, "w1", "w2", "w3")),
}
"""The layers of each mixture that have adapters: attention's, and with the experts; none named are the default ones."""
BIAS_RATE = 0.01
AUX = 0.3
"""The coefficient of the auxiliary loss, where there is one."""
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.5)
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Recipe:
    """What a model is trained for.

    Attributes:
        objective, normalize, temperature: of the loss.
        old_logprobs: whether the ratio is taken over other log-probabilities than those of the sampling policy.
        top_k: likely tokens of a teacher at each counted one; some are absent.
        lora: rank of the adapters that alone are trained; 0: all parameters are.
        experts: whether a mixture's experts have adapters too.
    """

    objective: LossSpec
    normalize: Normalization
    temperature: float = 1.0
    old_logprobs: bool = False
    top_k: int = 0
    lora: int = 0
    experts: bool = True

    @property
    def model(self) -> Literal["policy", "critic"]:
        return "critic" if isinstance(self.objective, ValueLoss) else "policy"


def _loss(name: str, **settings: object) -> LossConfig:
    """A loss with its ratio over the sampling policy, or over the rows' old log-probabilities if they have some."""
    return LossConfig.model_validate({"name": name, "old_logprobs": "sampler", "tis": "none", **settings})


RECIPES: dict[str, Recipe] = {
    "reinforce": Recipe(_loss("reinforce", ratio_cap=1.2), "fixed", 1.3),
    "ppo": Recipe(_loss("ppo", kl=0.2, entropy=0.1), "prompt", 0.8, old_logprobs=True),
    "grpo": Recipe(_loss("grpo", clip_low=0.2, clip_high=0.3), "token", 0.8),
    "gspo": Recipe(_loss("gspo", clip_low=0.1, clip_high=0.2), "sequence"),
    "dr_grpo": Recipe(_loss("dr_grpo", kl=0.1, kl_estimator="k2"), "fixed"),
    "dapo": Recipe(
        _loss("dapo", clip_high=0.28, tis="truncate", tis_cap=1.3, sequence_mask=0.25), "token", old_logprobs=True
    ),
    "cispo": Recipe(
        _loss("cispo", tis="mask", tis_low=1 / 1.4, tis_cap=1.4, entropy=0.1), "token", 0.9, old_logprobs=True
    ),
    "rloo": Recipe(_loss("rloo", ratio_cap=1.5), "sequence", 1.1),
    "reinforce_pp": Recipe(_loss("reinforce_pp", kl=0.3, kl_in="reward", kl_estimator="k1"), "token"),
    "dro": Recipe(_loss("dro", beta=0.2, kl=0.1, kl_estimator="k1"), "prompt", old_logprobs=True),
    "sft": Recipe(SFT, "token"),
    "value": Recipe(ValueLoss(clip=0.4), "token"),
    "value_free": Recipe(ValueLoss(clip=0.0), "sequence"),
    "lora": Recipe(_loss("grpo", entropy=0.05), "token", 0.8, lora=2),
    "lora_sft": Recipe(SFT, "prompt", lora=3, experts=False),
    "distillation": Recipe(_loss("reinforce", kl=0.7), "token", top_k=3),
}


def oracle_name(name: str) -> str:
    """A parameter's name as the oracle has it: that of a Hugging Face model, of Mixtral in the words of the others."""
    for own, usual in _MIXTRAL.items():
        name = name.replace(f".{own}.", f".{usual}.")
    return name


_MIXTRAL = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_models(folder: Path) -> None:
    """The model whose head is its embedding, one with a head of its own, and mixtures of experts."""
    write_model(folder / "tied", tied=True)
    write_model(folder / "untied", tied=False)
    for family, settings in FAMILIES.items():
        path = folder / (family or "mixture")
        write_model(path, tied=False, **settings)
        _draw_biases(path / "model.safetensors")


def write_model(path: Path, tied: bool, **changed: Any) -> None:
    """A tiny Qwen3 whose weights are large enough that attention and positions matter."""
    size = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE}
    large = {"max_position_embeddings": 64, "tie_word_embeddings": tied, "initializer_range": 0.2}
    write_tiny(path, 5, **size | large | changed)


def _draw_biases(file: Path) -> None:
    """Give biases, which start at 0, numbers that matter: those of routers change what is chosen."""
    tensors = load_file(file)
    drawn_ones = {name: drawn(name, tensor.shape) for name, tensor in tensors.items() if name.endswith("bias")}
    save_file(tensors | drawn_ones, file, {"format": "pt"})


def model_config(path: Path, lora: int = 0, experts: bool = True) -> ModelConfig:
    targets = targets_of(path, experts)
    settings: dict[str, Any] = {"targets": targets} if targets else {}
    return ModelConfig(path=str(path), init="pretrained", lora=LoraConfig(rank=lora, alpha=ALPHA, **settings))


def targets_of(path: Path, experts: bool) -> tuple[str, ...]:
    """The layers of a model from `write_models` that have adapters; none named are the default ones."""
    return TARGETS.get(path.name, ((), ()))[experts]


def policy_spec(path: Path, **changed: Any) -> ModelSpec:
    """The loss scale is one at which no gradient of these small batches overflows in float16."""
    common = {"kind": "policy", "model": model_config(path), "optim": OPTIM, "steps": STEPS, "loss_scale": 1 << 8}
    return ModelSpec(**{**common, **changed})


def make_rows(name: str = "grpo") -> list[TrainSequence]:
    """Ten ragged rows of three prompts, each of two or three tokens: one row is no more than that, one counts nothing,
    one has several turns, one an advantage for each token, and the last has the tokens of another."""
    recipe, draw = RECIPES[name], np.random.default_rng(3)
    rows: list[TrainSequence] = []
    for index, length in enumerate((3, 11, 2, 7, 5, 9, 4, 6, 8, 6)):
        mask = np.ones(length, np.uint8)
        mask[: 1 + index % 2] = 0
        if index == 4:
            mask[:] = 0
        if index == 5:
            mask[3:6] = 0
        tokens = draw.integers(0, VOCABULARY, length).astype(np.int32)
        if index == 9:
            tokens = rows[7].tokens
        elif index % 3:
            alike = 3 if index > 2 else 2
            tokens[:alike] = rows[-1].tokens[:alike]
        of_tokens = draw.normal(size=(5, length)).astype(np.float32)
        sampler_logprobs = of_tokens[0] * 0.7 - 3
        row = TrainSequence(
            tokens=tokens,
            mask=mask,
            advantages=of_tokens[1] if index == 8 else float(of_tokens[1, 0]),
            sampler_logprobs=sampler_logprobs,
            old_logprobs=sampler_logprobs + of_tokens[2] * 0.4 if recipe.old_logprobs else None,
            reference=of_tokens[3] * 0.7 - 3,
            values=of_tokens[4] if recipe.model == "critic" else None,
            returns=of_tokens[2] + of_tokens[4] if recipe.model == "critic" else None,
            prompt=min(index // 3, 2),
        )
        rows.append(_taught(row, recipe.top_k) if recipe.top_k else row)
    return rows


def _taught(row: TrainSequence, top_k: int) -> TrainSequence:
    """The row with likely tokens of a teacher, none of them the counted one: 6, 12 … after it. Every fifth counted one
    has one fewer."""
    places = np.flatnonzero(row.mask)
    ids = (row.tokens[places, None] + 6 * np.arange(1, top_k + 1)) % VOCABULARY
    logprobs = np.random.default_rng(len(row)).normal(size=ids.shape) * 0.5 - 3
    logprobs[2::5, -1] = -np.inf
    return replace(row, top_ids=ids.astype(np.int32), top_logprobs=logprobs.astype(np.float32))


def replayed_rows(name: str) -> list[TrainSequence]:
    """The rows of `make_rows` with the experts of each token, other ones than routers choose."""
    return [replace(row, routed_experts=_experts_of(row.tokens.tolist())) for row in make_rows(name)]


def _experts_of(tokens: list[int]) -> NDArray[np.uint8]:
    ends, taken = range(1, len(tokens) + 1), EXPERTS["num_experts_per_tok"]
    rows = [[experts_after(tokens[:end], layer, taken) for layer in range(LAYERS)] for end in ends]
    return np.array(rows, np.uint8)


def make_batch(name: str = "grpo", *, replayed: bool = False) -> Batch:
    recipe = RECIPES[name]
    rows = replayed_rows(name) if replayed else make_rows(name)
    return Batch.of(rows, recipe.normalize, temperature=recipe.temperature, max_length=MAX_LENGTH)


def drawn(name: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """The numbers that a parameter which no file has (a value head, adapters) starts with: none of them 0."""
    return (np.random.default_rng(crc32(name.encode())).normal(size=shape) * 0.2).astype(np.float32)


def start_of(recipe: Recipe, path: Path) -> tuple[Arrays, Arrays]:
    """Trained and frozen parameters before the first step, under Hugging Face names (adapters: as peft ends them)."""
    file: Arrays = {oracle_name(name): array for name, array in load_file(path / "model.safetensors").items()}
    if recipe.lora:
        targets = targets_of(path, recipe.experts)
        return _adapters(file, recipe.lora, tuple(_MIXTRAL.get(target, target) for target in targets)), file
    if recipe.model == "critic":
        width = file["model.norm.weight"].shape[0]
        file.pop("lm_head.weight", None)
        return file | {"head.weight": drawn("head.weight", (1, width)), "head.bias": drawn("head.bias", (1,))}, {}
    return file, {}


def _adapters(file: Arrays, rank: int, targets: tuple[str, ...]) -> Arrays:
    made: Arrays = {}
    for layer, shape in _adapted(file, targets):
        for part, of_part in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
            made[f"{layer}.{part}.weight"] = drawn(f"{layer}.{part}.weight", of_part)
    return made


def _adapted(file: Arrays, targets: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The adapted matrices and their shapes, [out, in]: linear layers, and the experts of stacks [experts, in, out]."""
    for name, array in file.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and (layer.rpartition(".")[-1] in targets if targets else layer.endswith("_proj")):
            yield layer, array.shape
        elif layer.endswith(".experts") and leaf in targets:
            yield from ((f"{layer}.{expert}.{leaf}", array.shape[:0:-1]) for expert in range(len(array)))
