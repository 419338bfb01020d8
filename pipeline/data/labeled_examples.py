"""Single completions with a label, by index of the row.

Owns the meaning of the column `label`, in TRL's forms:

    {"prompt": "2+2?", "completion": "4", "label": true}           # one completion; also with messages
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}             # a pair: a desirable and an undesirable completion

Promises that a dataset with neither is a `ConfigError` before any row is read, and that a row without a label is a
`RowError` which names its location, its column and the fix. Knows neither tokens nor models.
"""

from dataclasses import dataclass

from pipeline.config.data_keys import SourceConfig
from pipeline.data.chat_messages import Conversation
from pipeline.data.examples import Examples, RowError
from pipeline.data.preference_examples import PreferenceExamples
from pipeline.data.row_sources import open_rows
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class LabeledCompletion:
    """A conversation whose completion is desirable (`label`) or not."""

    conversation: Conversation
    label: bool


class LabeledExamples:
    """The rows of a dataset, each one labeled completion, or two of a pair."""

    def __init__(self, examples: Examples | PreferenceExamples, column: str) -> None:
        """`column` is the name of the column with the label, which pairs do not have."""
        self._examples, self._column = examples, column

    @classmethod
    def open(cls, source: SourceConfig) -> "LabeledExamples":
        """The completions of a source; `ConfigError` if it is unreadable or empty, or has neither labels nor pairs."""
        available, columns = open_rows(source).columns, source.columns
        if columns.label not in available:
            if not {columns.chosen, columns.rejected} <= set(available):
                expected = f"a column of the dataset ({', '.join(available)}), or pairs in chosen and rejected"
                raise ConfigError("data.columns.label", columns.label, expected, "set it to the column of labels")
            return cls(PreferenceExamples.open(source), columns.label)
        examples = Examples.open(source)
        if not examples.answered:
            hint = "set data.columns.completion"
            raise ConfigError("data.columns.completion", columns.completion, "a column of the dataset", hint)
        return cls(examples, columns.label)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> tuple[LabeledCompletion, ...]:
        """The completions of row `index`, the desirable one of a pair first; `RowError` if the row has none."""
        if isinstance(self._examples, PreferenceExamples):
            chosen, rejected = self._examples[index].conversations
            return LabeledCompletion(chosen, True), LabeledCompletion(rejected, False)
        example = self._examples[index]
        label = example.columns.get(self._column)
        if not isinstance(label, bool):
            raise self.wrong(index, f"{self._column} is {label!r}, not true or false; correct it")
        return (LabeledCompletion(example.conversation, label),)

    def wrong(self, index: int, reason: str) -> RowError:
        """The error for an unusable row `index`, with the reason."""
        return self._examples.wrong(index, reason)
