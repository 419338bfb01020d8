"""From a path to rows by number.

Owns the meaning of a path, and opening it: JSON files directly, all others with the library `datasets`, which maps rows
from disk, so a dataset may be larger than memory. Promises one `ConfigError` for a source that cannot be opened, lacks
the split, or has an unknown format. `datasets` is imported when a source is opened, not earlier.
"""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import conf
from pipeline.config.data_keys import SourceConfig, base_split
from pipeline.data.jsonl_index import SUFFIXES, JsonRows, files_of, splits_of
from pipeline.errors import ConfigError, one_line

SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files that identify a folder of `Dataset.save_to_disk`."""


class Rows(Protocol):
    """Rows by number, each a mapping from column to value."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def columnar(self) -> bool:
        """Whether each object in a row has the keys of all rows, those that it lacks with None."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Row `index`; `RecordError` with the row's location when it cannot be read."""
        ...

    def location(self, index: int) -> str:
        """The file and the line of a row; empty where unknown."""
        ...


class Table:
    """Some rows, as a split names them, or all rows of a `datasets.Dataset`."""

    def __init__(self, rows: Any, columns: Sequence[str], part: Sequence[int]) -> None:
        self._rows, self._part, self.columns = rows, part, tuple(columns)
        self.columnar = not isinstance(rows, JsonRows)

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row: Mapping[str, Any] = self._rows[self._part[index]]
        return row

    def location(self, index: int) -> str:
        """See `Rows`; unknown for rows of the library `datasets`."""
        return self._rows.location(self._part[index]) if isinstance(self._rows, JsonRows) else ""


def open_rows(source: SourceConfig, section: str = "data") -> Rows:
    """The rows of a split; `ConfigError` with a key of `section` if they cannot be read."""
    import datasets

    path = _on_disk(source.path)
    datasets.disable_progress_bars()
    try:
        return _open_here(path, source) if path.exists() else _open_hub(source)
    except ConfigError as error:
        raise ConfigError(f"{section}.{error.key}", error.value, error.expected, error.hint) from None
    except Exception as error:  # noqa: BLE001 the library raises errors of many types: all mean an unreadable source
        raise _error(section, source, error) from None


def _on_disk(path: str) -> Path:
    """The file or folder `path`; one of the project, `conf/data/…`, is found from any working directory."""
    packaged = Path(conf.__file__).parent.parent / path
    return packaged if path.startswith("conf/data/") and not Path(path).exists() else Path(path)


def _open_here(path: Path, source: SourceConfig) -> Rows:
    for key in ("subset", "revision"):
        if getattr(source, key):
            raise ConfigError(key, getattr(source, key), "nothing, for data on disk", "leave it out")
    if path.is_dir() and any((path / name).is_file() for name in SAVED):
        return _table(_saved(path, source))
    files = [*path.iterdir()] if path.is_dir() else [path]
    kinds = {file.suffix for file in files if file.suffix in (*SUFFIXES, ".parquet")}
    if kinds == {".parquet"}:
        escaped = glob.escape(str(path))  # the library takes patterns
        if path.is_file():
            return _load("parquet", source, data_files=escaped)
        if escaped != str(path):
            raise ConfigError("path", source.path, "a folder whose path has none of * ? [ ]", "rename it")
        return _load(str(path), source)
    if kinds and kinds <= set(SUFFIXES):
        return _read_json(path, source)
    expected = f"a file, or a folder of files of one kind: {', '.join(SUFFIXES)} or .parquet"
    raise ConfigError("path", source.path, expected, "convert what is there, for instance to JSONL")


def _read_json(path: Path, source: SourceConfig) -> Rows:
    """The rows of a file, which is the split `train`, or of a folder's files; with the slices that the split names."""
    from datasets import ReadInstruction

    splits = {base_split(part) for part in source.split.split("+")}
    split = splits.pop()
    paths = files_of(path, split) if path.is_dir() else [path]
    if splits or not paths or (path.is_file() and split != "train"):
        available = splits_of(path) if path.is_dir() else ["train"]
        raise ConfigError("split", source.split, f"one of {', '.join(available)}, or a slice such as train[:10%]")
    rows = JsonRows(paths)
    parts = ReadInstruction.from_spec(source.split).to_absolute({split: len(rows)})
    return Table(rows, rows.columns, _joined([_numbers(part, len(rows)) for part in parts]))


def _numbers(part: Any, rows: int) -> range:
    """The row numbers of an absolute instruction of the library, in a split of `rows` rows."""
    return range(part.from_ or 0, rows if part.to is None else part.to)


def _joined(parts: Sequence[range]) -> Sequence[int]:
    return parts[0] if len(parts) == 1 else [number for part in parts for number in part]


def _table(table: Any) -> Rows:
    return Table(table, table.column_names, range(len(table)))


def _saved(path: Path, source: SourceConfig) -> Any:
    """What the split names of a dataset that `save_to_disk` wrote: several splits, or one, which is `train` and has the
    name too that it had when it was saved."""
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        saved = {str(saved.split or "train"): saved, "train": saved}
    lengths = {name: len(table) for name, table in saved.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(lengths)
        tables = [saved[part.splitname].select(_numbers(part, lengths[part.splitname])) for part in parts]
    except (ValueError, IndexError) as error:
        expected = f"one of {', '.join(saved)}, or a slice such as train[:10%]"
        raise ConfigError("split", source.split, expected, one_line(error)) from None
    return tables[0] if len(tables) == 1 else datasets.concatenate_datasets(tables)


def _open_hub(source: SourceConfig) -> Rows:
    if source.path.startswith((".", "/", "~")) or Path(source.path).suffix in (*SUFFIXES, ".parquet"):
        raise ConfigError("path", source.path, "a file or folder that exists", "there is none; fix the path")
    return _load(source.path, source, name=source.subset or None, revision=source.revision or None)


def _load(path: str, source: SourceConfig, **settings: Any) -> Rows:
    import datasets

    return _table(datasets.load_dataset(path, split=source.split, **settings))


def _error(section: str, source: SourceConfig, error: Exception) -> ConfigError:
    """The library's error, as a `ConfigError` under the key that it concerns."""
    message = one_line(error)
    if isinstance(error, StopIteration) or "no data" in message:  # the library's errors for an empty file or slice
        return ConfigError(f"{section}.path", source.path, "a dataset with rows", f"{source.split} has none")
    if "split" in message.lower():
        return ConfigError(f"{section}.split", source.split, "a split that is there, or a slice of one", message)
    if source.subset and "BuilderConfig" in message:
        return ConfigError(f"{section}.subset", source.subset, "a subset that is there", message)
    return ConfigError(f"{section}.path", source.path, "a dataset that can be read", message)
