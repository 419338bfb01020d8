"""`pipeline.checkpoints`: whole or not at all, with real ranks, on a disk and on an object store."""

import logging
import shutil
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from pipeline.checkpoints import Fence, OfflineProgress, TrainerState, newest_checkpoint, prune, remove_unfinished
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.sharded_state import Ranks, load_shards, save
from pipeline.checkpoints.trainer_state import decode_state, encode_state
from pipeline.errors import CheckpointError, DamagedCheckpointError, SupersededError
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.ranks import checkpoint_processes as ranks
from tests.support.ranks.forked_ranks import end_ranks, run_ranks, start_ranks
from tests.support.runs.checkpoint_cases import Tree, changed, checkpoint_names, commit, newest_step, tensors, torn

pytestmark = pytest.mark.integration


def test_what_was_saved_is_loaded(root: str) -> None:
    state = TrainerState(
        job="rl",
        step=50,
        ledger=b"\x00ledger",
        ledger_bytes=7,
        models=("policy",),
        covered=("1-0", "2-0"),
        alone=OfflineProgress(identity="job-1", before=7),
    )
    save(root, "1-0", state, tensors(3.0))
    found = newest_checkpoint(root, hashes=True)
    assert found is not None
    into = tensors(0.0)
    assert load_shards(found, into) == state
    assert torch.equal(into["model"]["w"], torch.full((4, 3), 3.0))
    assert torch.equal(into["model"]["b"], torch.full((3,), -3.0))
    assert into["taken"] == 3


def test_nothing_is_found_where_nothing_was_saved(root: str) -> None:
    assert newest_checkpoint(root) is None


def test_the_newest_goes_by_step_and_rl_comes_after_sft(root: str) -> None:
    commit(root, 200, job="sft")
    assert newest_step(root) == 200
    for step in (9, 100, 25):
        commit(root, step)
    found = newest_checkpoint(root)
    assert found is not None
    assert found.name == "rl-100"


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, ranks.save_model, str(folder / "checkpoints"), folder, 5)
    return folder


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_saved_by_two_ranks_is_loaded_bit_for_bit_by_one_or_two(count: int, saved_by_two: Path) -> None:
    run_ranks(count, ranks.load_model, str(saved_by_two / "checkpoints"), saved_by_two)


def test_every_rank_learns_that_a_save_failed(tmp_path: Path) -> None:
    run_ranks(2, ranks.fail_together, str(tmp_path / "checkpoints"), tmp_path)
    told = [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)]
    assert told[0] == told[1]
    assert "rank 1: OSError" in told[0]
    assert newest_checkpoint(str(tmp_path / "checkpoints")) is None


def test_every_rank_learns_of_an_error_on_rank_0_alone_that_is_no_filesystems(tmp_path: Path) -> None:
    run_ranks(2, ranks.fail_on_rank_0, str(tmp_path / "checkpoints"), tmp_path)
    told = [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)]
    assert told == ["TypeError: Encoding objects of type object is unsupported"] * 2
    assert newest_step(str(tmp_path / "checkpoints")) == 2


def test_an_unexpected_error_has_its_traceback_in_the_log_and_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = TrainerState(job="rl", step=1, ledger=cast(bytes, object()))
    with pytest.raises(CheckpointError, match="TypeError: Encoding objects") as raised:
        save(str(tmp_path), "1-0", state, {"w": torch.ones(3)})
    assert isinstance(raised.value.__cause__, TypeError)
    assert "in encode_state" in caplog.text
    caplog.clear()
    with pytest.raises(CheckpointError, match="ZeroDivisionError") as raised:
        Ranks(None).gathered(lambda: {"w": 1 // 0})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "Traceback" in caplog.text


def test_a_save_killed_in_the_middle_leaves_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = str(tmp_path / "checkpoints")
    commit(root, 25)
    processes = start_ranks(2, ranks.save_and_stop, root, tmp_path, 50)
    wait_for("rank 0 to be in the middle of its shards", (tmp_path / "reached").exists, WAIT_SECONDS)
    end_ranks(processes)
    assert (tmp_path / "checkpoints/rl-50/2-0").is_dir()
    with caplog.at_level(logging.WARNING):
        assert newest_step(root, hashes=True) == 25
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "checkpoint rl-50 is skipped: rl-50/2-0 has no COMPLETE: its save did not end"
    ]
    newest = commit(root, 50, "3-0")
    assert newest_step(root, hashes=True) == 50
    assert prune(newest, keep=2) == ["rl-50/2-0"]


def test_what_saves_of_other_attempts_left_unfinished_is_removed_and_all_else_stays(
    disk: str,
) -> None:
    """Also a younger one, which no later commit would prune before it is younger still."""
    for step, attempt in ((10, "1-0"), (20, "1-0"), (30, "1-1")):
        commit(disk, step, attempt)
    for place in ("rl-40/1-0", "rl-20/0-0", "rl-40/1-1"):
        (Path(disk) / place).mkdir(parents=True, exist_ok=True)
        (Path(disk) / place / "__0_0.distcp").write_bytes(b"half a shard")
    Fence(disk, "1-1").claim()
    assert remove_unfinished(disk, "1-1") == ["rl-40/1-0", "rl-20/0-0"]
    assert {place.parent.name for place in Path(disk).glob("rl-*/*/COMPLETE")} == {"1-0", "1-1"}
    assert (Path(disk) / "rl-40/1-1").is_dir(), "of the attempt that runs"
    with pytest.raises(SupersededError):
        remove_unfinished(disk, "1-0", over=True)
    assert remove_unfinished(disk, "1-1", over=True) == ["rl-40/1-1"], "once that one is over too"
    assert newest_step(disk, hashes=True) == 30


def test_another_model_is_refused_and_the_difference_named(disk: str) -> None:
    found = commit(disk, 1)
    other: Tree = {"model": {"w": torch.zeros(4, 5), "head": torch.zeros(2)}, "taken": 0}
    with pytest.raises(CheckpointError) as caught:
        load_shards(found, other)
    told = str(caught.value)
    assert "model.head is not in it" in told
    assert "model.b is only in it" in told
    assert "model.w is float32 (4, 5) here and float32 (4, 3) there" in told
    assert not other["model"]["w"].any(), "nothing was loaded"


def test_another_type_of_numbers_is_another_model(disk: str) -> None:
    found = commit(disk, 1)
    other = tensors(0.0)
    other["model"]["w"] = other["model"]["w"].to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model\.w is bfloat16 \(4, 3\) here and float32 \(4, 3\) there"):
        load_shards(found, other)


def test_saving_a_step_again_keeps_what_is_committed(root: str) -> None:
    first = commit(root, 5)
    again = save(root, "1-0", TrainerState(job="rl", step=5), tensors(8.0))
    assert again == first
    into = tensors(0.0)
    load_shards(again, into)
    assert into["taken"] == 5


def test_pruning_keeps_the_newest_committed_ones(root: str) -> None:
    commit(root, 200, job="sft")
    newest = [commit(root, step) for step in (25, 50, 75)][-1]
    assert prune(newest, keep=2) == ["rl-25/1-0", "sft-200/1-0"]
    assert newest_step(root, hashes=True) == 75
    assert prune(newest, keep=0) == ["rl-50/1-0"], "the newest stays, whatever is asked"
    assert newest_step(root, hashes=True) == 75
    assert not any(Storage(root).folders(name) for name in ("rl-25", "rl-50", "sft-200"))


def test_pruning_counts_only_whole_checkpoints_and_removes_older_remains(disk: str) -> None:
    newest = [commit(disk, step) for step in (10, 20, 30, 40)][-1]
    torn(Path(disk) / "rl-30/1-0/__0_0.distcp")
    (Path(disk) / "rl-20/1-0/COMPLETE").unlink()
    assert prune(newest, keep=2) == ["rl-30/1-0", "rl-20/1-0"]
    assert checkpoint_names(disk) == ["rl-10", "rl-40"]


def test_pruning_leaves_alone_what_is_younger_than_the_one_that_was_committed(disk: str) -> None:
    newest = commit(disk, 10)
    commit(disk, 20)
    commit(disk, 30)
    (Path(disk) / "rl-20/1-0/COMPLETE").unlink()
    assert prune(newest, keep=2) == []
    assert checkpoint_names(disk) == ["rl-10", "rl-20", "rl-30"]


def test_pruning_tolerates_a_store_that_lists_its_newest_folder_late(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = [commit(root, step) for step in (25, 50, 75, 100)][-2]
    folders = Storage.folders

    def listed_late(storage: Storage, name: str = "") -> list[str]:
        return [folder for folder in folders(storage, name) if folder != "rl-75"]

    monkeypatch.setattr(Storage, "folders", listed_late)
    assert prune(newest, keep=2) == ["rl-25/1-0"]
    monkeypatch.undo()
    assert [Storage(root).folders(f"rl-{step}") for step in (25, 50, 75, 100)] == [[], ["1-0"], ["1-0"], ["1-0"]]


def test_every_rank_learns_that_one_of_them_read_something_else(saved_by_two: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_by_two, tmp_path / "copy")
    changed(tmp_path / "copy/checkpoints/rl-5/1-0/__1_0.distcp")
    run_ranks(2, ranks.load_damaged, str(tmp_path / "copy/checkpoints"), tmp_path)
    told = [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)]
    assert told[0] == told[1]
    assert "__1_0.distcp is not what was saved" in told[0]


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_committed(disk: str) -> None:
    commit(disk, 10)
    commit(disk, 20)
    (Path(disk) / "rl-20/1-0/COMPLETE").unlink()
    shutil.rmtree(Path(disk) / "rl-20/1-0/")
    assert newest_step(disk) == 10


def test_folders_with_other_names_are_left_alone(disk: str) -> None:
    for name in ("rl-10.bak", "notes", "rl-x"):
        (Path(disk) / name).mkdir(parents=True)
    newest = commit(disk, 20)
    assert newest_step(disk) == 20
    prune(newest, keep=1)
    assert checkpoint_names(disk) == ["notes", "rl-10.bak", "rl-20", "rl-x"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file"):
        commit(str(tmp_path / "file"), 1)


def test_an_address_of_an_unknown_kind_is_refused_with_its_name() -> None:
    with pytest.raises(CheckpointError, match="nowhere://x"):
        newest_checkpoint("nowhere://x")


def test_a_state_of_another_version_or_shape_is_refused() -> None:
    older = msgspec.msgpack.encode({"job": "rl", "step": 1, "acknowledge": {"job": ["x", "0"]}, "version": 1})
    for data, version in ((older, 1), (encode_state(TrainerState(job="rl", step=1, version=3)), 3)):
        with pytest.raises(CheckpointError, match=f"here has version {version}; this code reads version 2; use the"):
            decode_state(data, "here")
    with pytest.raises(CheckpointError, match="here is no trainer state"):
        decode_state(b"\xc0", "here")


def test_a_checkpoint_says_where_it_is(disk: str) -> None:
    assert str(commit(disk, 7)) == f"{disk}/rl-7/1-0"


@pytest.mark.parametrize(("marker", "version"), [("..", 1), (".", 2)])
def test_a_checkpoint_of_an_earlier_version_is_refused_and_not_skipped(disk: str, marker: str, version: int) -> None:
    checkpoint = commit(disk, 50)
    folder = Path(checkpoint.location)
    (folder / "COMPLETE").rename(folder / marker / "COMMIT")
    with pytest.raises(CheckpointError, match=rf"has version {version}; this code reads version 3; use the") as refused:
        newest_checkpoint(disk)
    assert not isinstance(refused.value, DamagedCheckpointError)
