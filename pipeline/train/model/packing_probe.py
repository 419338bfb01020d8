"""The check that packed and padded rows of a model have the log-probabilities of each row alone.

Only `packed_attention` keeps rows apart, so a layer with a recurrent state or a convolution along the line would carry
it from one row into the next. The check replaces a list of model types: a small copy of the model, with the same kinds
of layers and random weights, computes the same rows packed (two of them with a shared prefix), padded, and one by one
with the attention of transformers. It uses a copy, since a shard of the model cannot run alone, its compiled layers
would be compiled for a few tokens, and the result depends on the architecture, not on the weights. Promises that rows
are packed only if the check succeeded. Must not know ranks or losses.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, one_line
from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model.collate import collate
from pipeline.train.model.models import PolicyModel, build_model
from pipeline.train.model.tiny_config import BOUND, TINY_SIZES, VOCABULARY, shrink_config

log = logging.getLogger(__name__)

TOLERANCE = 1e-2
"""Largest accepted difference in nats. Rounding to float32 causes about 1e-6, and 2e-3 after thirty layers; a row that
sees the row before it, 0.1 and more."""
_DRAWS = 8
"""Repetitions for a model with random numbers in its forward pass: a single result may be right by chance."""
_LENGTHS = (9, 5, 12)
"""Lengths of the rows: longer than the windows of `tiny_config`, and on both sides of its `BOUND`."""
_NOISE = 0.3
_SHARED = 6
"""Length of the prefix that two of the rows share."""


@dataclass(frozen=True)
class PackingProbe:
    """The largest difference in nats between the log-probabilities of packed or padded rows, and of each row alone."""

    packed: float
    padded: float


def supports_packing(model: ModelConfig, requested: bool) -> bool:
    """Whether rows of this model are packed: as `requested` if the check succeeds, else padded, with a warning.

    `ConfigError` for a model whose padded rows are wrong too: it cannot be trained.
    """
    config = Path(model.path) / "config.json"
    probe = probe_packing(config.read_text()) if config.is_file() else "it has no config.json"
    if isinstance(probe, str):
        why = f"it could not be shown that {model.path} may be packed: {probe}"
    elif probe.packed <= TOLERANCE:
        return requested
    elif probe.padded <= TOLERANCE:
        why = f"packed rows of {model.path} see the row before them, which changes them by {probe.packed:.2g} nats"
    else:
        value = f"{model.path}, whose log-probabilities come out wrong by {probe.padded:.2g} nats"
        raise ConfigError("model.path", value, "a decoder with plain causal attention", "choose another model")
    if requested:
        log.warning("rows are padded, not packed: %s; set training.packing=false to avoid this warning", why)
    return False


@cache
def probe_packing(config: str) -> PackingProbe | str:
    """The probe of the architecture of a config.json, from its text, or the reason why it could not run.

    Raises `ConfigError` for an architecture that is refused in every layout.
    """
    why = ""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        for size in TINY_SIZES:
            try:
                return measure_packing(shrink_config(AutoConfig.from_pretrained(folder), size))
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 (any family may refuse any size, in its own way)
                why = one_line(error)[:200]
    return why


def measure_packing(config: Any) -> PackingProbe:
    """The probe of a config's architecture. The whole model is built, so the config must be a small one."""
    with TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "config.json")
        policy = build_model(ModelConfig(path=folder, init="random", max_length=BOUND), seed=0)
    assert isinstance(policy, PolicyModel)
    _redraw(policy)
    rows = _rows()
    with torch.no_grad():
        packed, padded = (_draws(policy, rows, how) for how in ("shared", "padded"))
        alone = torch.cat([_alone(policy.network, row) for row in rows])
    return PackingProbe(*((draws - alone).abs().max().item() for draws in (packed, padded)))


def _redraw(policy: PolicyModel) -> None:
    """Draw weights with which every layer influences the result.

    Matrices keep the scale of their input; initial weights of models are often smaller. Vectors, which scale or shift,
    start with ones or zeros, which would hide their effect, so they get noise.
    """
    matrices, vectors = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=matrices)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=vectors), alpha=_NOISE)


def _rows() -> list[TrainSequence]:
    """Rows of random tokens; the last one shares a prefix with the first."""
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, VOCABULARY, length).astype(np.int32) for length in _LENGTHS]
    tokens[-1][:_SHARED] = tokens[0][:_SHARED]
    return [TrainSequence(row, (np.arange(len(row)) > 0).astype(np.uint8)) for row in tokens]


def _draws(policy: PolicyModel, rows: list[TrainSequence], how: Packing) -> Tensor:
    """The trainer's log-probabilities with different seeds, [draws, N]: one draw, or `_DRAWS` for a model with random
    numbers in its forward pass, such as some routers of experts in training mode."""
    draws: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        while len(draws) < _DRAWS:
            torch.manual_seed(len(draws))
            before = torch.get_rng_state()
            draws.append(_logprobs(policy, rows, how))
            if torch.equal(torch.get_rng_state(), before):  # no random number was drawn
                break
    return torch.stack(draws)


def _logprobs(policy: PolicyModel, rows: list[TrainSequence], how: Packing) -> Tensor:
    micro = collate(Batch.of(rows), how, torch.device("cpu"))
    inputs = micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M
    logprobs_N: Tensor = policy(*inputs, micro.targets_M, 1.0, False)[0]
    return logprobs_N


def _alone(network: Any, row: TrainSequence) -> Tensor:
    """The log-probabilities of one row by transformers alone, with its own attention and no other arguments."""
    network.eval().set_attn_implementation("eager")
    tokens_T = torch.from_numpy(row.tokens).long()
    logprobs_TV = network(input_ids=tokens_T[None], use_cache=False).logits[0].log_softmax(-1)
    logprobs_N: Tensor = logprobs_TV[:-1].gather(1, tokens_T[1:, None])[:, 0]  # token t + 1 from position t
    return logprobs_N
