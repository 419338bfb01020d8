"""Training rows in a folder of memory-mapped files.

Owns the format of the folder and its validation. Promises that a folder without a manifest is invalid; that torn data,
numbers that are not finite and other versions raise an error before any row is trained; and that no file stays mapped
after `close`. Pages are read when rows are used; the folder is never changed. Must not know models, jobs or ranks.

    write_packed(folder, rows, vocabulary=len(tokenizer))
    with PackedRows(folder) as packed:
        packed.check(vocabulary=model.vocabulary, longest=config.model.max_length)
        batch = packed.rows(packed.of_prompts(0, 32))
        …
        del batch                # rows are views of the maps, and must be deleted before these close

Notation: R rows of T₁ … T_R tokens. Each array is a file of little-endian numbers without a header.

    lengths     int64[R]             tokens of each row
    prompts     int64[R]             key of the prompt that the row answers
    tokens      int32[Σ T]
    mask        uint8[Σ T]           1 for the tokens that the loss counts
    advantages  float32[R or Σ T]    one for each row, or one for each token
    sampler_logprobs, old_logprobs, reference, values, returns    float32[Σ T], each there for all rows or for none
    manifest.json                    version, vocabulary, rows, tokens, and type, size and SHA-256 of each array; it is
                                     written last
"""

import gc
import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import COLUMNS, TrainSequence, refuse_unsampled_rows
from pipeline.utils import shared_files

PACKED_VERSION = 1
MANIFEST = "manifest.json"
_TYPES = {"lengths": "<i8", "prompts": "<i8", "tokens": "<i4", "mask": "u1"} | dict.fromkeys(COLUMNS, "<f4")
_ALWAYS = ("lengths", "prompts", "tokens", "mask", "advantages")


class Array(msgspec.Struct, frozen=True):
    """One file: its numpy type, its size in bytes, and the hex SHA-256 of its content."""

    dtype: str
    size: int
    sha256: str


class PackedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`, the list of a folder's arrays; it is written last."""

    version: int
    vocabulary: int
    rows: int
    tokens: int
    arrays: dict[str, Array]


def write_packed(folder: Path, rows: Sequence[TrainSequence], vocabulary: int) -> PackedManifest:
    """Write the rows to a new folder, or one without a manifest; token ids are below `vocabulary`.

    Raises `TrainingError` for a row that cannot be trained; then nothing is written.
    """
    if (folder / MANIFEST).exists():
        raise TrainingError(f"{folder} holds packed rows already; write these to another folder")
    if not rows:
        raise TrainingError(f"there are no rows to write to {folder}")
    for index, row in enumerate(rows):
        row.check(f"row {index}")
    arrays = _arrays(rows)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = PackedManifest(
        version=PACKED_VERSION,
        vocabulary=vocabulary,
        rows=len(rows),
        tokens=len(arrays["tokens"]),
        arrays={name: _write(folder / f"{name}.bin", name, array) for name, array in arrays.items()},
    )
    shared_files.write_document(folder / MANIFEST, manifest)
    return manifest


def _arrays(rows: Sequence[TrainSequence]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {
        "lengths": np.array([len(row) for row in rows]),
        "prompts": np.array([row.prompt for row in rows]),
        "tokens": np.concatenate([row.tokens for row in rows]),
        "mask": np.concatenate([np.asarray(row.mask, np.uint8) for row in rows]),
    }
    for column in COLUMNS:
        values = [getattr(row, column) for row in rows]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            index = next(index for index, value in enumerate(values) if value is None)
            raise TrainingError(f"row {index} has no {column}, others do")
        if column == "advantages" and all(np.ndim(value) == 0 for value in values):
            arrays[column] = np.array(values)
        else:
            arrays[column] = np.concatenate([_for_tokens(v, len(row)) for v, row in zip(values, rows, strict=True)])
    return arrays


def _for_tokens(value: float | NDArray[np.float32], tokens: int) -> NDArray[np.float32]:
    return np.broadcast_to(np.asarray(value, np.float32), (tokens,))


def _write(path: Path, name: str, array: NDArray[Any]) -> Array:
    data = array.astype(_TYPES[name]).tobytes()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Array(_TYPES[name], len(data), hashlib.sha256(data).hexdigest())


class PackedRows:
    """The rows of a folder, as views of its files. Opening validates everything except the values; see `check`."""

    def __init__(self, folder: Path) -> None:
        """Map the folder; `TrainingError` if it is torn, or of another version."""
        self.folder = folder
        self.manifest = _read_manifest(folder)
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[str, NDArray[Any]] = {}
        try:
            for name, array in self.manifest.arrays.items():
                self._maps[name] = _map(folder / f"{name}.bin", array)
                self._views[name] = np.frombuffer(self._maps[name], array.dtype)
            self._check_counts()
        except BaseException:
            self._abandon()
            raise
        self._starts = np.concatenate([[0], np.cumsum(self._views["lengths"])])
        self._prompts = _by_prompt(self._views["prompts"])

    def __enter__(self) -> "PackedRows":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def prompts(self) -> int:
        """Number of different prompts."""
        return len(self._prompts)

    def cycle(self, step: int, count: int) -> list[int]:
        """The `count` row indices of a step, in the folder's order, continued at its beginning after the last row."""
        return [number % len(self) for number in range(step * count, (step + 1) * count)]

    def of_prompts(self, step: int, count: int) -> list[int]:
        """The row indices of a step of `count` prompts, in the same order; a prompt occurs once in a step."""
        if count > self.prompts:
            raise TrainingError(f"a step of {count} prompts is more than the {self.prompts} of {self.folder}")
        chosen = [number % self.prompts for number in range(step * count, (step + 1) * count)]
        return [row for number in chosen for row in self._prompts[number]]

    def rows(self, indices: Sequence[int]) -> list[TrainSequence]:
        """The rows at `indices`, as views, which must be deleted before `close`."""
        return [self._row(index) for index in indices]

    def check(self, vocabulary: int, longest: int, sampled: bool = False) -> None:
        """Raise `TrainingError` unless a model of this vocabulary and length can train every row; with `sampled`, by a
        policy loss.

        The error names the first invalid row: a number that is not finite, a token outside of the vocabulary, more than
        `longest` tokens.
        """
        if sampled:
            refuse_unsampled_rows([self._row(0)], f"{self.folder}: row")
        if self.manifest.vocabulary != vocabulary:
            raise TrainingError(
                f"{self.folder} was packed for a vocabulary of {self.manifest.vocabulary}; the model has {vocabulary}"
            )
        for index in range(len(self)):
            row = self._row(index)
            name = f"{self.folder}: row {index}"
            row.check(name)
            if len(row) > longest:
                raise TrainingError(f"{name} has {len(row)} tokens; the longest that can be trained has {longest}")
            if int(row.tokens.min()) < 0 or int(row.tokens.max()) >= vocabulary:
                raise TrainingError(f"{name} has a token outside of the vocabulary of {vocabulary}")

    def close(self) -> None:
        """Unmap all files. `TrainingError` if a row is still in use; then its files stay mapped."""
        self._views.clear()
        for name in list(self._maps):
            try:
                self._maps[name].close()
            except BufferError:
                self._close_unreferenced(name)
            del self._maps[name]

    def _abandon(self) -> None:
        """Close after an error. Files of rows in its traceback are unmapped when the traceback is freed."""
        with suppress(TrainingError):
            self.close()

    def _close_unreferenced(self, name: str) -> None:
        """Close a map after a garbage collection: a reference cycle, such as of an exception, may hold rows."""
        gc.collect()
        try:
            self._maps[name].close()
        except BufferError:
            raise TrainingError(f"rows of {self.folder} are still in use ({name}); drop them before closing") from None

    def _row(self, index: int) -> TrainSequence:
        part = slice(int(self._starts[index]), int(self._starts[index + 1]))
        views = self._views
        columns: Mapping[str, Any] = {name: views[name][part] for name in COLUMNS[1:] if name in views}
        of_rows = len(views["advantages"]) == len(self)
        advantages = float(views["advantages"][index]) if of_rows else views["advantages"][part]
        prompt = int(views["prompts"][index])
        return TrainSequence(views["tokens"][part], views["mask"][part], advantages, prompt=prompt, **columns)

    def _check_counts(self) -> None:
        """Raise `TrainingError` unless the manifest's counts and the arrays' lengths agree."""
        manifest, lengths = self.manifest, self._views["lengths"]
        if int(lengths.sum()) != manifest.tokens or int(lengths.min()) < 1:
            raise TrainingError(f"{self.folder}: lengths add up to {lengths.sum()}, not to {manifest.tokens} tokens")
        for name, view in self._views.items():
            expected = {manifest.rows} if name in ("lengths", "prompts") else {manifest.tokens}
            if name == "advantages":
                expected.add(manifest.rows)
            if len(view) not in expected:
                raise TrainingError(f"{self.folder}: {name} has {len(view)} numbers for {manifest.rows} rows")


def _by_prompt(prompts: NDArray[np.int64]) -> list[list[int]]:
    """The rows of each prompt, prompts in the order in which they first appear."""
    by_prompt: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts.tolist()):
        by_prompt.setdefault(prompt, []).append(index)
    return list(by_prompt.values())


def _read_manifest(folder: Path) -> PackedManifest:
    path = folder / MANIFEST
    if not path.exists():
        raise TrainingError(f"{folder} holds no packed rows: there is no {MANIFEST}, which is written last")
    header = shared_files.read_document(path, dict[str, Any])
    if header is None:
        raise TrainingError(f"{path} is torn")
    if header.get("version") != PACKED_VERSION:
        raise TrainingError(f"{path} has version {header.get('version')}; this code reads version {PACKED_VERSION}")
    try:
        manifest = msgspec.convert(header, PackedManifest)
    except msgspec.ValidationError as error:
        raise TrainingError(f"{path} has an invalid format: {error}") from None
    types = {name: array.dtype for name, array in manifest.arrays.items()}
    if manifest.rows < 1 or not set(_ALWAYS) <= types.keys() or any(_TYPES.get(n) != t for n, t in types.items()):
        arrays = ", ".join(sorted(types))
        raise TrainingError(f"{path} has an invalid format: it lists {manifest.rows} rows with {arrays}")
    return manifest


def _map(path: Path, array: Array) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != array.size:
                raise TrainingError(f"{path} has {size} bytes, its manifest {array.size}: it is truncated or torn")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError) as error:
        raise TrainingError(f"{path} cannot be mapped: {error}") from None
    if hashlib.sha256(mapped).hexdigest() != array.sha256:
        mapped.close()
        raise TrainingError(f"{path} differs from the content in its manifest (SHA-256)")
    return mapped


def remove_packed(folder: Path) -> None:
    """Remove packed rows, the manifest first, and their folder unless it has other files.

    Missing files are no error, so a repeated call completes an interrupted removal.
    """
    for path in (folder / MANIFEST, *(folder / f"{name}.bin" for name in _TYPES)):
        path.unlink(missing_ok=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
