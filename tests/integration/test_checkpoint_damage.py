"""Checkpoints whose files are missing, torn, changed or unreadable: who finds it, and what is gone back to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints import TrainerState, block_hashes, newest_checkpoint, sharded_state
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.shard_io import RecordingWriter
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.errors import CheckpointError, DamagedCheckpointError
from tests.support.runs.checkpoint_cases import changed, commit, newest_step, tensors, torn

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("damage", [Path.unlink, torn])
@pytest.mark.parametrize(
    "name", ["1-0/COMPLETE", "1-0/manifest.json", "1-0/state.msgpack", "1-0/__0_0.distcp", "1-0/.metadata"]
)
def test_a_missing_or_truncated_file_makes_it_fall_back_and_say_why(
    disk: str, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    commit(disk, 25)
    commit(disk, 50)
    damage(Path(disk) / "rl-50" / name)
    assert newest_step(disk) == 25
    assert "rl-50 is skipped" in caplog.text
    assert name.rpartition("/")[2] in caplog.text


@pytest.mark.parametrize("name", ["1-0/COMPLETE", "1-0/manifest.json", "1-0/state.msgpack", "1-0/__0_0.distcp"])
def test_a_changed_bit_is_found_when_hashes_are_asked_for(disk: str, name: str) -> None:
    commit(disk, 25)
    commit(disk, 50)
    changed(Path(disk) / "rl-50" / name)
    assert newest_step(disk, hashes=True) == 25


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json"])
def test_a_file_that_cannot_be_read_is_no_damage_and_nobody_goes_past_it(
    disk: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(disk, 25)
    commit(disk, 50)
    get = Storage.get

    def fail(storage: Storage, asked: str) -> bytes | None:
        if asked == f"rl-50/1-0/{name}":
            raise CheckpointError(f"cannot read {asked}: Input/output error")
        return get(storage, asked)

    monkeypatch.setattr(Storage, "get", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        newest_checkpoint(disk)


def test_a_manifest_that_is_not_the_committed_one_is_torn(disk: str, caplog: pytest.LogCaptureFixture) -> None:
    commit(disk, 25)
    commit(disk, 50)
    manifest = Path(disk) / "rl-50/1-0/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"world_size":1', b'"world_size":2'))
    assert newest_step(disk) == 25
    assert "its hash is not the one in COMPLETE" in caplog.text


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_shard_that_is_gone_before_the_commit_fails_it(disk: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = sharded_state._write_shards

    def remove(*arguments: Any) -> Any:
        written = write(*arguments)
        (Path(disk) / "rl-50/1-0" / file).unlink()
        return written

    monkeypatch.setattr(sharded_state, "_write_shards", remove)
    with pytest.raises(CheckpointError, match=f"cannot complete rl-50: rl-50/1-0/{file} is missing"):
        commit(disk, 50)
    assert newest_step(disk) is None


def test_the_manifest_says_what_was_written_and_not_what_lies_there(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = sharded_state._write_shards

    def damage(*arguments: Any) -> Any:
        written = write(*arguments)
        changed(Path(disk) / "rl-50/1-0/__0_0.distcp")
        return written

    monkeypatch.setattr(sharded_state, "_write_shards", damage)
    commit(disk, 50)
    assert newest_step(disk) == 50
    assert newest_step(disk, hashes=True) is None


def test_a_shard_that_nobody_wrote_fails_the_save(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = RecordingWriter.finish

    def name_one_more(writer: RecordingWriter, **arguments: Any) -> None:
        finish(writer, **arguments)
        writer.named.add("__1_0.distcp")

    monkeypatch.setattr(RecordingWriter, "finish", name_one_more)
    with pytest.raises(CheckpointError, match=r"cannot save .*rl-50/1-0: nobody wrote __1_0.distcp"):
        commit(disk, 50)


def test_a_damaged_block_is_found_by_whoever_loads_it_and_by_nobody_else(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_hashes, "BLOCK", 1024)
    trees = {name: {"w": torch.full((1000,), float(len(name)))} for name in ("critic", "policy")}
    found = save(disk, "1-0", TrainerState(job="rl", step=1), trees)
    shard = Path(disk) / "rl-1/1-0/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.rindex(trees["policy"]["w"].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    load_shards(found, {"critic": {"w": torch.zeros(1000)}})
    with pytest.raises(
        DamagedCheckpointError, match=r"rl-1/1-0/__0_0.distcp is not what was saved \(SHA-256 differs between"
    ):
        load_shards(found, {"policy": {"w": torch.zeros(1000)}})


@pytest.mark.parametrize("name", ["state.msgpack", ".metadata"])
def test_a_damaged_small_file_is_found_before_anything_is_loaded(disk: str, name: str) -> None:
    found = commit(disk, 1)
    changed(Path(disk) / "rl-1/1-0" / name)
    into = tensors(0.0)
    with pytest.raises(DamagedCheckpointError, match=rf"{name} is not what was saved"):
        load_shards(found, into)
    assert not into["model"]["w"].any()
