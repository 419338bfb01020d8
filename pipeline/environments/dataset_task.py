"""Prompts from a dataset.

Owns the built-in task `dataset`: which rows are trained, which are held out, and the prompt of a row. Rewards are
functions (`reward.functions`), which receive the columns of the row. Promises that an index gives the same prompt in
every process, that no row is both trained and held out, and that a missing path, split or column is a `ConfigError`
before anything starts. `pipeline.data` owns how rows are read.
"""

from collections.abc import Sequence
from functools import cached_property

from pydantic import Field

from pipeline.config.data_keys import SourceConfig, base_split, refuse_overlap
from pipeline.config.value_types import NotNegative
from pipeline.data import Examples
from pipeline.environments.task_protocol import Prompt, Task, TaskOptions
from pipeline.errors import ConfigError

SECTION = "task.options"
EVAL_ROWS = 256
"""Largest number of held-out rows if the options give no number."""


class DatasetOptions(SourceConfig, TaskOptions):
    """The rows, the split into training and held-out rows, and the format of a prompt."""

    eval_path: str = Field("", description="Source of the held-out rows; empty: `path`.")
    eval_split: str = Field(
        "",
        description="Split of the held-out rows; empty: the split of `split`, without its slice, in `eval_path`; "
        "without `eval_path` the last rows of `split`.",
    )
    eval_rows: NotNegative | None = Field(
        None,
        description="Number of held-out rows: the last of `split`, or the first of `eval_split`; 0: all rows of "
        "`eval_split`. Unset: at most 256, and at most a tenth of `split`, but at least one.",
    )
    system: str = Field("", description="System message before each prompt that has none; empty: none.")
    plain: bool = Field(
        False, description="Pass prompts and completions to functions of TRL's form as texts, not as messages."
    )

    @property
    def apart(self) -> bool:
        """Whether held-out rows come from a separate source."""
        return bool(self.eval_path or self.eval_split)

    def held_out(self) -> SourceConfig:
        """The source of the held-out rows."""
        where = {"path": self.eval_path or self.path, "split": self.eval_split or base_split(self.split)}
        return SourceConfig(subset=self.subset, revision=self.revision, columns=self.columns, **where)


class Dataset(Task):
    """One prompt per row."""

    name = "dataset"
    Options = DatasetOptions
    options: DatasetOptions
    has_reward = False

    def __init__(self, options: DatasetOptions, seed: int) -> None:
        super().__init__(options, seed)
        if not options.path:
            raise ConfigError(f"{SECTION}.path", "", "a file, a folder, or a name on the Hub", "set it")
        if options.apart:
            refuse_overlap(options, options.held_out(), SECTION)
        self._examples = Examples.open(options, SECTION)
        self._held_out_rows = 0 if options.apart else self._last_rows(len(self._examples))

    def __len__(self) -> int:
        return len(self._examples) - self._held_out_rows

    def prompt(self, index: int) -> Prompt:
        return self._prompt(self._examples, index)

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def reward(self, prompt: Prompt, text: str) -> float:
        raise NotImplementedError("a dataset has no reward; set reward.functions")

    def _last_rows(self, rows: int) -> int:
        """The number of the last `rows` rows to hold out; `ConfigError` if none would be left to train."""
        configured = self.options.eval_rows
        held_out = min(EVAL_ROWS, max(1, rows // 10)) if configured is None else configured
        if held_out < rows:
            return held_out
        if configured is None:
            expected = f"a dataset of 2 rows or more, so that one can be held out; {self.options.split} has {rows}"
            raise ConfigError(f"{SECTION}.path", self.options.path, expected, f"set {SECTION}.eval_path, or add rows")
        hint = f"lower it, leave it out, or set {SECTION}.eval_split or eval_path"
        raise ConfigError(f"{SECTION}.eval_rows", configured, f"less than the {rows} rows of the dataset", hint)

    @cached_property
    def _held_out(self) -> list[Prompt]:
        if not self.options.apart:
            return [self._prompt(self._examples, row) for row in range(len(self), len(self._examples))]
        examples = Examples.open(self.options.held_out(), SECTION)
        configured = EVAL_ROWS if self.options.eval_rows is None else self.options.eval_rows
        count = min(configured or len(examples), len(examples))
        return [self._prompt(examples, row) for row in range(count)]

    def _prompt(self, examples: Examples, row: int) -> Prompt:
        """The prompt of a row; `RowError` if there is nothing before its answer."""
        example = examples[row]
        system, messages = self.options.system, example.prompt
        if not messages:
            raise examples.wrong(row, "no message comes before the assistant's")
        if system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        columns = dict(example.columns)
        return Prompt(messages, columns=columns, as_text=self.options.plain, tools=example.conversation.tools)
