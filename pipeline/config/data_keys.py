"""The keys of datasets, `data.*`: the source of rows, their columns, and the trained turns.

A `SourceConfig` has the keys of any reader of rows; `DataConfig` adds those of supervised fine-tuning.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.config.value_types import NotNegative, Section
from pipeline.errors import ConfigError


class ColumnsConfig(Section):
    """Names of a dataset's columns. A missing column is an error only if its name was set."""

    messages: str = Field("messages", description="Column with the whole conversation, a list of messages.")
    prompt: str = Field("prompt", description="Column with the prompt: a text, or a list of messages.")
    completion: str = Field("completion", description="Column with the answer to the prompt: a text, or messages.")
    chosen: str = Field("chosen", description="Column with the preferred completion: a text, or messages.")
    rejected: str = Field("rejected", description="Column with the other completion: a text, or messages.")
    label: str = Field("label", description="Column with true for a desirable completion, false for another (KTO).")
    tools: str = Field("tools", description="Column with the tools that a conversation may call, as JSON schemas.")


class SourceConfig(Section):
    """The source of rows."""

    path: str = Field(
        "",
        description="A file (`.jsonl`, `.json`, `.parquet`), a folder of them or of a saved dataset, or a name on the "
        "Hugging Face Hub; empty: none.",
    )
    subset: str = Field("", description="Subset (configuration) of a dataset on the Hub.")
    revision: str = Field("", description="Branch, tag or commit of a dataset on the Hub.")
    split: str = Field("train", description="Split to read; slices such as `train[:10%]` are allowed.")
    columns: ColumnsConfig = Field(ColumnsConfig(), description="Names of the columns, with keys as `data.columns.*`.")


class DataConfig(SourceConfig):
    """The conversations of supervised fine-tuning, which trains the task's demonstrations without a path; or the pairs
    of preference training."""

    eval_path: str = Field("", description="Source of the held-out rows; empty: data.path.")
    eval_split: str = Field(
        "", description="Split of the held-out rows; empty: the last data.eval_rows rows of data.split."
    )
    eval_rows: NotNegative = Field(
        0, description="Number of held-out rows: the first of data.eval_split, or without it the last of data.split."
    )
    train_on: Literal["all", "last", "each"] = Field(
        "all",
        description="Trained assistant turns: `all` of a conversation, the `last` one, or `each` as a separate row "
        "with its context, as needed for templates that drop the reasoning of earlier turns.",
    )
    shuffle: bool = Field(True, description="Shuffle the rows of each epoch, by seed.")
    overlong: Literal["drop", "refuse"] = Field(
        "drop", description="Rows of more than model.max_length tokens: `drop` and count them, or `refuse` the run."
    )
    invalid: Literal["refuse", "drop"] = Field(
        "refuse",
        description="Rows that cannot be trained: `refuse` the run and name the first one, or `drop` and count them.",
    )


def base_split(split: str) -> str:
    """The name of a split without its slice: `train` for `train[:10%]`."""
    return split.partition("[")[0]


def refuse_overlap(train: SourceConfig, held_out: SourceConfig, section: str) -> None:
    """Raise `ConfigError` if trained rows are held out too: both sources read one split, and not both a slice of it.

    Two slices are not compared.
    """
    is_same_path = located_path(train.path) == located_path(held_out.path)
    is_same = is_same_path and base_split(train.split) == base_split(held_out.split)
    if is_same and not ("[" in train.split and "[" in held_out.split):
        expected = f"other rows than those of split={train.split}"
        hint = "name another split, or slices of both, such as train[:90%] and train[90%:]"
        raise ConfigError(f"{section}.eval_split", held_out.split, expected, hint)


def located_data(data: DataConfig) -> DataConfig:
    """The data with absolute paths of files on disk, independent of the working directory."""
    return data.model_copy(update={"path": located_path(data.path), "eval_path": located_path(data.eval_path)})


def located_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A task's options with absolute paths: of its dataset, a wrapped task's dataset, files in its command, and an
    interpreter.
    """
    return {key: _located(key, value) for key, value in options.items()}


def _located(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return located_options(value)
    if key == "command" and isinstance(value, Sequence) and not isinstance(value, str):
        return [_located_program(part) for part in value]
    if key == "python" and isinstance(value, str):
        return _located_program(value)
    return located_path(value) if key in ("path", "eval_path") and isinstance(value, str) else value


def _located_program(part: Any) -> Any:
    """The absolute path of an existing file; anything else as it is.

    Links stay: the python of a virtual environment is a link to an interpreter without its packages.
    """
    with suppress(OSError):  # a text that is too long for a path
        if isinstance(part, str) and Path(part).is_file():
            return str(Path(part).absolute())
    return part


def located_path(path: str) -> str:
    """The absolute path of an existing file or directory; any other text as it is."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path
