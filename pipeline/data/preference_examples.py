"""The preference pairs of a dataset, by index.

Owns the meaning of the columns `prompt`, `chosen` and `rejected`, in the forms that TRL accepts:

    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}                       # texts
    {"prompt": [MESSAGES], "chosen": [MESSAGES], "rejected": [MESSAGES]}     # messages
    {"chosen": [MESSAGES], "rejected": [MESSAGES]}                           # conversations that begin alike
    {"prompt": "2+2?", "chosen": [MESSAGES], "rejected": [MESSAGES]}         # the same, the prompt stated again

A text is a message of the user or of the assistant. In conversations that begin alike, the prompt is the messages that
both have, without the last one of the shorter conversation. Promises that a missing column is a `ConfigError` before
any row is read, and that a row that is no pair is a `RowError` which names its location, its column and the fix. Knows
neither tokens nor models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config import closest_match
from pipeline.config.data_keys import ColumnsConfig, SourceConfig
from pipeline.data.chat_messages import (
    Conversation,
    Message,
    MessageError,
    read_messages,
    read_tools,
    without_keys_of_other_rows,
)
from pipeline.data.examples import RowError
from pipeline.data.row_sources import Rows, open_rows
from pipeline.errors import ConfigError, RecordError

Messages = tuple[Message, ...]
_FIX = "correct it, or set data.invalid=drop"


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with two completions; `chosen` is the preferred one."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        """The chosen and the rejected conversation, in this order."""
        chosen, rejected = (
            Conversation((*self.prompt, *completion), prompt_length=len(self.prompt), tools=self.tools)
            for completion in (self.chosen, self.rejected)
        )
        return chosen, rejected


class PreferenceExamples:
    """The rows of a dataset as pairs, by index."""

    def __init__(self, rows: Rows, columns: ColumnsConfig, name: str) -> None:
        """`ConfigError` unless there are rows, with the columns of both completions. Errors call the dataset `name`."""
        self._rows, self._name, self._columns = rows, name, columns
        if not len(rows):
            raise ConfigError("data.path", name, "a dataset with rows", "it has none; look at its split")
        for key in ("chosen", "rejected"):
            self._require(key, getattr(columns, key))
        if "prompt" in columns.model_fields_set and columns.prompt != ColumnsConfig.model_fields["prompt"].default:
            self._require("prompt", columns.prompt)

    @classmethod
    def open(cls, source: SourceConfig) -> "PreferenceExamples":
        """The pairs of a source; `ConfigError` if it is unreadable or empty, or lacks a column."""
        return cls(open_rows(source), source.columns, f"{source.path} ({source.split})")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PreferencePair:
        """Pair `index`; `RowError` if the row is none."""
        try:
            row = self._rows[index]
        except RecordError as error:  # its message has the line already
            raise RowError(f"{self._name}: row {index}: {error}") from None
        try:
            return self._pair(row)
        except MessageError as error:
            raise self.wrong(index, str(error)) from None

    def wrong(self, index: int, reason: str) -> RowError:
        """The error for an unusable row `index`, with the reason."""
        location = self._rows.location(index)
        return RowError(f"{self._name}: row {index}: {reason}{location and f' ({location})'}")

    def _require(self, key: str, name: str) -> None:
        if name not in self._rows.columns:
            available = self._rows.columns
            hint = closest_match(name, list(available)) or f"set it to one of {', '.join(available)}"
            raise ConfigError(f"data.columns.{key}", name, "a column of the dataset, for preference pairs", hint)

    def _pair(self, row: Mapping[str, Any]) -> PreferencePair:
        columns = self._columns
        if self._rows.columnar:
            row = without_keys_of_other_rows(row)
        prompt, chosen, rejected = (row.get(name) for name in (columns.prompt, columns.chosen, columns.rejected))
        tools = _of_column(columns.tools, lambda: read_tools(row.get(columns.tools)))
        for name, value in ((columns.chosen, chosen), (columns.rejected, rejected)):
            if value is None or value == "" or value == []:
                raise MessageError(f"{name} is empty; {_FIX}")
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise MessageError(
                f"{columns.chosen} and {columns.rejected} have two forms; make both a text, or both a list of messages"
            )
        one, other = (
            _of_column(name, lambda value=value: read_messages(value, "assistant"))
            for name, value in ((columns.chosen, chosen), (columns.rejected, rejected))
        )
        if one[0]["role"] == other[0]["role"] == "assistant":
            if prompt is None or prompt == "" or prompt == []:
                raise MessageError(f"{columns.prompt} is missing, and the completions have no messages before; add it")
            return PreferencePair(_of_column(columns.prompt, lambda: read_messages(prompt)), one, other, tools)
        common = _common_messages(one, other)
        if not common:
            raise MessageError(
                f"{columns.chosen} and {columns.rejected} begin with different messages; let both begin with the prompt"
            )
        return PreferencePair(one[:common], one[common:], other[common:], tools)


def _of_column(name: str, read: Any) -> Any:
    """The result of `read`; its `MessageError` gets the name of the column, and the fix."""
    try:
        return read()
    except MessageError as error:
        raise MessageError(f"{name}: {error}; {_FIX}") from None


def _common_messages(one: Messages, other: Messages) -> int:
    """The number of messages that both begin with, without the last message of the shorter."""
    most = min(len(one), len(other)) - 1
    return next((index for index in range(most) if one[index] != other[index]), most)
