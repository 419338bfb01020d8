"""The records that travel between roles.

Owns the wire form of samples, groups and control messages: a CRC-32, then msgpack through msgspec, each with its kind
and version, no pickle. Promises that what `encode_record` writes `decode_record` returns equal, and that anything else,
be it one flipped bit, raises `RecordError`. Whether the values make sense is another question, which `check` answers to
those who would train them. Numeric arrays travel as raw little-endian bytes, so a record is written and read without
touching its elements.

Notation: T tokens of a sample (prompt, sampled and tool tokens, in order), S samples of a group.

An episode whose conversation branched, or was compacted, has several rows of tokens and one reward. It is one sample:
its first row is the sample's own, the others are `branches`, each with what it does not share with an earlier row.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RecordError
from pipeline.utils.value_bounds import MAX_REWARD

WIRE_VERSION = 2
MAX_VERSION_OFFSET = 255
"""The most that `Sample.version_offsets` can say. A token of yet newer weights passes for older than it is."""
MALFORMED = "malformed"
"""Begins the outcome of a group that makes no sense: it is not settled, its position is asked for again."""

Place = Annotated[int, msgspec.Meta(ge=0)]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all records; the subclass's tag is its kind on the wire."""

    version: int = WIRE_VERSION


class TokenRow(NamedTuple):
    """One sequence of an episode: int32[T] tokens, uint8[T] sampled, float32[T] logprobs, see `Sample`; and int64[T]
    versions, the weights that sampled each sampled token."""

    tokens: NDArray[np.int32]
    sampled: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]


class Branch(Record, frozen=True, kw_only=True, tag="branch"):
    """A further row of an episode: it begins as an earlier row does, and goes on in its own way.

    Attributes:
        of: the row that it begins as: 0 is the sample's own, n its nth branch.
        shared: that many tokens of that row. Whatever of them was sampled counts there, and is only read here.
        tokens, sampled, logprobs, newer: what follows, as in `Sample`.
    """

    of: Place
    shared: Place
    tokens: bytes
    sampled: bytes
    logprobs: bytes
    version_offsets: bytes = b""


class Sample(Record, frozen=True, kw_only=True, tag="sample"):
    """One episode of the policy on one prompt.

    Attributes:
        tokens: int32[T] as bytes: every token id in order, never re-tokenised text.
        sampled: uint8[T] as bytes: 1 where the policy sampled the token, 0 for prompt and tool tokens.
        logprobs: float32[T] as bytes: the log-probability under the policy that sampled (nats, at the sampling
            temperature) of each sampled token, 0 elsewhere.
        reward: the task's reward of the episode.
        version_min, version_max: oldest and newest weight version (steps done) that may have sampled a token.
        finish: `stop` when the policy ended the episode, `length` when it was cut off.
        turns: model turns in the episode.
        seconds: wall time of the episode.
        server: the inference server that answered (`host:port`).
        metrics: numbers about it by their names in metrics: what each reward function said, and the task's own.
        branches: its further rows; versions, finish and turns are those of all rows.
        newer: uint8[T] as bytes: how many versions after `version_min` each token was sampled; empty where all were
            by that.
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

    def rows(self) -> list[TokenRow]:
        """Every row of the episode, its own first; each sampled token is marked as such in one of them."""
        rows = [_arrays(self, self.version_min)]
        for branch in self.branches:
            own: tuple[NDArray[Any], ...] = _arrays(branch, self.version_min)
            start = rows[branch.of].tokens[: branch.shared]
            read = [start, *(np.zeros(len(start), each.dtype) for each in own[1:])]
            rows.append(TokenRow(*(np.concatenate(parts) for parts in zip(read, own, strict=True))))
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
        """Raise `RecordError` unless it can be trained: arrays of one length, a prompt first, all numbers finite."""
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
            raise RecordError(f"a token of newer weights than {self.version_max}, the newest that it says")


def _arrays(part: Sample | Branch, version_min: int = 0) -> TokenRow:
    """Its own arrays: read-only views, but for the versions."""
    tokens, logprobs = np.frombuffer(part.tokens, dtype="<i4"), np.frombuffer(part.logprobs, dtype="<f4")
    newer = (
        np.frombuffer(part.version_offsets, dtype="<u1") if part.version_offsets else np.zeros(len(tokens), np.uint8)
    )
    return TokenRow(tokens, np.frombuffer(part.sampled, dtype="<u1"), logprobs, version_min + newer.astype(np.int64))


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


class Group(Record, frozen=True, kw_only=True, tag="group"):
    """All samples of one prompt.

    Attributes:
        position: place in the run's issue order, 0, 1, 2, …; `epoch * len(task) + k`. The ledger's key.
        prompt: index in the task's dataset.
        samples: those that succeeded.
        failures: one reason for each sample that did not.
        abandoned: how long each sample ran (seconds) that was ended because there were enough without it.
    """

    position: Place
    prompt: Place
    samples: tuple[Sample, ...] = ()
    failures: tuple[str, ...] = ()
    abandoned: tuple[float, ...] = ()


class PreparedGroup(Record, frozen=True, kw_only=True, tag="prepared"):
    """A group ready to train, or one that will not be trained and why.

    Attributes:
        group: the group as the actor sent it. advantages: one for each sample, in order, or its reward (see
        `pipeline.transport.group_advantages`); empty unless
            `outcome` is `train`.
        references: float32[T] as bytes for each row of each sample, in order: a teacher's log-probability of each
            token, 0 for the first; empty without a teacher.
        outcome: `train`, or the reason the group is settled without training (`failed: …`, `filtered: …`), or why it
            makes no sense (`malformed: …`).
    """

    group: Group
    advantages: tuple[float, ...] = ()
    references: tuple[bytes, ...] = ()
    outcome: str = "train"

    def reference_arrays(self) -> list[NDArray[np.float32] | None]:
        """`references` as read-only views; None for each row without a teacher."""
        rows = sum(1 + len(sample.branches) for sample in self.group.samples)
        return [np.frombuffer(each, dtype="<f4") for each in self.references] or [None] * rows

    def check(self, max_length: int, vocabulary: int) -> None:
        """Raise `RecordError` if the group is to be trained and cannot be, by a model of `max_length` tokens in a row
        and token ids below `vocabulary`."""
        if self.outcome.startswith(MALFORMED):
            raise RecordError(self.outcome)
        if self.outcome != "train":
            return
        samples = self.group.samples
        if not samples or len(self.advantages) != len(samples):
            raise RecordError(f"{len(self.advantages)} advantages for {len(samples)} samples")
        if not all(map(math.isfinite, self.advantages)):
            raise RecordError("an advantage is not finite")
        lengths = []
        for sample in samples:
            sample.check()
            for row in sample.rows():
                lengths.append(len(row.tokens))
                if len(row.tokens) > max_length:
                    raise RecordError(f"a sample of {len(row.tokens)} tokens, above model.max_length={max_length}")
                if (highest := row.tokens.max()) >= vocabulary:
                    raise RecordError(f"token id {highest} is outside of the vocabulary of {vocabulary} tokens")
        self._check_references(lengths)

    def _check_references(self, lengths: Sequence[int]) -> None:
        if not self.references:
            return
        if [len(each) for each in self.references] != [4 * length for length in lengths]:
            raise RecordError(f"references of {len(self.references)} rows do not fit the {len(lengths)} rows there are")
        if not all(np.isfinite(np.frombuffer(each, dtype="<f4")).all() for each in self.references):
            raise RecordError("a teacher's log-probability is not finite")


class Reissue(Record, frozen=True, kw_only=True, tag="reissue"):
    """The trainer asks the actor for a position again (its samples were older than `max_lag`, or made no sense).

    `awaited`: it was too old twice, so what comes after it waits (see `pipeline.transport.staleness`).
    """

    position: Place
    reason: str
    awaited: bool = False


EVALUATED, ASKED = "evaluation/done", "evaluation/prompts"
"""What an actor reports of an evaluation under way: prompts that are done, of so many."""


class EvalRequest(Record, frozen=True, kw_only=True, tag="eval_request"):
    """The trainer asks how weights `weights` do on an evaluation set; an empty one: the run's own held-out prompts."""

    id: str
    policy_version: int
    set: str = ""


class EvalResult(Record, frozen=True, kw_only=True, tag="eval_result"):
    """Answer to one `EvalRequest`.

    Attributes:
        accuracy: mean over the prompts of the mean reward of their samples.
        error: standard error of that mean over the prompts.
        prompts, samples: how many were asked, and how many samples of each.
        failed: samples there are none of, each counted as reward 0; `late` of them were not done by the deadline.
        version_min, version_max: oldest and newest weight version that answered; −1 if none did.
        seconds: it took.
        pass_at: pass@k by k.
        metrics: means over the samples there are.
    """

    id: str
    policy_version: int
    accuracy: float
    prompts: int
    version_min: int
    version_max: int
    seconds: float
    failed: int = 0
    metrics: dict[str, float] = {}
    set: str = ""
    samples: int = 1
    timed_out: int = 0
    error: float = 0.0
    pass_at: dict[int, float] = {}


def mean_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """The mean of each number in the samples' metrics, over those that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


AnyRecord = Sample | Group | PreparedGroup | Reissue | EvalRequest | EvalResult
R = TypeVar("R", bound=Record)

_CHECKSUM = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: Record) -> bytes:
    """The record as bytes: the CRC-32 of its msgpack, and that."""
    body = _encoder.encode(record)
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def decode_record(data: bytes, kind: type[R]) -> R:
    """The record in `data`, which must be of `kind` and of this version; else `RecordError`."""
    body = memoryview(data)[_CHECKSUM.size :]
    if data[: _CHECKSUM.size] != _CHECKSUM.pack(zlib.crc32(body)):
        raise RecordError(f"{len(data)} bytes are no {kind.__name__} record: their checksum differs")
    try:
        record = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise RecordError(f"{len(data)} bytes are no {kind.__name__} record: {error}") from error
    if not isinstance(record, kind):
        raise RecordError(f"expected a {kind.__name__} record, found {type(record).__name__}")
    if record.version != WIRE_VERSION:
        raise RecordError(f"{kind.__name__} record of version {record.version}; this code reads version {WIRE_VERSION}")
    return record
