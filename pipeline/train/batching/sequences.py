"""Training rows, and batches of rows with their weights in the loss.

Owns `TrainSequence` (one token sequence with the inputs of a loss) and `Batch` (the rows of one optimizer step or of
one call). Promises that every denominator is computed here, once, over the whole batch. Each row has the weight of its
tokens in the global loss, so no rank and no micro-batch divides by a local count. Numpy only, cheap to pickle; must not
know torch, ranks or models.

    batch = Batch.of(rows, normalize="token")
    dispatch.forward_backward("policy", batch, config.loss)

Notation: T tokens of a row, R rows of a batch; n counted tokens of a row, k likely tokens at each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TrainingError
from pipeline.train.batching.packing import Packing, PrefixGroup, group_by_prefix

Normalization = Literal["token", "sequence", "prompt", "fixed"]
Column = Literal["advantages", "sampler_logprobs", "old_logprobs", "reference", "values", "returns"]
"""A field of `TrainSequence` with one number per token."""
COLUMNS: tuple[Column, ...] = ("advantages", "sampler_logprobs", "old_logprobs", "reference", "values", "returns")


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sequence.

    Attributes:
        tokens: int32[T].
        mask: bool or uint8 [T], 1 for the tokens that the loss counts. The mask of the first token is 0, since no
            position predicts it.
        advantages: one number for the whole row, or float32[T].
        sampler_logprobs: float32[T], log-probability (nats, at the sampling temperature) of each counted token under
            the policy that sampled it; None for supervised rows.
        old_logprobs: float32[T], log-probability under the old policy, the denominator of the ratio; None: by
            `LossConfig.old_logprobs`, `sampler_logprobs` or the policy's own in the pass that trains the row.
        reference: float32[T], log-probability under the reference model; None without a KL term.
        values: float32[T], the critic's value of the tokens before each counted one, when the step began; None without
            a critic.
        returns: float32[T], the targets of these values; None without a critic.
        prompt: key of the row's prompt (group).
        routed_experts: [t, layers, experts of a token], the experts that the server chose for each of the row's first t
            tokens; None: the trainer's routers choose those of all tokens.
        top_ids: int32[n, k], a teacher's likeliest tokens at each counted token, without that token; None without a
            teacher or with `teacher.top_k` 0.
        top_logprobs: float32[n, k], their log-probabilities under the teacher; −∞ for an entry without a token.
        label: whether the row's completion is desirable, for losses of labeled completions.
        episode: the row's episode among those of its prompt; −1: the row is a whole episode.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8] | NDArray[np.bool_]
    advantages: float | NDArray[np.float32] = 1.0
    sampler_logprobs: NDArray[np.float32] | None = None
    reference: NDArray[np.float32] | None = None
    prompt: int = 0
    old_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    episode: int = -1
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    label: bool = True
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def counted(self) -> int:
        """Tokens that the loss counts."""
        return int(np.count_nonzero(self.mask))

    def check(self, name: str = "row") -> None:
        """Raise `TrainingError` unless shapes agree, the first token is masked and every counted number is finite."""
        if not len(self):
            raise TrainingError(f"{name} has no tokens")
        if len(self.mask) != len(self) or self.mask[0]:
            raise TrainingError(f"{name}: the mask needs {len(self)} entries, the first of them 0")
        for field in COLUMNS:
            self._check_values(name, field)
        self._check_top_tokens(name)

    def _check_top_tokens(self, name: str) -> None:
        ids, logprobs = self.top_ids, self.top_logprobs
        if ids is None and logprobs is None:
            return
        if ids is None or logprobs is None or self.reference is None:
            raise TrainingError(f"{name}: top_ids, top_logprobs and reference belong together, and one is missing")
        if ids.ndim != 2 or len(ids) != self.counted or ids.shape != logprobs.shape:
            shapes = f"{ids.shape} and {logprobs.shape}"
            raise TrainingError(f"{name}: top_ids and top_logprobs have shapes {shapes}, expected ({self.counted}, k)")
        if np.isnan(logprobs).any():
            raise TrainingError(f"{name}: top_logprobs holds a value that is not a number")

    def _check_values(self, name: str, field: str) -> None:
        values = getattr(self, field)
        if values is None:
            return
        values = np.asarray(values)
        if values.shape not in ((), (len(self),)) or (values.shape == () and field != "advantages"):
            raise TrainingError(f"{name}: {field} has shape {values.shape}, expected ({len(self)},)")
        counted = values if values.shape == () else values[np.asarray(self.mask, bool)]
        if not np.isfinite(counted).all():
            raise TrainingError(f"{name}: {field} holds a value that is not finite")


def episodes_of(rows: Sequence[TrainSequence]) -> list[int]:
    """The episode of each row, identified by the index of the episode's first row: [R]."""
    first: dict[tuple[int, int], int] = {}
    return [
        index if row.episode < 0 else first.setdefault((row.prompt, row.episode), index)
        for index, row in enumerate(rows)
    ]


def refuse_unsampled_rows(rows: Sequence[TrainSequence], name: str = "row") -> None:
    """Raise `TrainingError` unless every row has `sampler_logprobs`.

    Every policy loss requires them: without them each ratio would be 1, regardless of the age of the samples.
    """
    for index, row in enumerate(rows):
        if row.sampler_logprobs is None:
            raise TrainingError(
                f"{name} {index} has no sampler_logprobs, which a policy loss needs: the log-probabilities of its "
                "tokens under the policy that sampled them"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows with their weights in the global loss.

    Attributes:
        rows: the rows, in the caller's order.
        weights: for each row, the factor of each of its counted tokens in the loss sum.
        temperature: the logits are divided by it before log-probabilities are taken.
    """

    rows: tuple[TrainSequence, ...]
    weights: tuple[float, ...]
    temperature: float = 1.0

    @classmethod
    def of(
        cls,
        rows: Sequence[TrainSequence],
        normalize: Normalization = "token",
        *,
        temperature: float = 1.0,
        max_length: int = 0,
    ) -> "Batch":
        """A batch whose loss is a mean over the units of `normalize`; every row is checked.

        - `token`: over all counted tokens.
        - `sequence`: over the episodes that have counted tokens, each first averaged over its counted tokens.
        - `prompt`: over the prompts that have counted tokens, each first averaged over all its counted tokens.
        - `fixed`: the sum divided by E × `max_length`, with E episodes (Dr. GRPO, Liu et al. 2025): no length bias.

        An episode is one row unless `TrainSequence.episode` joins several.
        """
        for index, row in enumerate(rows):
            row.check(f"row {index}")
        for field in (*COLUMNS[1:], "top_ids"):
            missing = [index for index, row in enumerate(rows) if getattr(row, field) is None]
            if 0 < len(missing) < len(rows):
                raise TrainingError(f"row {missing[0]} has no {field}, others of its batch do")
        widths = {row.top_ids.shape[1] for row in rows if row.top_ids is not None}
        if len(widths) > 1:
            raise TrainingError(
                f"rows of one batch have {sorted(widths)} likely tokens at a counted one; expected one number"
            )
        counts = [row.counted for row in rows]
        weights = _weights(rows, counts, normalize, max_length)
        return cls(tuple(rows), tuple(weights), temperature)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def prefix_groups(self, packing: Packing) -> list[PrefixGroup]:
        """The groups of rows with a common prefix; empty unless `packing` is `shared`."""
        return group_by_prefix([row.tokens for row in self.rows], packing)

    @property
    def counted(self) -> int:
        """Tokens that the loss counts, over all rows."""
        return sum(row.counted for row in self.rows)

    def take(self, indices: Sequence[int]) -> "Batch":
        """The rows at `indices`, with their weights in this batch."""
        rows = tuple(self.rows[i] for i in indices)
        return Batch(rows, tuple(self.weights[i] for i in indices), self.temperature)


def _weights(
    rows: Sequence[TrainSequence], counts: list[int], normalize: Normalization, max_length: int
) -> list[float]:
    if normalize == "fixed":
        if max_length <= 0:
            raise TrainingError(f"normalize='fixed' divides by rows × max_length; max_length is {max_length}")
        return [1.0 / (len(set(episodes_of(rows))) * max_length)] * len(rows)
    # The mean of means over G groups: a token of group g has the weight 1 / (G · tokens of g). One group of all rows
    # gives the mean over tokens. Groups without counted tokens are not in G.
    if normalize == "prompt":
        groups = [row.prompt for row in rows]
    elif normalize == "sequence":
        groups = episodes_of(rows)
    else:
        groups = [0] * len(rows)
    totals: Counter[int] = Counter()
    for group, count in zip(groups, counts, strict=True):
        totals[group] += count
    live = sum(total > 0 for total in totals.values())
    return [1.0 / (live * totals[group]) if totals[group] else 0.0 for group in groups]
