"""Errors that the comparison with the oracle must notice, each put into a running worker.

A mutation patches what this process runs until `restore`; `seen` counts how often it changed something, so that one
that no longer bites is told from one that goes unnoticed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.train import total_loss
from pipeline.train.batching import packing, sequences
from pipeline.train.batching.packing import Bins, Layout, Packing, PrefixGroup
from pipeline.train.batching.sequences import Batch
from pipeline.train.model import (
    collate,
    context_parallel,
    expert_dispatch,
    expert_load,
    experts,
    model_worker,
    models,
    packed_attention,
    router_loss,
)
from pipeline.train.model.cpu_offload import Part, local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.packed_attention import Segments
from pipeline.train.model.routing_replay import RoutedTokens
from tests.support.oracle.ways import Mutation

seen: Counter[str] = Counter()
"""What happened in this process since `take_seen`."""
_patches = ExitStack()


def patch(target: object, name: str, substitute: object) -> None:
    _patches.enter_context(mock.patch.object(target, name, substitute))


def mutate(rank: ModelWorker, mutation: Mutation) -> None:
    MUTATE[mutation](rank)


def restore(rank: ModelWorker) -> None:
    """Undo every mutation."""
    _patches.close()


def local_normalisation(rank: ModelWorker) -> None:
    """Each micro-batch takes the mean over its own tokens, and the means are averaged."""
    whole = model_worker.collate

    def locally(batch: Batch, *others: Any) -> object:
        seen["mutated"] += batch.counted > 0
        return whole(replace(batch, weights=(1 / max(1, batch.counted) / 6,) * len(batch.rows)), *others)

    patch(model_worker, "collate", locally)


def dropped_micro_batch(rank: ModelWorker) -> None:
    split = packing.split_rows

    def dropping(lengths: Sequence[int], ranks: int, *others: Any) -> list[Bins]:
        first, *rest = split(lengths, ranks, *others)
        seen["mutated"] += len(first[-1]) > 0
        return [[*first[:-1], []], *rest]

    patch(packing, "split_rows", dropping)


def duplicated_shard(rank: ModelWorker) -> None:
    split = packing.split_rows

    def twice(lengths: Sequence[int], ranks: int, *others: Any) -> list[Bins]:
        seen["mutated"] += ranks > 1
        return [split(lengths, ranks, *others)[0]] * ranks

    patch(packing, "split_rows", twice)


def averaged_gradients(rank: ModelWorker) -> None:
    for module in rank.model.modules():
        if isinstance(module, model_worker.FSDPModule):
            seen["mutated"] += 1
            module.set_gradient_divide_factor(2.0)


def unreduced_replicas(rank: ModelWorker) -> None:
    """Gradients are not summed over the replicas of the model."""
    mesh = next(p.device_mesh for p in rank.model.parameters() if isinstance(p, DTensor))
    replicas, reduce = mesh.get_group(0), dist.all_reduce

    def skipping(tensor: Tensor, *others: Any, group: Any = None, **more: Any) -> Any:
        if group is replicas:
            seen["mutated"] += 1
            return None
        return reduce(tensor, *others, group=group, **more)

    patch(dist, "all_reduce", skipping)


def summed_answers(rank: ModelWorker) -> None:
    """The gradient of what the ranks of a line put together is summed over them, as that of a sum usually is."""
    context = rank.context
    assert context is not None

    def summing(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].clone()
        dist.all_reduce(whole, group=context.group)
        seen["mutated"] += not torch.equal(whole, gradients[0])
        return whole, None

    patch(context_parallel._SumOfParts, "backward", staticmethod(summing))


def cut_prefix(rank: ModelWorker) -> None:
    """A row whose own tokens lie on the second rank of a line sees nothing of a prefix that lies on the first: it
    reads the first token of the second part in its place."""

    class CutSegments(Segments):
        @classmethod
        def of(cls, lengths: Sequence[int], device: torch.device, where: Any, context: Any) -> Segments:
            if where is not None:
                middle = (int(where.max()) + 1) // 2
                rows, done = np.split(where, np.cumsum(lengths)[:-1]), -1
                for row in sorted(rows, key=lambda row: int(row[-1])):
                    own = row[row > done]
                    done = max(done, int(row[-1]))
                    if len(own) and own[0] >= middle:
                        seen["mutated"] += int(row[0]) < middle
                        row[row < middle] = middle  # of `where`, of which each row is a view
            return Segments.of(lengths, device, where, context)

    patch(collate, "Segments", CutSegments)


def leaking_attention(rank: ModelWorker) -> None:
    """The rows of a packed line count as one."""

    class OneSegment(Segments):
        @classmethod
        def of(cls, lengths: Sequence[int], *others: Any) -> Segments:
            seen["mutated"] += len(lengths) > 1
            return Segments.of([sum(lengths)], *others)

    patch(collate, "Segments", OneSegment)


def wrong_positions(rank: ModelWorker) -> None:
    """Positions restart one token late. (Never restarting is invisible: rotary embeddings see differences only.)"""
    lay = packing.make_layout

    def late(*given: Any) -> Layout:
        layout = lay(*given)
        moved = np.roll(layout.positions, 1)
        seen["mutated"] += not np.array_equal(moved, layout.positions)
        return replace(layout, positions=moved)

    patch(packing, "make_layout", late)


def strange_kin(rank: ModelWorker) -> None:
    """Rows share one token more than they begin with."""
    kin_of = sequences.group_by_prefix

    def longer(tokens: Sequence[NDArray[np.int32]], packing: Packing) -> list[PrefixGroup]:
        found = []
        for kin in kin_of(tokens, packing):
            lengths = [len(tokens[row]) for row in kin.rows]
            most = [0, *(min(pair) for pair in pairwise(lengths))]
            shared = tuple(each + (0 < each < limit) for each, limit in zip(kin.shared, most, strict=True))
            seen["mutated"] += shared != kin.shared
            found.append(replace(kin, shared=shared))
        return found

    patch(sequences, "group_by_prefix", longer)


def shifted_targets(rank: ModelWorker) -> None:
    logprobs = models.head_logprobs

    def shifted(hidden: Tensor, weight: Tensor, targets: Tensor, *others: Any) -> object:
        moved = targets.roll(1)
        seen["mutated"] += not torch.equal(moved, targets)
        return logprobs(hidden, weight, moved, *others)

    patch(models, "head_logprobs", shifted)


def stale_parameters(rank: ModelWorker) -> None:
    """What comes back from outside the device is what left it first."""
    _stale("model", lambda rank: [p.detach() for p in rank.model.parameters()])


def stale_moments(rank: ModelWorker) -> None:
    _stale("optimizer", lambda rank: rank.optimizer.moments() if rank.optimizer else [])


def _stale(part: Part, tensors_of: Callable[[ModelWorker], list[Tensor]]) -> None:
    load = ModelWorker.load
    first: dict[int, list[Tensor]] = {}

    def stale(rank: ModelWorker, loaded: Part) -> None:
        load(rank, loaded)
        if loaded == part:
            tensors = [local(tensor) for tensor in tensors_of(rank)]
            for tensor, old in zip(tensors, first.setdefault(id(rank), [t.clone() for t in tensors]), strict=True):
                seen["mutated"] += not torch.equal(tensor, old)
                tensor.copy_(old)

    patch(ModelWorker, "load", stale)


def forgotten_correction(rank: ModelWorker) -> None:
    def uncorrected(loss_N: Tensor, tokens: Any, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen["mutated"] += 1
        return loss_N, {}

    patch(total_loss, "apply_correction", uncorrected)


def wrong_expert(rank: ModelWorker) -> None:
    """The first and the last token of each rank are computed by one of each other's experts."""
    run = experts.run_on_owners

    def swapping(compute: Any, hidden_TE: Tensor, chosen_TK: Tensor, *others: Any) -> Tensor:
        wrong_TK = chosen_TK.clone()
        wrong_TK[0, 0], wrong_TK[-1, 0] = chosen_TK[-1, 0], chosen_TK[0, 0]
        seen["mutated"] += not torch.equal(wrong_TK, chosen_TK)
        return run(compute, hidden_TE, wrong_TK, *others)

    patch(experts, "run_on_owners", swapping)


def neighbor_experts(rank: ModelWorker) -> None:
    """Each token of a micro-batch has the recorded experts of its neighbor."""
    from_rows = collate.RoutedTokens.from_rows

    def shifted(*given: Any) -> RoutedTokens | None:
        routed = from_rows(*given)
        if routed is None:
            return None
        moved = routed.experts_TLK.roll(1, 0)
        seen["mutated"] += not torch.equal(moved, routed.experts_TLK)
        return replace(routed, experts_TLK=moved)

    patch(collate.RoutedTokens, "from_rows", shifted)


def lost_chunk(rank: ModelWorker) -> None:
    """What the last rank sends to others does not arrive."""
    exchange = expert_dispatch.all_to_all_single_autograd

    def losing(sent: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup) -> Tensor:
        came: Tensor = exchange(sent, arriving, leaving, group)
        if dist.get_rank(group) == len(arriving) - 1:
            return came
        seen["mutated"] += arriving[-1] > 0
        return torch.cat([came[: sum(arriving[:-1])], torch.zeros_like(came[sum(arriving[:-1]) :])])

    patch(expert_dispatch, "all_to_all_single_autograd", losing)


def wrong_adapter(rank: ModelWorker) -> None:
    """The experts of a layer use each other's adapters."""
    product = experts.grouped_product

    def swapped(x_SI: Tensor, matrices_XIO: Tensor, ends_X: Tensor) -> Tensor:
        if matrices_XIO.requires_grad:  # below adapters, the experts' own matrices have no gradient
            seen["mutated"] += len(matrices_XIO) > 1
            matrices_XIO = matrices_XIO.roll(1, 0)
        return product(x_SI, matrices_XIO, ends_X)

    patch(experts, "grouped_product", swapped)


def lost_sink(rank: ModelWorker) -> None:
    """Attention without its sinks."""
    attend = packed_attention.attend_behind_sinks

    def without(function: Any, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, *others: Any) -> Tensor:
        seen["mutated"] += 1
        return attend(function, query, key, value, sinks_H * 0 - 100, *others)

    patch(packed_attention, "attend_behind_sinks", without)


def aux_per_micro_batch(rank: ModelWorker) -> None:
    """The auxiliary loss is a mean over each micro-batch, and the mean of these."""
    means = collate.MicroBatch.row_means

    def locally(micro: collate.MicroBatch) -> tuple[Tensor, Tensor]:
        share_B, means_BT = means(micro)
        seen["mutated"] += len(share_B) > 0
        return share_B / share_B.sum().clamp_min(1e-9) / 6, means_BT

    patch(collate.MicroBatch, "row_means", locally)


def own_tokens_in_aux(rank: ModelWorker) -> None:
    """In the auxiliary loss, each rank of a line counts the experts of its own tokens only."""

    def own(parts: list[Tensor], group: object) -> list[Tensor]:
        seen["mutated"] += 1
        return parts

    patch(router_loss, "_sum", own)


def unreplicated_bias(rank: ModelWorker) -> None:
    """Each rank balances the experts by the tokens that it has seen itself."""
    reduce = dist.all_reduce

    def own(tensor: Tensor, *others: Any, **more: Any) -> Any:
        if tensor.dtype != torch.int64:
            return reduce(tensor, *others, **more)
        seen["mutated"] += 1
        return None

    patch(expert_load.dist, "all_reduce", own)


MUTATE: dict[Mutation, Callable[[ModelWorker], None]] = {
    "local_normalisation": local_normalisation,
    "dropped_micro_batch": dropped_micro_batch,
    "duplicated_shard": duplicated_shard,
    "averaged_gradients": averaged_gradients,
    "unreduced_replicas": unreduced_replicas,
    "summed_answers": summed_answers,
    "cut_prefix": cut_prefix,
    "leaking_attention": leaking_attention,
    "wrong_positions": wrong_positions,
    "strange_kin": strange_kin,
    "shifted_targets": shifted_targets,
    "stale_parameters": stale_parameters,
    "stale_moments": stale_moments,
    "forgotten_correction": forgotten_correction,
    "wrong_expert": wrong_expert,
    "neighbor_experts": neighbor_experts,
    "lost_chunk": lost_chunk,
    "wrong_adapter": wrong_adapter,
    "lost_sink": lost_sink,
    "aux_per_micro_batch": aux_per_micro_batch,
    "own_tokens_in_aux": own_tokens_in_aux,
    "unreplicated_bias": unreplicated_bias,
}
