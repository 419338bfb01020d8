"""A dataset's conversations as rows, by step.

Owns which rows a step trains: epoch after epoch, each in an order of its own that the seed and the epoch alone decide,
so that a resumed job goes on exactly where it stopped, in the middle of an epoch too. Owns which rows are trained at
all: those that can be masked and are no longer than `model.max_length`; what is left out is counted. Promises that rows
are those of the first attempt: `digest` depends on their content and on the chat template, is committed, and another
one is refused.

Every attempt reads, renders and tokenises all rows before its first step, and holds them: 5 bytes a token. Must not
know ranks, models or losses.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

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
CHECKED_ROWS = 1000
"""Rows that a submission looks at; the others are looked at before the first step."""
ROWS_PER_BEAT = 100
"""Rows between two signs of life."""

ENDLESS = (
    "what is trained ends with no token that ends a turn, so the model does not learn to stop; "
    "have the chat template write one after each answer, or name the one that it writes in generation_config.json"
)


@dataclass
class TokenizedDataset:
    """Rows end to end. `counts` are those of the dataset: `read`, and by reason those that were left out, of which
    `wrong` says what is wrong with the first."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    counts: Counter[str] = field(default_factory=Counter)
    first: MaskedText | None = None
    wrong: RowError | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> TrainSequence:
        part = slice(self.starts[index], self.starts[index + 1])
        tokens, mask = np.array(self.tokens[part], np.int32), np.frombuffer(self.mask[part], np.uint8)
        return TrainSequence(tokens=tokens, mask=mask, prompt=index)

    def __iter__(self) -> Iterator[TrainSequence]:
        return (self[index] for index in range(len(self)))

    def add(self, row: MaskedText) -> None:
        """Append a row."""
        self.first = self.first or row
        self.tokens.extend(row.tokens)
        self.mask.extend(row.mask)
        self.starts.append(len(self.tokens))

    def leave_out(self, reason: str, policy: Literal["refuse", "drop"], error: RowError) -> None:
        """Count what is left out by this policy, or raise the error."""
        if policy == "refuse":
            raise error
        self.wrong = self.wrong or error
        self.counts[reason] += 1

    def __str__(self) -> str:
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.counts.items() if reason != "read")
        return (
            f"{self.counts['read']} conversations, {len(self)} rows of {len(self.tokens)} tokens, "
            f"{sum(self.mask)} of them trained; left out: {left_out or 'none'}"
        )


class Conversations:
    """The rows of a run's dataset, called with a step and a count of rows."""

    def __init__(self, config: RunConfig, alive: Callable[[], None] = lambda: None) -> None:
        """Nothing is read yet. `alive` is called now and then while it is."""
        self._config, self._alive = config, alive
        self._content = DatasetDigest()

    @cached_property
    def rows(self) -> TokenizedDataset:
        """What is trained; `ConfigError` or `RowError` for a dataset that cannot be."""
        (train, held_out), masker = train_eval_split(self._config.data), build_masker(self._config)
        log.info("reading %s; what is trained is told by %s", self._config.data.path, masker.method)
        self._content.add({"template": masker.template})
        rows = _read(train, masker, self._config, self._content, self._alive)
        if not len(rows):
            limit = self._config.model.max_length
            raise ConfigError(
                "data.path", self._config.data.path, f"rows of at most model.max_length={limit} tokens", str(rows)
            )
        self._held_out = _read(held_out, masker, self._config, self._content, self._alive)
        log.info("training: %s", rows)
        log.info("held out: %s", self._held_out)
        assert rows.first, "there are rows"
        log.info("the first row, trained tokens in green:\n%s", ansi_highlight(rows.first))
        if not masker.teaches_end(rows.first):
            log.warning(ENDLESS)
        return rows

    @property
    def held_out(self) -> list[TrainSequence]:
        """What is measured, and never trained."""
        return list(self._held_out) if len(self.rows) else []

    @property
    def digest(self) -> str:
        """Tells data apart that are not the same, row by row and in this order, or written by another chat template;
        empty as long as they are not read."""
        return self._content.digest if "rows" in self.__dict__ else ""

    def check(self, digest: str) -> None:
        """`CheckpointError` unless the data are those of a commit with this digest."""
        if len(self.rows) and digest != self.digest:
            raise CheckpointError(
                f"data.path={self._config.data.path!r}: its rows are not those that this run has trained so far, "
                f"or its model has another chat template "
                f"(digest {self.digest}, committed {digest or 'none'}); put them back, or start a new run"
            )

    def __call__(self, step: int, count: int) -> Sequence[TrainSequence]:
        """The rows of a step: those that are left of the epochs where these are counted, at most `count`."""
        last = rows_to_train(self._config, len(self.rows)) or (step + 1) * count
        return [self.rows[self._at(position)] for position in range(step * count, min(last, (step + 1) * count))]

    def _at(self, position: int) -> int:
        size = len(self.rows)
        return prompt_at(position, size, self._config.seed) if self._config.data.shuffle else position % size


@dataclass(frozen=True)
class DatasetPart:
    """Some rows of a dataset."""

    examples: Examples
    indices: range

    def make(self, index: int, masker: AssistantMasker) -> tuple[Conversation, list[MaskedText]]:
        """A row's conversation and what is trained of it; `RowError` if that is nothing."""
        conversation = self.examples[index].conversation
        try:
            return conversation, list(masker.rows(conversation))
        except MaskError as error:
            raise self.examples.wrong(index, str(error)) from None

    def too_long(self, index: int, row: MaskedText, config: RunConfig) -> RowError:
        """The error that says that a row does not fit."""
        hint = "set data.overlong=drop" if config.data.overlong == "refuse" else "raise it"
        reason = f"{len(row.tokens)} tokens, more than model.max_length={config.model.max_length}; {hint}"
        return self.examples.wrong(index, reason)


def fits(row: MaskedText, config: RunConfig) -> bool:
    """Whether a row is short enough to be trained."""
    return len(row.tokens) <= config.model.max_length


def _read(
    part: DatasetPart,
    masker: AssistantMasker,
    config: RunConfig,
    content: DatasetDigest | None = None,
    alive: Callable[[], None] = lambda: None,
) -> TokenizedDataset:
    """The rows of a part that are trained; `RowError` for the first one that is refused."""
    rows = TokenizedDataset()
    for index in part.indices:
        if rows.counts["read"] % ROWS_PER_BEAT == 0:
            alive()
        rows.counts["read"] += 1
        try:
            conversation, made = part.make(index, masker)
        except RowError as error:
            rows.leave_out("invalid", config.data.invalid, error)
            continue
        if content:
            content.add({"messages": conversation.messages, "tools": conversation.tools})
        for row in made:
            if fits(row, config):
                rows.add(row)
            else:
                too_long = part.too_long(index, row, config)
                rows.leave_out("longer than model.max_length", config.data.overlong, too_long)
    return rows


def train_eval_split(data: DataConfig) -> tuple[DatasetPart, DatasetPart]:
    """The rows to train and those that are held out.

    `ConfigError` when a dataset cannot be read, has no answers, or fewer rows than are to be held out, and when those
    are trained too.
    """
    examples = _answered(data)
    if data.eval_split or data.eval_path:
        moved = {"path": data.eval_path or data.path, "split": data.eval_split or "train"}
        apart = data.model_copy(update=moved)
        refuse_overlap(data, apart, "data")
        others = _answered(apart)
        return DatasetPart(examples, range(len(examples))), DatasetPart(
            others, range(min(len(others), data.eval_rows or len(others)))
        )
    kept = len(examples) - data.eval_rows
    if kept < 1:
        expected = f"less than the {len(examples)} rows of data.path"
        raise ConfigError("data.eval_rows", data.eval_rows, expected, "lower it, or set data.eval_split")
    return DatasetPart(examples, range(kept)), DatasetPart(examples, range(kept, len(examples)))


def check_data(config: RunConfig) -> None:
    """`ConfigError` unless the dataset of a config can be read, and its first rows can be trained by the model."""
    data = config.data
    if not (data.path and config.has_sft):
        return
    masker = build_masker(config)
    for part in train_eval_split(data):
        _check_part(part, masker, config)


def _check_part(part: DatasetPart, masker: AssistantMasker, config: RunConfig) -> None:
    """`ConfigError` for the first row that is refused; where such rows are dropped, if no other is found."""
    looked = replace(part, indices=part.indices[:CHECKED_ROWS])
    try:
        rows = _read(looked, masker, config)
    except RowError as error:
        raise ConfigError("data.path", config.data.path, "rows that can be trained", str(error)) from None
    if not len(rows) and rows.wrong:
        raise ConfigError("data.path", config.data.path, "rows that can be trained", str(rows.wrong))


def first_trainable_row(config: RunConfig) -> tuple[MaskedText, str] | None:
    """What the first row trains that can be trained, and what to warn of; None for a run without a dataset."""
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
    """The text of a row for a terminal: what is trained in green, the rest as it is."""
    text, at = "", 0
    for begin, end in row.spans:
        text += f"{row.text[at:begin]}\x1b[32m{row.text[begin:end]}\x1b[0m"
        at = end
    return text + row.text[at:]


def build_masker(config: RunConfig) -> AssistantMasker:
    """What masks conversations for the config's model."""
    return AssistantMasker(ChatTokenizer(model_directory(config.model)), config.data.train_on)


def _answered(data: DataConfig) -> Examples:
    examples = Examples.open(data)
    if not examples.answered:
        hint = "set data.columns.completion, or train it by RL with task.options.path"
        raise ConfigError("data.columns.completion", data.columns.completion, "a column of the dataset", hint)
    return examples
