"""Saves in the background, in one process: the copies, the order, the errors."""

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeline.checkpoints import TrainerState, async_save, newest_checkpoint, sharded_state
from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.errors import CheckpointError
from pipeline.utils import pinned_memory
from pipeline.utils.waiting import wait_for
from tests.fakes.cuda_runtime import CudaRuntime
from tests.patience import WAIT_SECONDS
from tests.support.ranks.checkpoint_processes import Unsaveable

pytestmark = pytest.mark.integration
Tree = dict[str, Any]


class Held:
    """Saves wait before their commit until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go, commit = threading.Event(), sharded_state.complete_checkpoint

        def held(*arguments: Any) -> Any:
            assert self._go.wait(30)
            return commit(*arguments)

        monkeypatch.setattr(sharded_state, "complete_checkpoint", held)
        self.release = self._go.set


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    holding = Held(monkeypatch)
    yield holding
    holding.release()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def model(value: float) -> Tree:
    return {"w": torch.full((4, 3), value), "groups": [{"lr": value, "betas": (0.9, 0.95)}]}


def save(saver: AsyncSaver, root: str, step: int, keep: int = 2, **models: Tree) -> None:
    for name, tensors in models.items():
        saver.stage(name, tensors)
    saver.start(root, "1-0", TrainerState(job="rl", step=step), list(models), keep)


def await_idle(saver: AsyncSaver) -> None:
    wait_for("the save to end", lambda: saver.idle, WAIT_SECONDS)


def loaded(root: str, **models: Tree) -> Tree:
    found = newest_checkpoint(root, hashes=True)
    assert found is not None
    sharded_state.load_shards(found, models)
    return models


def test_what_changes_after_it_was_staged_is_saved_as_it_was(root: str, held: Held) -> None:
    saver, live = AsyncSaver(), model(1.0)
    save(saver, root, 1, policy=live)
    assert not saver.idle
    live["w"].fill_(9.0)
    live["groups"][0]["lr"] = 9.0
    held.release()
    await_idle(saver)
    assert saver.result().name == "rl-1"
    into = loaded(root, policy=model(0.0))["policy"]
    assert into["w"].eq(1.0).all()
    assert into["groups"] == [{"lr": 1.0, "betas": (0.9, 0.95)}]


def test_all_models_are_in_one_commit_and_can_be_loaded_one_by_one(root: str) -> None:
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0), critic=model(2.0))
    await_idle(saver)
    assert loaded(root, critic=model(0.0))["critic"]["w"].eq(2.0).all()
    assert loaded(root, policy=model(0.0))["policy"]["w"].eq(1.0).all()
    with pytest.raises(CheckpointError, match=r"polic\.w is not in it"):
        loaded(root, polic=model(0.0))


def test_the_buffers_of_the_last_time_are_used_again_as_long_as_they_fit(root: str) -> None:
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0))
    await_idle(saver)
    before = saver._staged["policy"]["w"].data_ptr()
    save(saver, root, 2, policy=model(2.0))
    await_idle(saver)
    assert saver._staged["policy"]["w"].data_ptr() == before
    assert loaded(root, policy=model(0.0))["policy"]["w"].eq(2.0).all()
    save(saver, root, 3, policy=model(3.0) | {"w": torch.full((5, 3), 3.0)})
    await_idle(saver)
    assert saver._staged["policy"]["w"].shape == (5, 3)


def test_memory_that_was_made_early_is_what_the_copies_lie_in(
    root: str, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, live = CudaRuntime(), {"w": torch.full((4, 3), 1.0), "more": [{"v": torch.ones(2)}, torch.empty(0)]}
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    saver = AsyncSaver()
    saver.expect("policy", live)
    saver._wait_until_idle()
    assert sorted(runtime.pinned.values()) == [8, 48]
    early = {*runtime.pinned}
    save(saver, root, 1, policy=live)
    assert saver._staged["policy"]["w"].data_ptr() in early
    assert {*runtime.pinned} == early
    live["w"].fill_(9.0)
    held.release()
    await_idle(saver)
    monkeypatch.undo()
    into = {"w": torch.zeros(4, 3), "more": [{"v": torch.zeros(2)}, torch.empty(0)]}
    assert loaded(root, policy=into)["policy"]["w"].eq(1.0).all()


def test_of_a_distributed_tensor_memory_for_the_shard_is_made(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: runtime)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        live = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
        saver = AsyncSaver()
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "is_cuda", True, raising=False)
            saver.expect("policy", {"w": live})
            saver._wait_until_idle()
        assert [*runtime.pinned.values()] == [48]
        save(saver, root, 1, policy={"w": live})
        await_idle(saver)
        copied = saver._staged["policy"]["w"]
        assert isinstance(copied, DTensor)
        assert (copied.placements, copied.shape) == (live.placements, live.shape)
        assert {copied.to_local().data_ptr()} == {*runtime.pinned}
        into = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        assert loaded(root, policy={"w": into})["policy"]["w"].full_tensor().equal(torch.arange(12.0).view(4, 3))
    finally:
        dist.destroy_process_group()


def test_memory_that_cannot_be_made_early_is_told_and_made_when_it_is_needed(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = async_save.pinned_like

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    runtime = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(async_save, "pinned_like", full)
    saver = AsyncSaver()
    saver.expect("policy", model(1.0))
    saver._wait_until_idle()
    assert "memory for the copies of policy could not be made in time: " in caplog.text
    with pytest.raises(OSError, match="Cannot allocate memory"):
        saver.stage("policy", model(1.0))
    monkeypatch.setattr(async_save, "pinned_like", made)
    save(saver, root, 1, policy=model(1.0))
    await_idle(saver)
    assert saver.result().name == "rl-1"


def test_memory_that_is_made_for_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def slowly(tensor: torch.Tensor) -> torch.Tensor:
        assert done.wait(30)
        return torch.empty(tensor.shape)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(async_save, "pinned_like", slowly)
    monkeypatch.setattr(async_save, "BUFFER_SECONDS", 0.1)
    saver = AsyncSaver()
    saver.expect("policy", model(1.0))
    with pytest.raises(CheckpointError, match=r"memory for a checkpoint is still being allocated after 0\.1 s"):
        saver.stage("policy", model(1.0))
    done.set()
    saver._allocations[0].join(WAIT_SECONDS)


def test_what_is_expected_twice_is_made_once_and_what_changed_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    saver = AsyncSaver()
    for shape in [(4, 3), (4, 3), (2, 2)]:
        saver.expect("policy", {"w": torch.ones(shape), "v": torch.ones(5)})
    saver._wait_until_idle()
    assert sorted(runtime.pinned.values()) == [16, 20]


def test_what_was_copied_is_forgotten_once_the_save_ended(root: str) -> None:
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0))
    saver.forget()
    assert saver.idle
    assert not saver._buffers
    assert not saver._staged
    assert saver.result().name == "rl-1"


def test_a_model_that_is_no_longer_committed_is_left_out_and_its_copies_are_given_back(root: str) -> None:
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0), critic=model(2.0))
    await_idle(saver)
    copied = weakref.ref(saver._staged["critic"]["w"])
    save(saver, root, 2, policy=model(1.0))
    await_idle(saver)
    assert copied() is None
    with pytest.raises(CheckpointError, match=r"critic\.w is not in it"):
        loaded(root, critic=model(0.0))


def test_the_next_save_waits_for_the_one_before(root: str, held: Held) -> None:
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0))
    threading.Timer(0.2, held.release).start()
    save(saver, root, 2, policy=model(2.0))
    await_idle(saver)
    steps = [path.name for path in Path(root).iterdir()]
    assert sorted(steps) == ["rl-1", "rl-2"]
    assert loaded(root, policy=model(0.0))["policy"]["w"].eq(2.0).all()


def test_a_save_that_does_not_end_is_waited_for_only_so_long(
    root: str, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.checkpoints.async_save.COMPLETION_SECONDS", 0.1)
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0))
    with pytest.raises(CheckpointError, match="the previous save is still running"):
        saver.stage("policy", model(2.0))


def test_old_checkpoints_go_with_the_save(root: str) -> None:
    saver = AsyncSaver()
    for step in (1, 2, 3):
        save(saver, root, step, policy=model(float(step)))
    await_idle(saver)
    assert sorted(path.name for path in Path(root).iterdir()) == ["rl-2", "rl-3"]


def failing_with(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [CheckpointError("disk gone"), RuntimeError("disk gone"), MemoryError("disk gone")])
def test_whatever_ends_a_save_is_a_checkpoint_error_and_the_next_one_can_be_made(
    root: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncSaver()
    with monkeypatch.context() as patched:
        patched.setattr(sharded_state, "complete_checkpoint", failing_with(error))
        save(saver, root, 1, policy=model(1.0))
        await_idle(saver)
    with pytest.raises(CheckpointError, match="disk gone"):
        saver.result()
    assert newest_checkpoint(root) is None
    save(saver, root, 1, policy=model(1.0))
    await_idle(saver)
    assert saver.result().name == "rl-1"


def test_a_pruning_that_fails_leaves_the_commit(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.checkpoints.async_save.prune", failing_with(CheckpointError("not allowed")))
    saver = AsyncSaver()
    save(saver, root, 1, policy=model(1.0))
    await_idle(saver)
    assert saver.result().name == "rl-1"


def test_a_value_that_cannot_be_written_fails_the_save(root: str) -> None:
    saver = AsyncSaver()
    saver.stage("policy", model(1.0))
    saver._staged["policy"]["own"] = Unsaveable()
    saver.start(root, "1-0", TrainerState(job="rl", step=1), ["policy"], 2)
    await_idle(saver)
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.result()
