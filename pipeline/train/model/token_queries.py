"""Log-probabilities of given tokens, and the gradient of a loss over them, on one rank.

Owns the pass over rows with queries (`pipeline.train.batching.logprob_queries`), as a function that the dispatch runs
on every rank. Promises the same numbers for every split of the rows, up to rounding, and to the last bit for equal
splits: every rank gets all rows and takes its share by a pure rule. Must not know clients.

Notation: Q queries of a micro-batch, in the order of its rows; R tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pipeline.algorithms.summed_losses import SUMMED_LOSSES, TokenSum, token_losses
from pipeline.train.batching import packing
from pipeline.train.batching.logprob_queries import QueryRow
from pipeline.train.batching.packing import Budget, Packing
from pipeline.train.model.collate import model_input
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.to_device import to_device
from pipeline.utils import heartbeat

_NOTHING = QueryRow(np.zeros(2, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32), {})
"""Placeholder of a rank with fewer micro-batches than others, for their collective operations."""


@dataclass(frozen=True)
class Answers:
    """The results of one rank.

    Attributes:
        rows: indices of the rank's rows in the call.
        logprobs: float32[Q] (nats) of each row.
        loss: the sum of the loss over the rank's queries; 0 without one.
    """

    rows: list[int]
    logprobs: list[NDArray[np.float32]]
    loss: float


def answer_queries(
    worker: ModelWorker, rows: Sequence[QueryRow], objective: TokenSum, budget: Budget, backward: bool
) -> Answers:
    """The log-probabilities of the rows' queries and the loss over them; with `backward`, accumulate its gradient.
    Collective: every rank has all rows."""
    groups = packing.group_by_prefix([row.tokens for row in rows], budget.packing)
    shares = packing.split_rows([len(row) for row in rows], worker.ranks, budget, groups)
    bins = shares[dist.get_rank()]
    answers, loss = Answers([index for one in bins for index in one], [], 0.0), 0.0
    with torch.set_grad_enabled(backward), worker.passes():
        for number, indices in enumerate(bins):
            heartbeat.beat()
            if backward:
                worker.reduce_after(number == len(bins) - 1)  # gradients are reduced once, after the last micro-batch
            micro = [rows[index] for index in indices]
            logprobs_Q = _logprobs(worker, micro or [_NOTHING], budget.packing)
            total = _loss(objective, micro, logprobs_Q)
            if backward:
                (total * worker.loss_scale).backward()  # type: ignore[no-untyped-call]
            loss += total.item()
            flat = logprobs_Q.detach().float().cpu().numpy()
            # [Q] → the queries of each row
            ends = np.cumsum([len(row.at) for row in micro])
            answers.logprobs.extend(np.split(flat, ends[:-1]) if micro else [])
    return Answers(answers.rows, answers.logprobs, loss)


def _logprobs(worker: ModelWorker, rows: Sequence[QueryRow], how: Packing) -> Tensor:
    """The log-probabilities of the rows' queries, [Q]."""
    lengths = [len(row) for row in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    layout = packing.make_layout(lengths, how, packing.group_by_prefix([row.tokens for row in rows], how))
    tokens_R = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    # Positions within a row → indices among all R tokens → indices in the layout's rectangle.
    queried = np.concatenate([start + row.at for row, start in zip(rows, starts, strict=True)])
    targets = np.concatenate([row.targets for row in rows]).astype(np.int64)
    before_Q, targets_Q = (to_device(values, worker.device) for values in (layout.where[queried], targets))
    output = worker.model(*model_input(layout, tokens_R, worker.device), before_Q, targets_Q, 1.0, False)
    return cast(Tensor, output[0])


def _loss(objective: TokenSum, rows: Sequence[QueryRow], logprobs_Q: Tensor) -> Tensor:
    """The loss of a micro-batch: a scalar, summed in double precision, so that a large batch rounds no worse than a
    small one."""
    columns = {
        name: to_device(
            np.concatenate([np.zeros(0, np.float32), *(row.columns[name] for row in rows)]),
            logprobs_Q.device,
            logprobs_Q.dtype,
        )
        for name in SUMMED_LOSSES[objective.name].columns
    }
    return token_losses(objective, logprobs_Q, columns, [len(row.at) for row in rows]).double().sum()
