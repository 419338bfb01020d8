"""Rows in a folder, mapped into memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import COLUMNS, TrainSequence
from pipeline.train.offline.packed_dataset import MANIFEST, PackedRows, remove_packed, write_packed
from pipeline.utils import shared_files

VOCABULARY = 17


def make_rows(of_tokens: bool = False, **changed: Any) -> list[TrainSequence]:
    """Five ragged rows of three prompts."""
    draw, rows = np.random.default_rng(3), []
    for length, prompt in ((3, 7), (5, 2), (2, 7), (6, 2), (4, 9)):
        numbers = draw.normal(size=(6, length)).astype(np.float32)
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        values = {
            "tokens": draw.integers(0, VOCABULARY, length).astype(np.int32),
            "mask": mask,
            "advantages": numbers[0] if of_tokens else float(numbers[0, 0]),
            "sampler_logprobs": numbers[1],
            "prompt": prompt,
        }
        rows.append(TrainSequence(**(values | changed)))
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_packed(tmp_path / "data", make_rows(), VOCABULARY)
    return tmp_path / "data"


def damage(folder: Path, file: str, position: int, data: bytes) -> None:
    with (folder / file).open("r+b") as opened:
        opened.seek(position)
        opened.write(data)


def forge(folder: Path, **changes: Any) -> None:
    """A manifest that says something else, and is whole."""
    manifest = shared_files.read_document(folder / MANIFEST, dict[str, Any])
    assert manifest is not None
    shared_files.write_document(folder / MANIFEST, manifest | changes)


@pytest.mark.parametrize("of_tokens", [False, True])
def test_rows_come_back_as_they_were_written(of_tokens: bool, tmp_path: Path) -> None:
    rows = make_rows(of_tokens)
    write_packed(tmp_path / "data", rows, VOCABULARY)
    with PackedRows(tmp_path / "data") as packed:
        packed.check(VOCABULARY, longest=6)
        for written, read in zip(rows, packed.rows(range(len(packed))), strict=True):
            np.testing.assert_array_equal(read.tokens, written.tokens)
            np.testing.assert_array_equal(read.mask, written.mask)
            np.testing.assert_array_equal(read.advantages, np.float32(written.advantages))
            assert isinstance(read.advantages, float) != of_tokens
            np.testing.assert_array_equal(read.sampler_logprobs, written.sampler_logprobs)
            assert (read.prompt, read.reference, read.values) == (written.prompt, None, None)
        del read


def test_every_column_is_kept(tmp_path: Path) -> None:
    row = make_rows()[0]
    numbers = {column: np.full(3, place, np.float32) for place, column in enumerate(COLUMNS)}
    write_packed(tmp_path / "data", [TrainSequence(row.tokens, row.mask, **numbers)], VOCABULARY)
    with PackedRows(tmp_path / "data") as packed:
        (read,) = packed.rows([0])
        for column, expected in numbers.items():
            np.testing.assert_array_equal(getattr(read, column), expected)
        del read


def test_steps_go_through_the_folder_again_and_again(folder: Path) -> None:
    with PackedRows(folder) as packed:
        assert [packed.cycle(step, 2) for step in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
        assert packed.prompts == 3
        assert [packed.of_prompts(step, 2) for step in range(3)] == [[0, 2, 1, 3], [4, 0, 2], [1, 3, 4]]
        with pytest.raises(TrainingError, match="a step of 4 prompts is more than the 3"):
            packed.of_prompts(0, 4)


def test_rows_are_views_of_the_files_and_cannot_be_written(folder: Path) -> None:
    with PackedRows(folder) as packed:
        (row,) = packed.rows([1])
        assert not row.tokens.flags.owndata
        assert not row.tokens.flags.writeable
        del row


def test_a_row_that_is_still_in_use_is_an_error_and_not_a_crash(folder: Path) -> None:
    packed = PackedRows(folder)
    (row,) = packed.rows([0])
    with pytest.raises(TrainingError, match=r"rows of .* are still in use"):
        packed.close()
    assert int(row.tokens.sum()) >= 0
    del row
    packed.close()


def test_rows_in_a_reference_cycle_are_collected_before_closing(folder: Path) -> None:
    packed = PackedRows(folder)
    cycle: list[Any] = packed.rows([0])
    cycle.append(cycle)
    del cycle
    packed.close()
    assert not mapped(folder)


def test_after_closing_nothing_maps_the_folder(folder: Path) -> None:
    packed = PackedRows(folder)
    assert mapped(folder)
    packed.close()
    assert not mapped(folder)


def mapped(folder: Path) -> bool:
    """Whether this process maps a file of the folder."""
    return str(folder) in Path("/proc/self/maps").read_text()


def test_an_error_in_the_block_is_the_one_that_is_raised(folder: Path) -> None:
    def fail(rows: list[TrainSequence]) -> None:
        raise ValueError(f"mine, with {len(rows)} rows in use")

    with pytest.raises(ValueError, match="mine, with 1 rows in use"), PackedRows(folder) as packed:
        fail(packed.rows([0]))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("advantages", float("nan"), "row 0: advantages holds a value that is not finite"),
        ("sampler_logprobs", np.full(2, np.nan, np.float32), "row 0: sampler_logprobs has shape"),
        ("mask", np.ones(3, np.uint8), "row 0: the mask needs 3 entries, the first of them 0"),
    ],
)
def test_rows_that_cannot_be_trained_are_not_written(column: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=said):
        write_packed(tmp_path / "data", make_rows(**{column: value}), VOCABULARY)
    assert not (tmp_path / "data").exists()


def test_a_column_of_some_rows_only_is_not_written(tmp_path: Path) -> None:
    rows = make_rows()
    rows[3] = TrainSequence(rows[3].tokens, rows[3].mask)
    with pytest.raises(TrainingError, match="row 3 has no sampler_logprobs, others do"):
        write_packed(tmp_path / "data", rows, VOCABULARY)


def test_packed_rows_are_not_written_over(folder: Path) -> None:
    with pytest.raises(TrainingError, match="holds packed rows already"):
        write_packed(folder, make_rows(), VOCABULARY)


def test_a_folder_whose_writer_did_not_end_is_none(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(TrainingError, match=r"holds no packed rows: there is no manifest\.json"):
        PackedRows(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(70)
    with pytest.raises(TrainingError, match=r"tokens\.bin has 70 bytes, its manifest 80: it is truncated or torn"):
        PackedRows(folder)
    assert (folder / MANIFEST).exists()


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    (folder / "mask.bin").unlink()
    with pytest.raises(TrainingError, match=r"mask\.bin cannot be mapped"):
        PackedRows(folder)


def test_a_changed_byte_is_noticed(folder: Path) -> None:
    damage(folder, "sampler_logprobs.bin", 5, b"\x55")
    with pytest.raises(TrainingError, match=r"sampler_logprobs\.bin differs from the content in its manifest"):
        PackedRows(folder)


def test_a_torn_manifest_is_named(folder: Path) -> None:
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(40)
    with pytest.raises(TrainingError, match=r"manifest\.json is torn"):
        PackedRows(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 9}, "has version 9; this code reads version 1"),
        ({"rows": "many"}, "has an invalid format"),
        ({"rows": 0}, "has an invalid format: it lists 0 rows"),
        ({"arrays": {}}, "has an invalid format"),
        ({"tokens": 21}, "lengths add up to 20, not to 21 tokens"),
        ({"rows": 6}, "has 5 numbers for 6 rows"),
    ],
)
def test_a_manifest_of_another_form_is_named(changes: dict[str, Any], said: str, folder: Path) -> None:
    forge(folder, **changes)
    with pytest.raises(TrainingError, match=said):
        PackedRows(folder)


def test_what_the_model_cannot_train_is_named_with_its_row(folder: Path) -> None:
    with PackedRows(folder) as packed:
        with pytest.raises(TrainingError, match="was packed for a vocabulary of 17; the model has 32"):
            packed.check(32, longest=6)
        with pytest.raises(TrainingError, match="row 3 has 6 tokens; the longest that can be trained has 5"):
            packed.check(VOCABULARY, longest=5)


def replace_numbers(folder: Path, name: str, numbers: np.ndarray[Any, Any]) -> None:
    """As another program would write them: with the right hash."""
    import hashlib

    (folder / f"{name}.bin").write_bytes(numbers.tobytes())
    arrays = json.loads(json.dumps(shared_files.read_document(folder / MANIFEST, dict[str, Any])))["arrays"]
    arrays[name]["sha256"] = hashlib.sha256(numbers.tobytes()).hexdigest()
    forge(folder, arrays=arrays)


def test_numbers_that_are_not_finite_are_found_whoever_wrote_them(folder: Path) -> None:
    replace_numbers(folder, "advantages", np.array([0, 0, np.nan, 0, 0], "<f4"))
    with PackedRows(folder) as packed, pytest.raises(TrainingError, match="row 2: advantages holds a value"):
        packed.check(VOCABULARY, longest=6)


def test_a_token_that_the_model_does_not_know_is_found(folder: Path) -> None:
    tokens = np.zeros(20, "<i4")
    tokens[9] = VOCABULARY
    replace_numbers(folder, "tokens", tokens)
    with PackedRows(folder) as packed, pytest.raises(TrainingError, match="row 2 has a token outside"):
        packed.check(VOCABULARY, longest=6)


def test_removing_leaves_what_is_not_packed(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    remove_packed(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_removal_that_was_cut_short_is_ended_by_the_next(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / "mask.bin").unlink()
    remove_packed(folder)
    assert not folder.exists()
    remove_packed(folder)
