"""The meaning of a row's columns: conversations and prompts by index.

Owns the choice of columns and its errors. A dataset has a column of whole conversations (`messages`), or one of prompts
with or without one of completions. Promises that a named column that does not exist, and a dataset without rows, are a
`ConfigError` before any row is read; and that a row which is no conversation is a `RowError` that names it. An index
gives the same example in every process and after every restart, as long as the data are the same.
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
from pipeline.data.row_sources import Rows, open_rows
from pipeline.errors import ConfigError, RecordError


class RowError(RecordError):
    """An unusable row of a dataset; the message names the dataset, the row and the reason."""


@dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
        conversation: all of its messages; in a dataset of prompts, only the prompt.
        columns: its other columns by name, such as the answer that a reward compares with.
    """

    conversation: Conversation
    columns: Mapping[str, Any]

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the policy's turn: the prompt's, or all before the last assistant turn."""
        conversation = self.conversation
        if conversation.prompt_length:
            return conversation.messages[: conversation.prompt_length]
        return conversation.messages[: conversation.turns[-1]] if conversation.turns else conversation.messages


class Examples:
    """The rows of a dataset as examples, by index."""

    def __init__(self, rows: Rows, columns: ColumnsConfig, name: str, section: str = "data") -> None:
        """`ConfigError` unless there are rows, with the configured columns.

        Errors call the dataset `name`, and use the keys of `section`.
        """
        self._rows, self._name = rows, name
        if not len(rows):
            raise ConfigError(f"{section}.path", name, "a dataset with rows", "it has none; look at its split")
        self._columns = _chosen_columns(rows.columns, columns, f"{section}.columns")

    @classmethod
    def open(cls, source: SourceConfig, section: str = "data") -> "Examples":
        """The examples of a source; `ConfigError` with a key of `section` if it is unreadable or empty, or lacks a
        column."""
        return cls(open_rows(source, section), source.columns, f"{source.path} ({source.split})", section)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def answered(self) -> bool:
        """Whether rows contain answers, which supervised fine-tuning needs; false for a dataset of prompts."""
        return "messages" in self._columns or "completion" in self._columns

    def __getitem__(self, index: int) -> Example:
        """Row `index`; `RowError` if it is no conversation."""
        try:
            return self._example(self._rows[index])
        except RecordError as error:  # its message has the line already
            raise RowError(f"{self._name}: row {index}: {error}") from None
        except MessageError as error:
            raise self.wrong(index, str(error)) from None

    def wrong(self, index: int, reason: str) -> RowError:
        """The error for an unusable row `index`, with the reason."""
        location = self._rows.location(index)
        return RowError(f"{self._name}: row {index}: {reason}{location and f' ({location})'}")

    def _example(self, row: Mapping[str, Any]) -> Example:
        used = set(self._columns.values())
        rest = {name: value for name, value in row.items() if name not in used}
        values = {key: row.get(name) for key, name in self._columns.items()}
        return Example(self._conversation(without_keys_of_other_rows(values) if self._rows.columnar else values), rest)

    def _conversation(self, row: Mapping[str, Any]) -> Conversation:
        tools = read_tools(row.get("tools"))
        if "messages" in self._columns:
            return Conversation(read_messages(row.get("messages")), tools=tools)
        prompt = read_messages(row.get("prompt"))
        completion = read_messages(row.get("completion"), "assistant") if "completion" in self._columns else ()
        return Conversation((*prompt, *completion), prompt_length=len(prompt), tools=tools)


def _chosen_columns(available: tuple[str, ...], columns: ColumnsConfig, section: str) -> dict[str, str]:
    """The columns to read from each row: the name in the dataset by the column's meaning."""
    named = {key: getattr(columns, key) for key in ColumnsConfig.model_fields}
    for key in sorted(columns.model_fields_set):
        if named[key] not in available and named[key] != ColumnsConfig.model_fields[key].default:
            hint = closest_match(named[key], list(available))
            raise ConfigError(f"{section}.{key}", named[key], "a column of the dataset", hint)
    own = {key for key, field in ColumnsConfig.model_fields.items() if named[key] != field.default}
    prefers_prompt = bool(own & {"prompt", "completion"}) and "messages" not in own  # an explicit name wins
    if named["messages"] in available and not (prefers_prompt and named["prompt"] in available):
        keys = ["messages", "tools"]
    elif named["prompt"] in available:
        keys = ["prompt", "completion", "tools"]
    else:
        expected = f"a column of the dataset, which has {', '.join(available)}"
        raise ConfigError(f"{section}.messages", named["messages"], expected, f"set it, or {section}.prompt")
    return {key: named[key] for key in keys if named[key] in available}
