"""A dataset's conversations as rows, by step.

Owns the order of rows: each epoch is a permutation that depends on the seed and the epoch alone, so a resumed job
continues at the row where it stopped, also within an epoch. Owns the selection of rows: those that can be masked and
are no longer than `model.max_length`; excluded rows are counted by reason. Promises that all attempts train the same
rows: `digest` depends on their content and on the chat template, a checkpoint stores the digest, and another digest is
refused.

Every attempt reads, renders and tokenizes all rows before its first step, and keeps them in memory: 5 bytes per token
(int32 and a mask byte). Must not know ranks, models or losses.
"""

import logging
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np

from pipeline.config import DataConfig, RunConfig
from pipeline.config.data_keys import refuse_overlap
from pipeline.config.model_directory import model_directory
from pipeline.data import Conversation, Examples
from pipeline.data.dataset_digest import DatasetDigest
from pipeline.data.examples import RowError
from pipeline.environments.assistant_masks import AssistantMasker, MaskedText, MaskError
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.errors import CheckpointError, ConfigError
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.train_jobs import rows_to_train
from pipeline.transport.ledger import prompt_at

log = logging.getLogger(__name__)
E = TypeVar("E", bound=Sized)
Example = TypeVar("Example", covariant=True)
Made = TypeVar("Made", covariant=True)
CHECKED_ROWS = 1000
"""Rows that a submission validates; the trainer validates the others before the first step."""
ROWS_PER_BEAT = 100
"""Rows between two heartbeats."""

ENDLESS = (
    "what is trained ends with no token that ends a turn, so the model does not learn to stop; "
    "have the chat template write one after each answer, or name the one that it writes in generation_config.json"
)


@dataclass
class TokenizedDataset:
    """Rows end to end, in flat arrays.

    Attributes:
        tokens, mask: all tokens and their masks, row after row.
        labels: 1 for each row whose completion is desirable (`TrainSequence.label`).
        starts: offset of each row, and the end of the last.
        counts: conversations that were `read`, and rows that were excluded, by reason.
        first: the first row with its text, for the log.
        first_error: the error of the first excluded row.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    labels: bytearray = field(default_factory=bytearray)
    starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    counts: Counter[str] = field(default_factory=Counter)
    first: MaskedText | None = None
    first_error: RowError | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> TrainSequence:
        part = slice(self.starts[index], self.starts[index + 1])
        tokens, mask = np.array(self.tokens[part], np.int32), np.frombuffer(self.mask[part], np.uint8)
        return TrainSequence(tokens=tokens, mask=mask, prompt=index, label=bool(self.labels[index]))

    def __iter__(self) -> Iterator[TrainSequence]:
        return (self[index] for index in range(len(self)))

    def add(self, row: MaskedText, label: bool = True) -> None:
        """Append a row."""
        self.first = self.first or row
        self.tokens.extend(row.tokens)
        self.mask.extend(row.mask)
        self.labels.append(label)
        self.starts.append(len(self.tokens))

    def leave_out(self, reason: str, policy: Literal["refuse", "drop"], error: RowError) -> None:
        """Count a row as excluded; with `refuse`, raise its error instead."""
        if policy == "refuse":
            raise error
        self.first_error = self.first_error or error
        self.counts[reason] += 1

    def __str__(self) -> str:
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.counts.items() if reason != "read")
        return (
            f"{self.counts['read']} conversations, {len(self)} rows of {len(self.tokens)} tokens, "
            f"{sum(self.mask)} of them trained; left out: {left_out or 'none'}"
        )


class Conversations:
    """The rows of a run's dataset: callable (step, count) → rows. The dataset is read at the first use of `rows`.

    Attributes:
        rows_per_example: rows that are trained together; a step counts examples.
    """

    rows_per_example = 1

    def __init__(self, config: RunConfig, beat: Callable[[], None] = lambda: None) -> None:
        """`beat` is called every `ROWS_PER_BEAT` rows during the reading, so that a large dataset does not look like a
        hang."""
        self._config, self._beat = config, beat
        self._content = DatasetDigest()

    @cached_property
    def rows(self) -> TokenizedDataset:
        """The training rows; `ConfigError` or `RowError` for a dataset that cannot be trained."""
        masker = build_masker(self._config)
        log.info("reading %s; trained tokens are determined by %s", self._config.data.path, masker.method)
        self._content.add({"template": masker.template})
        rows, read_held_out = self._read_parts(masker)
        if not len(rows):
            limit = self._config.model.max_length
            raise ConfigError(
                "data.path", self._config.data.path, f"rows of at most model.max_length={limit} tokens", str(rows)
            )
        self._held_out = read_held_out()
        log.info("training: %s", rows)
        log.info("held out: %s", self._held_out)
        assert rows.first, "there are rows"
        log.info("the first row, trained tokens in green:\n%s", ansi_highlight(rows.first))
        if not masker.teaches_end(rows.first):
            log.warning(ENDLESS)
        return rows

    def _read_parts(self, masker: AssistantMasker) -> tuple[TokenizedDataset, Callable[[], TokenizedDataset]]:
        """The training rows, and a function that reads those of the eval split, after them."""
        train, held_out = train_eval_split(self._config.data)
        rows = _read(train, masker, self._config, self._content, self._beat)
        return rows, lambda: _read(held_out, masker, self._config, self._content, self._beat)

    @property
    def size(self) -> int:
        """The number of training examples."""
        return len(self.rows) // self.rows_per_example

    @property
    def held_out(self) -> list[TrainSequence]:
        """The rows of the eval split, which are never trained."""
        return list(self._held_out) if len(self.rows) else []

    @property
    def digest(self) -> str:
        """Digest of the rows in their order, and of the chat template; empty before the dataset is read."""
        return self._content.digest if "rows" in self.__dict__ else ""

    def check(self, digest: str) -> None:
        """Raise `CheckpointError` unless the data have the digest of the checkpoint."""
        if len(self.rows) and digest != self.digest:
            raise CheckpointError(
                f"data.path={self._config.data.path!r}: its rows are not those that this run has trained so far, "
                f"or its model has another chat template "
                f"(digest {self.digest}, checkpoint {digest or 'none'}); put them back, or start a new run"
            )

    def __call__(self, step: int, count: int) -> Sequence[TrainSequence]:
        """The rows of a step of `count` examples, or fewer in the last step if the job is limited by epochs."""
        last, width = rows_to_train(self._config, self.size) or (step + 1) * count, self.rows_per_example
        examples = [self._at(position) for position in range(step * count, min(last, (step + 1) * count))]
        return [self.rows[example * width + row] for example in examples for row in range(width)]

    def _at(self, position: int) -> int:
        size = self.size
        return prompt_at(position, size, self._config.seed) if self._config.data.shuffle else position % size


@dataclass(frozen=True)
class ExamplesPart(ABC, Generic[E, Example, Made]):
    """Some examples of a dataset, and how to make the rows of one."""

    examples: E
    indices: range

    @abstractmethod
    def make(self, index: int, masker: AssistantMasker) -> tuple[Example, Made]:
        """The example at `index` and its rows; `RowError` if it cannot be trained."""

    def first(self, count: int) -> Self:
        """The first examples of the part."""
        return replace(self, indices=self.indices[:count])


P = TypeVar("P", bound=ExamplesPart[Any, Any, Any])


class DatasetPart(ExamplesPart[Examples, Conversation, list[MaskedText]]):
    """Some conversations of a dataset."""

    def make(self, index: int, masker: AssistantMasker) -> tuple[Conversation, list[MaskedText]]:
        """The conversation at `index` and its training rows; `RowError` if no token can be trained."""
        conversation = self.examples[index].conversation
        try:
            return conversation, list(masker.rows(conversation))
        except MaskError as error:
            raise self.examples.wrong(index, str(error)) from None

    def too_long(self, index: int, row: MaskedText, config: RunConfig) -> RowError:
        """The error of a row that is longer than `model.max_length`."""
        return self.examples.wrong(index, too_long(row, config))


def too_long(row: MaskedText, config: RunConfig) -> str:
    """The reason why a row of more than `model.max_length` tokens is left out or refused, with the fix."""
    hint = "set data.overlong=drop" if config.data.overlong == "refuse" else "raise it"
    return f"{len(row.tokens)} tokens, more than model.max_length={config.model.max_length}; {hint}"


def fits(row: MaskedText, config: RunConfig) -> bool:
    """Whether a row is at most `model.max_length` tokens long."""
    return len(row.tokens) <= config.model.max_length


def trainable(
    part: ExamplesPart[E, Example, Made],
    masker: AssistantMasker,
    config: RunConfig,
    rows: TokenizedDataset,
    beat: Callable[[], None],
) -> Iterator[tuple[int, Example, Made]]:
    """Index, example and rows of each example that can be trained. The others are counted in `rows` as left out;
    `RowError` for the first one that is refused. `beat` is called every `ROWS_PER_BEAT` examples."""
    for index in part.indices:
        if rows.counts["read"] % ROWS_PER_BEAT == 0:
            beat()
        rows.counts["read"] += 1
        try:
            example, made = part.make(index, masker)
        except RowError as error:
            rows.leave_out("invalid", config.data.invalid, error)
            continue
        yield index, example, made


def _read(
    part: DatasetPart,
    masker: AssistantMasker,
    config: RunConfig,
    content: DatasetDigest | None = None,
    beat: Callable[[], None] = lambda: None,
) -> TokenizedDataset:
    """The training rows of a part; `RowError` for the first one that is refused."""
    rows = TokenizedDataset()
    for index, conversation, texts in trainable(part, masker, config, rows, beat):
        if content:
            content.add({"messages": conversation.messages, "tools": conversation.tools})
        for row in texts:
            if fits(row, config):
                rows.add(row)
            else:
                too_long = part.too_long(index, row, config)
                rows.leave_out("longer than model.max_length", config.data.overlong, too_long)
    return rows


def train_eval_split(data: DataConfig) -> tuple[DatasetPart, DatasetPart]:
    """The training part and the eval part of the conversations; errors as of `split_examples`."""
    train, held_out = split_examples(data, _open_answered)
    return DatasetPart(*train), DatasetPart(*held_out)


def split_examples(data: DataConfig, open_examples: Callable[[DataConfig], E]) -> tuple[tuple[E, range], ...]:
    """The training examples and the eval examples: each a dataset that `open_examples` opens, and indices in it.

    `ConfigError` if a dataset cannot be read or has no answers, if it has no more rows than the eval part needs, or if
    the two parts overlap.
    """
    examples = open_examples(data)
    if data.eval_split or data.eval_path:
        source = {"path": data.eval_path or data.path, "split": data.eval_split or "train"}
        eval_data = data.model_copy(update=source)
        refuse_overlap(data, eval_data, "data")
        eval_examples = open_examples(eval_data)
        eval_size = min(len(eval_examples), data.eval_rows or len(eval_examples))
        return (examples, range(len(examples))), (eval_examples, range(eval_size))
    # The eval rows are the last ones, before any shuffle, so that the split does not depend on the seed.
    train_size = len(examples) - data.eval_rows
    if train_size < 1:
        expected = f"less than the {len(examples)} rows of data.path"
        raise ConfigError("data.eval_rows", data.eval_rows, expected, "lower it, or set data.eval_split")
    return (examples, range(train_size)), (examples, range(train_size, len(examples)))


def check_data(config: RunConfig) -> None:
    """Raise `ConfigError` unless the config's dataset can be read and its first rows can be trained by the model."""
    data = config.data
    if not (data.path and config.has_sft):
        return
    check_first_rows(train_eval_split(data), _read, config, "rows")


def check_first_rows(
    parts: Sequence[P], read: Callable[[P, AssistantMasker, RunConfig], TokenizedDataset], config: RunConfig, what: str
) -> None:
    """Raise `ConfigError` if `read` refuses one of the first examples of a part. If it leaves such examples out, only
    when none remains. `what` names the examples in the error."""
    masker = build_masker(config)
    for part in parts:
        try:
            rows = read(part.first(CHECKED_ROWS), masker, config)
            refused = None if len(rows) else rows.first_error
        except RowError as error:
            refused = error
        if refused:
            raise ConfigError("data.path", config.data.path, f"{what} that can be trained", str(refused))


def first_trainable_row(config: RunConfig) -> tuple[MaskedText, str] | None:
    """The first trainable row, and a warning or an empty string; None for a run without a dataset."""
    if not (config.data.path and config.has_sft):
        return None
    (part, _), masker = train_eval_split(config.data), build_masker(config)
    for index in part.indices[:CHECKED_ROWS]:
        with suppress(RowError):
            for row in part.make(index, masker)[1]:
                if fits(row, config):
                    return row, "" if masker.teaches_end(row) else ENDLESS
    return None


def ansi_highlight(row: MaskedText) -> str:
    """The text of a row for a terminal, trained spans in green."""
    text, at = "", 0
    for begin, end in row.spans:
        text += f"{row.text[at:begin]}\x1b[32m{row.text[begin:end]}\x1b[0m"
        at = end
    return text + row.text[at:]


def build_masker(config: RunConfig) -> AssistantMasker:
    """The masker of conversations for the config's model and `data.train_on`."""
    return AssistantMasker(ChatTokenizer(model_directory(config.model)), config.data.train_on)


def _open_answered(data: DataConfig) -> Examples:
    """The examples of a dataset with answers; `ConfigError` for one that has prompts only."""
    examples = Examples.open(data)
    if not examples.answered:
        hint = "set data.columns.completion, or train it by RL with task.options.path"
        raise ConfigError("data.columns.completion", data.columns.completion, "a column of the dataset", hint)
    return examples
