"""Prompts from a dataset.

Owns the built-in task `dataset`: which rows are trained and which are held out, and what a row becomes. Rewards are
functions (`reward.functions`), which get the columns of the row. Promises that an index gives the same prompt in every
process, and that no row is both trained and held out; that a path, split or column that is not there is a `ConfigError`
before anything starts. How rows are read is `pipeline.data`'s.
"""

from collections.abc import Sequence
from functools import cached_property

from pydantic import Field

from pipeline.config.data import SourceConfig, base_split, refuse_overlap
from pipeline.config.values import NotNegative
from pipeline.data import Example, Examples
from pipeline.errors import ConfigError
from pipeline.tasks.protocol import Prompt, Task, TaskOptions

SECTION = "task.options"


class DatasetOptions(SourceConfig, TaskOptions):
    """Which rows, and how they are asked."""

    eval_path: str = Field("", description="Where the held-out rows are; empty: in `path`.")
    eval_split: str = Field(
        "",
        description="Split of the held-out rows; empty: that of `split` without its slice in `eval_path`, or, where "
        "that is empty too, the last rows of `split`.",
    )
    eval_rows: NotNegative = Field(
        256, description="Rows held out: the last of `split`, or the first of the held-out ones; 0: all of those."
    )
    system: str = Field("", description="System message before each prompt that has none; empty: none.")
    plain: bool = Field(
        False, description="Functions of TRL's form get prompts and completions as texts, not as messages."
    )

    @property
    def apart(self) -> bool:
        """Whether held-out rows lie in a place of their own."""
        return bool(self.eval_path or self.eval_split)

    def held_out(self) -> SourceConfig:
        """Where the held-out rows are read."""
        where = {"path": self.eval_path or self.path, "split": self.eval_split or base_split(self.split)}
        return SourceConfig(subset=self.subset, revision=self.revision, columns=self.columns, **where)


class Dataset(Task):
    """One prompt a row."""

    name = "dataset"
    Options = DatasetOptions
    options: DatasetOptions
    scores = False

    def __init__(self, options: DatasetOptions, seed: int) -> None:
        super().__init__(options, seed)
        if not options.path:
            raise ConfigError(f"{SECTION}.path", "", "a file, a folder, or a name on the Hub", "set it")
        if options.apart:
            refuse_overlap(options, options.held_out(), SECTION)
        self._examples = Examples.open(options, SECTION)
        self._held_out_rows = 0 if options.apart else options.eval_rows
        if len(self) < 1:
            expected = f"less than the {len(self._examples)} rows of the dataset"
            raise ConfigError(f"{SECTION}.eval_rows", options.eval_rows, expected, "lower it, or set eval_split")

    def __len__(self) -> int:
        return len(self._examples) - self._held_out_rows

    def prompt(self, index: int) -> Prompt:
        return self._asked(self._examples[index])

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def reward(self, prompt: Prompt, text: str) -> float:
        raise NotImplementedError("a dataset has no reward; set reward.functions")

    @cached_property
    def _held_out(self) -> list[Prompt]:
        if not self.options.apart:
            return [self._asked(self._examples[row]) for row in range(len(self), len(self._examples))]
        examples = Examples.open(self.options.held_out(), SECTION)
        count = min(self.options.eval_rows or len(examples), len(examples))
        return [self._asked(examples[row]) for row in range(count)]

    def _asked(self, example: Example) -> Prompt:
        system, messages = self.options.system, example.prompt
        if system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        columns = dict(example.columns)
        return Prompt(messages, columns=columns, plain=self.options.plain, tools=example.conversation.tools)
