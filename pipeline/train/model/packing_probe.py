"""Whether a model's rows come out packed, and padded, as they would alone.

Owns the check that a list of model types could not be: a small copy of the model, with the same kinds of layers and
random weights, answers about the same rows packed, padded, and one by one with the attention that transformers has for
it; packed, two of them share what they begin with. `attention` alone keeps rows apart, so a layer that carries a state
or a convolution along the line would take it from one row into the next. It is the copy and not the model, as one of
many shards cannot be asked by itself, compiled layers would be compiled for a few tokens, and what is seen is the
architecture's: no weights make it right or wrong.
Promises that what was not shown to be right is not packed. Must not know ranks or losses.
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
"""Nats. Rounding to float32 makes some millionths, and where thirty layers pass it on and on, two thousandths; a row
that sees the one before it, tenths and more."""
_DRAWS = 8
"""How often a model is asked that draws random numbers to answer: one answer may be right by chance."""
_LENGTHS = (9, 5, 12)
"""Of the rows: longer than the windows of `small`, and on both sides of its `BOUND`."""
_NOISE = 0.3
_SHARED = 6
"""Tokens that two of them begin with."""


@dataclass(frozen=True)
class PackingProbe:
    """How far log-probabilities are from those of each row alone: the largest difference in nats."""

    packed: float
    padded: float


def supports_packing(model: ModelConfig, wanted: bool) -> bool:
    """Whether rows of this model are packed: as `wanted`, but where that is not known to be right a warning says why
    they are padded.

    `ConfigError` for a model that cannot be trained, as its rows come out wrong padded, too.
    """
    config = Path(model.path) / "config.json"
    found = probe_packing(config.read_text()) if config.is_file() else "it has no config.json"
    if isinstance(found, str):
        why = f"it could not be shown that {model.path} may be packed: {found}"
    elif found.packed <= TOLERANCE:
        return wanted
    elif found.padded <= TOLERANCE:
        why = f"packed rows of {model.path} see the row before them, which changes them by {found.packed:.2g} nats"
    else:
        seen = f"{model.path}, whose log-probabilities come out wrong by {found.padded:.2g} nats"
        raise ConfigError("model.path", seen, "a decoder with plain causal attention", "choose another model")
    if wanted:
        log.warning("rows are padded, not packed: %s; with training.packing=false nobody is warned", why)
    return False


@cache
def probe_packing(config: str) -> PackingProbe | str:
    """The likeness of the architecture of a config.json, given its text, or why it cannot be seen.

    Raises `ConfigError` for an architecture that is refused however it is laid out.
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
    """The likeness of a config's architecture; its model is built whole, so the config is a small one."""
    with TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "config.json")
        policy = build_model(ModelConfig(path=folder, init="random", max_length=BOUND), seed=0)
    assert isinstance(policy, PolicyModel)
    _redraw(policy)
    rows = _rows()
    with torch.no_grad():
        packed, padded = (_answers(policy, rows, each) for each in ("shared", "padded"))
        alone = torch.cat([_alone(policy.network, row) for row in rows])
    return PackingProbe(*((each - alone).abs().max().item() for each in (packed, padded)))


def _redraw(policy: PolicyModel) -> None:
    """Matrices that pass on about as much as they get, so that every layer has a say: models often start with less.
    What scales or shifts starts with ones or zeros, which would hide it, and changes by some of that."""
    matrices, vectors = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=matrices)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=vectors), alpha=_NOISE)


def _rows() -> list[TrainSequence]:
    """The last begins as the first does."""
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, VOCABULARY, length).astype(np.int32) for length in _LENGTHS]
    tokens[-1][:_SHARED] = tokens[0][:_SHARED]
    return [TrainSequence(each, (np.arange(len(each)) > 0).astype(np.uint8)) for each in tokens]


def _answers(policy: PolicyModel, rows: list[TrainSequence], how: Packing) -> Tensor:
    """Ours [times, N], with another seed each time: once, or `_DRAWS` times of a model that draws random numbers, as
    some routers of experts do while they are trained."""
    answers: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        while len(answers) < _DRAWS:
            torch.manual_seed(len(answers))
            before = torch.get_rng_state()
            answers.append(_ours(policy, rows, how))
            if torch.equal(torch.get_rng_state(), before):
                break
    return torch.stack(answers)


def _ours(policy: PolicyModel, rows: list[TrainSequence], how: Packing) -> Tensor:
    micro = collate(Batch.of(rows), how, torch.device("cpu"))
    where = micro.tokens_BT, micro.positions_BT, micro.segments, micro.before_M
    logprobs_N: Tensor = policy(*where, micro.targets_M, 1.0, False)[0]
    return logprobs_N


def _alone(network: Any, row: TrainSequence) -> Tensor:
    """As transformers answers about one row when nothing is asked of it but tokens."""
    network.eval().set_attn_implementation("eager")
    tokens_T = torch.from_numpy(row.tokens).long()
    logprobs_TV = network(input_ids=tokens_T[None], use_cache=False).logits[0].log_softmax(-1)
    answer_N: Tensor = logprobs_TV[:-1].gather(1, tokens_T[1:, None])[:, 0]
    return answer_N
