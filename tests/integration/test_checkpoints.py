"""`pipeline.checkpoints`: whole or not at all, with real ranks, on a disk and on an object store."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch

from pipeline.checkpoints import Alone, Checkpoint, Fence, TrainerState, blocks, newest_committed, prune, sharded
from pipeline.checkpoints.sharded import load, save
from pipeline.checkpoints.shards import RecordingWriter
from pipeline.checkpoints.state import decode_state, encode_state
from pipeline.checkpoints.storage import Storage
from pipeline.errors import CheckpointError, DamagedError, OvertakenError
from pipeline.system.waiting import wait_for
from tests.integration import checkpoint_processes as ranks
from tests.integration.forked_ranks import end_ranks, run_ranks, start_ranks
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration
Tree = dict[str, Any]


def tensors(value: float) -> Tree:
    return {"model": {"w": torch.full((4, 3), value), "b": torch.full((3,), -value)}, "taken": int(value)}


def commit(root: str, step: int, attempt: str = "1-0", job: Any = "rl") -> Checkpoint:
    return save(root, attempt, TrainerState(job=job, step=step, ledger=b"x" * step), tensors(float(step)))


def newest_step(root: str, **options: bool) -> int | None:
    found = newest_committed(root, **options)
    return found.manifest.step if found else None


def checkpoint_names(root: str) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir() if path.is_dir())


@pytest.fixture(params=["disk", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty place for checkpoints."""
    if request.param == "disk":
        yield str(tmp_path / "checkpoints")
        return
    memory = fsspec.filesystem("memory")
    yield "memory://bucket/checkpoints"
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(root: str) -> None:
    state = TrainerState(
        job="rl",
        step=50,
        ledger=b"\x00ledger",
        ledger_bytes=7,
        models=("policy",),
        covered=("1-0", "2-0"),
        alone=Alone(identity="job-1", before=7),
    )
    save(root, "1-0", state, tensors(3.0))
    found = newest_committed(root, hashes=True)
    assert found is not None
    into = tensors(0.0)
    assert load(found, into) == state
    assert torch.equal(into["model"]["w"], torch.full((4, 3), 3.0))
    assert torch.equal(into["model"]["b"], torch.full((3,), -3.0))
    assert into["taken"] == 3


def test_nothing_is_found_where_nothing_was_saved(root: str) -> None:
    assert newest_committed(root) is None


def test_the_newest_goes_by_step_and_rl_comes_after_the_warm_start(root: str) -> None:
    commit(root, 200, job="sft")
    assert newest_step(root) == 200
    for step in (9, 100, 25):
        commit(root, step)
    found = newest_committed(root)
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
    assert newest_committed(str(tmp_path / "checkpoints")) is None


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
        "checkpoint rl-50 is skipped: rl-50/2-0 has no COMMIT: its save did not end"
    ]
    newest = commit(root, 50, "3-0")
    assert newest_step(root, hashes=True) == 50
    assert prune(newest, keep=2) == ["rl-50/2-0"]


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def changed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, torn])
@pytest.mark.parametrize(
    "name", ["1-0/COMMIT", "1-0/manifest.json", "1-0/state.msgpack", "1-0/__0_0.distcp", "1-0/.metadata"]
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


@pytest.mark.parametrize("name", ["1-0/COMMIT", "1-0/manifest.json", "1-0/state.msgpack", "1-0/__0_0.distcp"])
def test_a_changed_bit_is_found_when_hashes_are_asked_for(disk: str, name: str) -> None:
    commit(disk, 25)
    commit(disk, 50)
    changed(Path(disk) / "rl-50" / name)
    assert newest_step(disk, hashes=True) == 25


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json"])
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
        newest_committed(disk)


def test_a_manifest_that_is_not_the_committed_one_is_torn(disk: str, caplog: pytest.LogCaptureFixture) -> None:
    commit(disk, 25)
    commit(disk, 50)
    manifest = Path(disk) / "rl-50/1-0/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"world_size":1', b'"world_size":2'))
    assert newest_step(disk) == 25
    assert "its hash is not the one in COMMIT" in caplog.text


def test_another_model_is_refused_and_the_difference_named(disk: str) -> None:
    found = commit(disk, 1)
    other: Tree = {"model": {"w": torch.zeros(4, 5), "head": torch.zeros(2)}, "taken": 0}
    with pytest.raises(CheckpointError) as caught:
        load(found, other)
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
        load(found, other)


def test_saving_a_step_again_keeps_what_is_committed(root: str) -> None:
    first = commit(root, 5)
    again = save(root, "1-0", TrainerState(job="rl", step=5), tensors(8.0))
    assert again == first
    into = tensors(0.0)
    load(again, into)
    assert into["taken"] == 5


def test_a_later_attempt_replaces_the_commit_of_an_earlier_one(root: str) -> None:
    commit(root, 50, "1-0")
    Fence(root, "2-0").claim()
    newest = save(root, "2-0", TrainerState(job="rl", step=50), tensors(8.0))
    found = newest_committed(root, hashes=True)
    assert found is not None
    assert found.manifest.attempt == "2-0"
    into = tensors(0.0)
    load(found, into)
    assert into["taken"] == 8
    assert prune(newest, keep=2) == ["rl-50/1-0"]


def test_an_attempt_that_was_taken_over_cannot_commit(root: str) -> None:
    Fence(root, "1-0").claim()
    commit(root, 25, "1-0")
    Fence(root, "2-0").claim()
    with pytest.raises(CheckpointError, match=r"attempt 2-0 has taken over .*; attempt 1-0 must write nothing more"):
        commit(root, 50, "1-0")
    assert newest_step(root) == 25


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
    (Path(disk) / "rl-20/1-0/COMMIT").unlink()
    assert prune(newest, keep=2) == ["rl-30/1-0", "rl-20/1-0"]
    assert checkpoint_names(disk) == ["rl-10", "rl-40"]


def test_pruning_leaves_alone_what_is_younger_than_the_one_that_was_committed(disk: str) -> None:
    newest = commit(disk, 10)
    commit(disk, 20)
    commit(disk, 30)
    (Path(disk) / "rl-20/1-0/COMMIT").unlink()
    assert prune(newest, keep=2) == []
    assert checkpoint_names(disk) == ["rl-10", "rl-20", "rl-30"]


@pytest.fixture
def resumed(disk: str) -> str:
    """Attempt 1-0 committed 100 and 150; 1-1 went on from 100, since 150 could not be loaded."""
    Fence(disk, "1-0").claim()
    for step in (100, 150):
        commit(disk, step)
    owner = Fence(disk, "1-1")
    owner.claim()
    changed(Path(disk) / "rl-150/1-0/__0_0.distcp")
    owner.keep(["rl-100/1-0"])
    return disk


def test_a_commit_that_was_refused_counts_for_nobody_from_then_on(
    resumed: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest_step(resumed) == 100
    assert "rl-150 is skipped: rl-150/1-0 was refused, or came after attempt 1-1 took over" in caplog.text
    for step, kept in ((110, [100, 110, 150]), (120, [110, 120, 150])):
        prune(commit(resumed, step, "1-1"), keep=2)
        assert checkpoint_names(resumed) == ["lines", *(f"rl-{each}" for each in kept)]
        assert newest_step(resumed, hashes=True) == step
    prune(commit(resumed, 160, "1-1"), keep=2)
    assert checkpoint_names(resumed) == ["lines", "rl-120", "rl-160"], "what was refused goes in its turn"


def test_a_later_attempt_knows_what_an_earlier_one_refused(resumed: str) -> None:
    commit(resumed, 110, "1-1")
    Fence(resumed, "1-2").claim()
    assert newest_step(resumed) == 110, "of the attempt before, all commits count until it has chosen"
    Fence(resumed, "1-2").keep(["rl-100/1-0"])
    assert newest_step(resumed) == 100


def test_what_was_just_committed_stays_whatever_else_claims_to_be_newer(disk: str) -> None:
    for step in (100, 150, 200):
        newest = commit(disk, step)
    own = save(disk, "1-1", TrainerState(job="rl", step=110), tensors(1.0))
    prune(own, keep=2)
    assert newest_step(disk) == newest.manifest.step
    assert checkpoint_names(disk) == ["rl-100", "rl-110", "rl-150", "rl-200"]


class Zombie:
    """Attempt 1-0, which hangs right before it writes COMMIT of step 150; `wake` lets that go through."""

    def __init__(self, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        Fence(root, "1-0").claim()
        commit(root, 100)
        held: list[Callable[[], None]] = []
        put = Storage.put

        def hold(storage: Storage, name: str, data: bytes) -> None:
            if name.endswith("COMMIT"):
                held.append(lambda: put(storage, name, data))
            else:
                put(storage, name, data)

        with monkeypatch.context() as patched:
            patched.setattr(Storage, "put", hold)
            self.checkpoint = commit(root, 150)
        self.wake = held[0]


@pytest.fixture
def zombie(root: str, monkeypatch: pytest.MonkeyPatch) -> Zombie:
    return Zombie(root, monkeypatch)


def taken_over(root: str) -> None:
    """Attempt 1-1 takes over from 1-0, and goes on from 100."""
    owner = Fence(root, "1-1")
    owner.claim()
    owner.keep(["rl-100/1-0"])


def test_a_commit_that_comes_late_does_not_count(root: str, zombie: Zombie) -> None:
    taken_over(root)
    zombie.wake()
    assert newest_step(root) == 100
    commit(root, 110, "1-1")
    assert newest_step(root) == 110


def test_a_late_commit_of_the_same_step_does_not_replace_the_owners(root: str, zombie: Zombie) -> None:
    taken_over(root)
    owned = save(root, "1-1", TrainerState(job="rl", step=150), tensors(151.0))
    zombie.wake()
    assert newest_committed(root, hashes=True) == owned


def test_an_attempt_that_was_taken_over_prunes_nothing(
    root: str, zombie: Zombie, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over(root)
    write = sharded._write_shards

    def wake(*arguments: Any) -> Any:
        written = write(*arguments)
        zombie.wake()
        with pytest.raises(OvertakenError):
            prune(zombie.checkpoint, keep=1)
        return written

    monkeypatch.setattr(sharded, "_write_shards", wake)
    owned = save(root, "1-1", TrainerState(job="rl", step=150), tensors(151.0))
    into = tensors(0.0)
    load(owned, into)
    assert into["taken"] == 151
    assert Storage(root).folders() == ["lines", "rl-100", "rl-150"]


def test_a_pruning_that_hangs_removes_nothing_of_the_next_owner(
    root: str, zombie: Zombie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listed, was asked whether it may, and hangs in its first removal."""
    for step in (40, 50):
        commit(root, step)
    zombie.wake()
    remove, hung = Storage.remove, list[str]()

    def hang(storage: Storage, name: str) -> None:
        if not hung:
            hung.append(name)
            taken_over(root)
            for step in (110, 150):
                commit(root, step, "1-1")
        remove(storage, name)

    monkeypatch.setattr(Storage, "remove", hang)
    with pytest.raises(OvertakenError):
        prune(zombie.checkpoint, keep=2)
    assert hung == ["rl-50/1-0/COMMIT"]
    assert newest_step(root, hashes=True) == 150


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_shard_that_is_gone_before_the_commit_fails_it(disk: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = sharded._write_shards

    def remove(*arguments: Any) -> Any:
        written = write(*arguments)
        (Path(disk) / "rl-50/1-0" / file).unlink()
        return written

    monkeypatch.setattr(sharded, "_write_shards", remove)
    with pytest.raises(CheckpointError, match=f"cannot commit rl-50: rl-50/1-0/{file} is missing"):
        commit(disk, 50)
    assert newest_step(disk) is None


def test_the_manifest_says_what_was_written_and_not_what_lies_there(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = sharded._write_shards

    def damage(*arguments: Any) -> Any:
        written = write(*arguments)
        changed(Path(disk) / "rl-50/1-0/__0_0.distcp")
        return written

    monkeypatch.setattr(sharded, "_write_shards", damage)
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
    monkeypatch.setattr(blocks, "BLOCK", 1024)
    trees = {name: {"w": torch.full((1000,), float(len(name)))} for name in ("critic", "policy")}
    found = save(disk, "1-0", TrainerState(job="rl", step=1), trees)
    shard = Path(disk) / "rl-1/1-0/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.rindex(trees["policy"]["w"].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    load(found, {"critic": {"w": torch.zeros(1000)}})
    with pytest.raises(
        DamagedError, match=r"rl-1/1-0/__0_0.distcp is not what was committed \(SHA-256 differs between"
    ):
        load(found, {"policy": {"w": torch.zeros(1000)}})


@pytest.mark.parametrize("name", ["state.msgpack", ".metadata"])
def test_a_damaged_small_file_is_found_before_anything_is_loaded(disk: str, name: str) -> None:
    found = commit(disk, 1)
    changed(Path(disk) / "rl-1/1-0" / name)
    into = tensors(0.0)
    with pytest.raises(DamagedError, match=rf"{name} is not what was committed"):
        load(found, into)
    assert not into["model"]["w"].any()


def test_every_rank_learns_that_one_of_them_read_something_else(saved_by_two: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_by_two, tmp_path / "copy")
    changed(tmp_path / "copy/checkpoints/rl-5/1-0/__1_0.distcp")
    run_ranks(2, ranks.load_damaged, str(tmp_path / "copy/checkpoints"), tmp_path)
    told = [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)]
    assert told[0] == told[1]
    assert "__1_0.distcp is not what was committed" in told[0]


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_committed(disk: str) -> None:
    commit(disk, 10)
    commit(disk, 20)
    (Path(disk) / "rl-20/1-0/COMMIT").unlink()
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
        newest_committed("nowhere://x")


def test_a_state_of_another_version_or_shape_is_refused() -> None:
    older = msgspec.msgpack.encode({"job": "rl", "step": 1, "acknowledge": {"job": ["x", "0"]}, "version": 1})
    for data, version in ((older, 1), (encode_state(TrainerState(job="rl", step=1, version=3)), 3)):
        with pytest.raises(CheckpointError, match=f"here has version {version}; this code reads version 2; go on with"):
            decode_state(data, "here")
    with pytest.raises(CheckpointError, match="here is no trainer state"):
        decode_state(b"\xc0", "here")


def test_a_checkpoint_says_where_it_is(disk: str) -> None:
    assert str(commit(disk, 7)) == f"{disk}/rl-7/1-0"


def test_a_commit_of_the_form_before_this_one_is_refused_and_not_skipped(disk: str) -> None:
    checkpoint = commit(disk, 50)
    folder = Path(checkpoint.location)
    (folder / "COMMIT").rename(folder.parent / "COMMIT")
    with pytest.raises(CheckpointError, match=r"rl-50 has version 1; this code reads version 2; go on with") as refused:
        newest_committed(disk)
    assert not isinstance(refused.value, DamagedError)
