"""The records of samples and groups that travel between roles, and the requests for positions.

Owns their fields, and whether their values make sense, which `check` answers for their consumers; `record_wire` has the
bytes on the way. Numeric arrays travel as raw little-endian bytes, so a record is written and read without touching its
elements.

Notation: T tokens of a sample (prompt, sampled and tool tokens, in order), S samples of a group.

An episode whose conversation branched, or was compacted, has several rows of tokens and one reward. It is one sample:
the sample holds the first row, and `branches` the others, each without the prefix that it shares with an earlier row.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.config.routing_shape import RoutingShape
from pipeline.errors import RecordError
from pipeline.run.metric_names import below_task
from pipeline.transport.top_tokens import TopTokens, check_rows
from pipeline.transport.turn_times import TurnTimes
from pipeline.utils.value_bounds import MAX_REWARD

WIRE_VERSION = 2
MAX_VERSION_OFFSET = 255
"""The largest value in `Sample.version_offsets`. A token of even newer weights is recorded as older than it is."""
MALFORMED = "malformed"
"""Prefix of the outcome of an invalid group. Its position is not marked done, and is sampled again."""
FILTERED = "filtered: zero advantage"
"""Outcome of a group without a signal, with `training.zero_variance_groups=drop`."""

Index = Annotated[int, msgspec.Meta(ge=0)]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all records; the subclass's tag is its kind on the wire."""

    version: int = WIRE_VERSION


class TokenRow(NamedTuple):
    """One sequence of an episode: int32[T] tokens, uint8[T] sampled, float32[T] logprobs, see `Sample`; int64[T]
    versions, the policy version that sampled each sampled token; and the routed experts of its first tokens."""

    tokens: NDArray[np.int32]
    sampled: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    routed_experts: bytes = b""

    def stored(self) -> tuple[NDArray[Any], ...]:
        """The row as samples are stored and fingerprinted: tokens, mask, log-probabilities, and int32[T] versions,
        which are 0 where no token was sampled."""
        return self.tokens, self.sampled, self.logprobs, (self.versions * self.sampled).astype("<i4")


class Branch(Record, frozen=True, kw_only=True, tag="branch"):
    """A further row of an episode, which shares a prefix with an earlier row.

    Attributes:
        of: the row with the shared prefix: 0 is the sample's first row, n its nth branch.
        shared: length of the prefix in tokens. Sampled tokens of the prefix count in row `of`, and are context here.
        tokens, sampled, logprobs, version_offsets, routed_experts: the tokens after the prefix, as in `Sample`.
    """

    of: Index
    shared: Index
    tokens: bytes
    sampled: bytes
    logprobs: bytes
    version_offsets: bytes = b""
    routed_experts: bytes = msgspec.field(default=b"", name="routed")


class Sample(Record, frozen=True, kw_only=True, tag="sample", omit_defaults=True):
    """One episode of the policy on one prompt.

    Attributes:
        tokens: int32[T] as bytes: every token id in order, never text that was tokenized again.
        sampled: uint8[T] as bytes: 1 where the policy sampled the token, 0 for prompt and tool tokens.
        logprobs: float32[T] as bytes: the log-probability under the policy that sampled (nats, at the sampling
            temperature) of each sampled token, 0 elsewhere.
        reward: the task's reward of the episode.
        version_min, version_max: oldest and newest policy version (steps done) that may have sampled a token.
        finish: `stop` when the policy ended the episode, `length` when it was truncated.
        turns: turns of the policy in the episode.
        seconds: wall time of the episode.
        server: the inference server of the last turn (`host:port`).
        metrics: metrics of the sample by name: the score of each reward function, and the task's metrics.
        branches: the further rows. Versions, finish and turns cover all rows.
        version_offsets: uint8[T] as bytes: the policy version of each token minus `version_min`; empty if all are 0.
        routed_experts: the experts that the servers chose for each of the first tokens, in records of
            `pipeline.config.routing_shape.RoutingShape`; empty without routing replay. The last token has none, since
            no server read it.
        turn_times: the times of its turns; empty if the actor did not measure them.
    """

    tokens: bytes
    sampled: bytes
    logprobs: bytes
    reward: float
    version_min: int
    version_max: int
    finish: Literal["stop", "length"]
    turns: int = 1
    seconds: float = 0.0
    server: str = ""
    metrics: dict[str, float] = {}
    branches: tuple[Branch, ...] = ()
    version_offsets: bytes = b""
    routed_experts: bytes = msgspec.field(default=b"", name="routed")
    turn_times: tuple[TurnTimes, ...] = ()

    def rows(self, routed_bytes: int = 0) -> list[TokenRow]:
        """Every row of the episode, the first row first. Each sampled token is marked in exactly one row.

        The rows have routed experts if `routed_bytes`, the bytes of each token's record, is given.
        """
        rows = [_arrays(self, self.version_min)._replace(routed_experts=self.routed_experts if routed_bytes else b"")]
        for branch in self.branches:
            own: tuple[NDArray[Any], ...] = _arrays(branch, self.version_min)[:-1]
            start = rows[branch.of].tokens[: branch.shared]
            # The prefix's tokens are marked as not sampled here, since they count in row `of`.
            prefix = [start, *(np.zeros(len(start), array.dtype) for array in own[1:])]
            tokens, sampled, logprobs, versions = (np.concatenate(parts) for parts in zip(prefix, own, strict=True))
            routed = rows[branch.of].routed_experts[: branch.shared * routed_bytes]
            if routed_bytes and len(routed) == branch.shared * routed_bytes:  # records cover tokens without a gap
                routed += branch.routed_experts
            rows.append(TokenRow(tokens, sampled, logprobs, versions, routed))
        return rows

    def token_array(self) -> NDArray[np.int32]:
        """int32[T], a read-only view."""
        return _arrays(self).tokens

    def sampled_array(self) -> NDArray[np.uint8]:
        """uint8[T], a read-only view."""
        return _arrays(self).sampled

    def logprob_array(self) -> NDArray[np.float32]:
        """float32[T], a read-only view."""
        return _arrays(self).logprobs

    def check(self) -> None:
        """Raise `RecordError` unless it can be trained: arrays of equal length, a prompt first, all numbers finite."""
        _check_lengths(self)
        for number, branch in enumerate(self.branches):
            _check_lengths(branch)
            if branch.of > number:
                raise RecordError(f"branch {number + 1} begins as row {branch.of}, which does not come before it")
        rows = self.rows()
        for row in rows:
            _check_row(row)
        for row, branch in zip(rows[1:], self.branches, strict=True):
            if not branch.sampled or branch.shared + len(branch.sampled) != len(row.tokens):
                raise RecordError(f"a branch of {len(branch.sampled)} tokens shares more than there is")
        _check_numbers(self)
        if not 0 <= self.version_min <= self.version_max:
            raise RecordError(f"weight versions from {self.version_min} to {self.version_max}")
        if any(row.versions.max(initial=0) > self.version_max for row in rows):
            raise RecordError(f"a token of newer weights than {self.version_max}, the sample's version_max")


def _arrays(part: Sample | Branch, version_min: int = 0) -> TokenRow:
    """The arrays of one row without a shared prefix: read-only views, except for the versions."""
    tokens, logprobs = np.frombuffer(part.tokens, dtype="<i4"), np.frombuffer(part.logprobs, dtype="<f4")
    offsets = (
        np.frombuffer(part.version_offsets, dtype="<u1") if part.version_offsets else np.zeros(len(tokens), np.uint8)
    )
    return TokenRow(tokens, np.frombuffer(part.sampled, dtype="<u1"), logprobs, version_min + offsets.astype(np.int64))


def _check_lengths(part: Sample | Branch) -> None:
    lengths = len(part.tokens) // 4, len(part.sampled), len(part.logprobs) // 4
    if len(set(lengths)) != 1 or len(part.tokens) % 4 or len(part.logprobs) % 4:
        raise RecordError(f"sample arrays differ in length: tokens, sampled, logprobs = {lengths}")
    if len(part.version_offsets) not in (0, len(part.sampled)):
        raise RecordError(
            f"sample arrays differ in length: sampled, newer = {len(part.sampled), len(part.version_offsets)}"
        )


def _check_numbers(sample: Sample) -> None:
    if not math.isfinite(sample.reward):
        raise RecordError("a log-probability or the reward is not finite")
    if abs(sample.reward) > MAX_REWARD:
        raise RecordError(f"a reward of {sample.reward:g}, beyond ±{MAX_REWARD:.0f}")
    if not all(map(math.isfinite, sample.metrics.values())):
        raise RecordError("one of its metrics is not finite")


def _check_row(row: TokenRow) -> None:
    if not len(row.tokens) or row.sampled[0] or row.sampled.max() > 1:
        raise RecordError("sampled is no row of 0 and 1 that begins with a prompt")
    if row.tokens.min() < 0:
        raise RecordError("a token id is negative")
    if not np.isfinite(row.logprobs).all():
        raise RecordError("a log-probability or the reward is not finite")


def routed_array(row: TokenRow, shape: RoutingShape) -> NDArray[Any] | None:
    """The routed experts of the first t tokens of a row, a read-only view [t, layers, experts of a token]; None if no
    token has any. `RecordError` for another shape, or an expert that the model does not have."""
    if not row.routed_experts:
        return None
    if len(row.routed_experts) % shape.token_bytes:
        raise RecordError(f"{len(row.routed_experts)} bytes of routed experts, {shape.token_bytes} for each token")
    ids = np.frombuffer(row.routed_experts, shape.dtype).reshape(-1, shape.layers, shape.per_token)
    if len(ids) > len(row.tokens):
        raise RecordError(f"routed experts of {len(ids)} tokens for a row of {len(row.tokens)}")
    if (highest := ids.max()) >= shape.experts:
        raise RecordError(f"routed expert {highest} of a model with {shape.experts} experts")
    return ids


class Group(Record, frozen=True, kw_only=True, tag="group", omit_defaults=True):
    """All samples of one prompt.

    Attributes:
        position: index in the run's issue order, 0, 1, 2, …; `epoch * len(task) + k`. The ledger's key.
        prompt: index in the task's dataset.
        task: the label of its task, if that is one of a mix.
        samples: the successful samples.
        failures: the reason of each failed sample.
        abandoned: run time in seconds of each sample that was cancelled because the group had enough without it.
        reused, resampled: tokens that a lost actor had recorded of the group: those that the samples have, and those
            that were sampled again.
    """

    position: Index
    prompt: Index
    task: str = ""
    samples: tuple[Sample, ...] = ()
    failures: tuple[str, ...] = ()
    abandoned: tuple[float, ...] = ()
    reused: int = 0
    resampled: int = 0

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest policy version that sampled a token; `ValueError` without samples."""
        return min(sample.version_min for sample in self.samples), max(sample.version_max for sample in self.samples)

    def fingerprint(self) -> str:
        """16 hex digits (BLAKE2b) that identify the samples: for each in order its reward (float64), the lengths of its
        rows (int32), and the arrays of `TokenRow.stored`, each of all rows one after the other, little-endian."""
        digest = hashlib.blake2b(digest_size=8)
        for sample in self.samples:
            rows = [row.stored() for row in sample.rows()]
            digest.update(struct.pack(f"<d{len(rows)}i", sample.reward, *(len(tokens) for tokens, *_ in rows)))
            for column in zip(*rows, strict=True):
                for array in column:
                    digest.update(array.tobytes())
        return digest.hexdigest()


def solved_fraction(group: Group, correct: float) -> float | None:
    """The fraction of a group's samples with a reward of at least `correct`; None without samples."""
    samples = group.samples
    return sum(sample.reward >= correct for sample in samples) / len(samples) if samples else None


class PreparedGroup(Record, frozen=True, kw_only=True, tag="prepared"):
    """A group ready to train, or one that will not be trained, with the reason.

    Attributes:
        group: the group as the actor sent it.
        advantages: one per sample, in order, or its reward (see `pipeline.algorithms.advantage_estimators`); empty
            unless `outcome` is `train`.
        references: float32[T] as bytes for each row of each sample, in order: a teacher's log-probability of each
            token, 0 for the first; empty without a teacher.
        top_tokens: the teacher's likeliest tokens of each of these rows; empty with `teacher.top_k` 0.
        outcome: `train`, or the reason why the group is done without training (`failed: …`, `filtered: …`), or why it
            is invalid (`malformed: …`).
    """

    group: Group
    advantages: tuple[float, ...] = ()
    references: tuple[bytes, ...] = ()
    top_tokens: tuple[TopTokens, ...] = ()
    outcome: str = "train"

    def reference_arrays(self) -> list[NDArray[np.float32] | None]:
        """`references` as read-only views; None for each row without a teacher."""
        rows = sum(1 + len(sample.branches) for sample in self.group.samples)
        return [np.frombuffer(row, dtype="<f4") for row in self.references] or [None] * rows

    def check(self, max_length: int, vocabulary: int, routing: RoutingShape | None = None, top_k: int = 0) -> None:
        """Raise `RecordError` if the group is meant for training but cannot be trained, by a model with `max_length`
        tokens per row, token ids below `vocabulary`, routed experts of the shape `routing` if they are replayed, and
        `top_k` likely tokens of a teacher."""
        if self.outcome.startswith(MALFORMED):
            raise RecordError(self.outcome)
        if self.outcome != "train":
            return
        samples = self.group.samples
        if not samples or len(self.advantages) != len(samples):
            raise RecordError(f"{len(self.advantages)} advantages for {len(samples)} samples")
        if not all(map(math.isfinite, self.advantages)):
            raise RecordError("an advantage is not finite")
        lengths, sampled = [], []
        for sample in samples:
            sample.check()
            for row in sample.rows(0 if routing is None else routing.token_bytes):
                lengths.append(len(row.tokens))
                sampled.append(int(np.count_nonzero(row.sampled)))
                if len(row.tokens) > max_length:
                    raise RecordError(f"a sample of {len(row.tokens)} tokens, above model.max_length={max_length}")
                if (highest := row.tokens.max()) >= vocabulary:
                    raise RecordError(f"token id {highest} is outside of the vocabulary of {vocabulary} tokens")
                if routing is not None:
                    routed_array(row, routing)
        self._check_references(lengths)
        check_rows(self.top_tokens, sampled, top_k)

    def _check_references(self, lengths: Sequence[int]) -> None:
        if not self.references:
            return
        if [len(row) for row in self.references] != [4 * length for length in lengths]:
            raise RecordError(f"references of {len(self.references)} rows do not fit the group's {len(lengths)} rows")
        if not all(np.isfinite(np.frombuffer(row, dtype="<f4")).all() for row in self.references):
            raise RecordError("a teacher's log-probability is not finite")


class Reissue(Record, frozen=True, kw_only=True, tag="reissue"):
    """The trainer requests a position again (its samples were older than `max_lag`, or invalid).

    `awaited`: it was refused as too old twice, so later positions wait for it (see `pipeline.transport.staleness`).
    """

    position: Index
    reason: str
    awaited: bool = False


SAMPLED_TOKENS, TASK_CALLS = "completion_tokens", "task_calls"
"""Names under which an actor reports totals since its start: tokens sampled, also in turns that have not ended, and
finished calls of the task (prompts, tools and rewards). They grow while its episodes advance."""


def mean_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """The mean of each of the samples' metrics, over the samples that have it; names as by `below_task`."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            values.setdefault(name, []).append(value)
    return below_task({name: sum(numbers) / len(numbers) for name, numbers in values.items()})
