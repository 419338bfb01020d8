"""The loop to compare with: transformers, torch and nothing else, as one would write it for this one batch.

Parameters, gradients, moments and head in bf16 (the worker's are float32), rows packed into lines of one fixed length
(so that one compilation of the whole serves all), `varlen_attn`, fused AdamW, DistributedDataParallel on several GPUs.
Same random weights, rows, micro-batches and loss as the worker.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from pipeline.train.batching.sequences import Batch, TrainSequence

_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Line(NamedTuple):
    """A micro-batch on the device: rows end to end, then one row of padding, P tokens in all; nothing about its shape
    depends on the rows. Weights are 0 where no token is counted."""

    tokens_1P: Tensor
    positions_1P: Tensor
    targets_P: Tensor
    weights_P: Tensor
    advantages_P: Tensor
    sampler_logprobs_P: Tensor
    bounds: Tensor
    longest: int


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **given: Any) -> Any:
    """Causal attention inside each row of a line: [1, H, P, D] → [1, P, H, D]."""
    bounds, longest = given["bounds"], given["longest"]
    if not q.is_cuda:
        rows = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        parts = [_attend_row(*(x[:, :, start:end] for x in (q, k, v)), scaling) for start, end in rows if end > start]
        return torch.cat(parts, 2).transpose(1, 2), None
    options: dict[str, Any] = {"enable_gqa": True} if _GROUPS else {}
    if not _GROUPS:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # Autocast leaves what the norms of queries and keys give in float32.
    q, k, v = (x[0].transpose(0, 1).to(torch.bfloat16) for x in (q, k, v))
    attended = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), **options)
    return attended.unsqueeze(0), None


def _attend_row(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


AttentionInterface.register("plain", attend)


class Plain(nn.Module):
    """Loss of a line under a transformers model with random weights."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(model)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="plain")
        self.network = network.to(torch.bfloat16)

    def forward(self, line: Line) -> Tensor:
        options = {"bounds": line.bounds, "longest": line.longest, "use_cache": False}
        hidden = self.network.model(input_ids=line.tokens_1P, position_ids=line.positions_1P, **options)
        logits_PV = self.network.lm_head(hidden.last_hidden_state[0]).float()
        logprobs_P = -cross_entropy(logits_PV, line.targets_P, reduction="none")
        ratio_P = (logprobs_P - line.sampler_logprobs_P).exp()
        held_P = ratio_P.clamp(0.8, 1.2) * line.advantages_P
        return -(line.weights_P * torch.minimum(ratio_P * line.advantages_P, held_P)).sum()


def make_lines(micro_batches: Sequence[Batch], budget: int, device: torch.device) -> list[Line]:
    most = max(len(batch.rows) for batch in micro_batches) + 1
    longest = max([budget - sum(batch.lengths) for batch in micro_batches] + [max(b.lengths) for b in micro_batches])
    return [_line(batch, budget, most, longest, device) for batch in micro_batches]


def _line(batch: Batch, budget: int, most: int, longest: int, device: torch.device) -> Line:
    rest = budget - sum(batch.lengths)
    lengths = [*batch.lengths, rest] + [0] * (most - len(batch.rows) - 1)
    tokens = np.concatenate([row.tokens for row in batch.rows] + [np.zeros(rest + 1, np.int32)])
    positions = np.concatenate([np.arange(length) for length in lengths])

    def shifted(values: list[np.ndarray]) -> Tensor:
        """Numbers of each token, moved to the place that predicts it."""
        flat = np.concatenate([*values, np.zeros(rest + 1)])[1:].astype(np.float32)
        return torch.from_numpy(flat).to(device)

    pairs = list(zip(batch.rows, batch.weights, strict=True))
    return Line(
        tokens_1P=torch.from_numpy(tokens[:-1].astype(np.int64))[None].to(device),
        positions_1P=torch.from_numpy(positions)[None].to(device),
        targets_P=torch.from_numpy(tokens[1:].astype(np.int64)).to(device),
        weights_P=shifted([row.mask * weight for row, weight in pairs]),
        advantages_P=shifted([row.advantages * np.ones(len(row)) for row in batch.rows]),
        sampler_logprobs_P=shifted([_sampler_logprobs(row) for row in batch.rows]),
        bounds=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device),
        longest=longest,
    )


def _sampler_logprobs(row: TrainSequence) -> np.ndarray:
    assert row.sampler_logprobs is not None
    return row.sampler_logprobs


def forward(module: nn.Module, line: Line) -> Tensor:
    """The loss of a line."""
    loss: Tensor = module(line)
    return loss


def plain_step(
    model: Path, micro_batches: Sequence[Batch], budget: int, device: torch.device, ranks: int, compiled: bool
) -> Callable[[], float]:
    """A function that takes one optimizer step and returns this rank's share of the loss."""
    plain = Plain(model).to(device)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    lines = make_lines(micro_batches, budget, device)
    module: nn.Module = torch.compile(plain) if compiled else plain
    if ranks > 1:
        module = DistributedDataParallel(module)

    def step() -> float:
        losses = []
        for number, line in enumerate(lines):
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = number == len(lines) - 1
            loss = forward(module, line)
            (loss * ranks).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    return step
