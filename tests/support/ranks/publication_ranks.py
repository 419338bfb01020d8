"""What each rank runs for `test_publication`: a model spread over ranks, published to servers without a model."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import InferenceConfig, LoraConfig, ModelConfig
from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.train.model import fsdp
from pipeline.train.model.checkpoint_layout import CheckpointLayout
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import wait_for
from tests.fakes.http_server import PASSWORD
from tests.fakes.weight_server import WeightServer
from tests.patience import WAIT_SECONDS
from tests.support.oracle.cases import model_config, policy_spec
from tests.support.ranks.dispatch_cases import BUDGET, parameters
from tests.support.ranks.mesh_ranks import PATIENCE

Changes = list[tuple[str, int | None]]


def change(worker: ModelWorker, step: int) -> None:
    """Other numbers in each parameter, as after a step."""
    with torch.no_grad():
        for parameter in worker.model.parameters():
            change_tensor(local(parameter), step)


def change_tensor(tensor: torch.Tensor, step: int) -> None:
    tensor.mul_(1 + 1 / (2 + step)).add_(0.01)


def set_unit(state: RankState, stacks: bool) -> None:
    """Have layers be spread by themselves; without `stacks`, experts are made whole before they are published."""
    fsdp.LAYER_UNIT = 1
    if not stacks:
        CheckpointLayout.stacks = property(lambda form: set())  # type: ignore[method-assign,assignment]


@contextmanager
def publishing(
    dispatch: RankGroup, servers: Sequence[WeightServer], told: Changes, **settings: Any
) -> Iterator[tuple[WeightSender, WeightPublisher]]:
    with hold_port() as holder:
        meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], PASSWORD)
        config = InferenceConfig.model_validate({"update_seconds": WAIT_SECONDS, **settings})
        endpoints = [server.endpoint for server in servers]
        with WeightSender(endpoints, meeting, config, WAIT_SECONDS, lambda *each: told.append(each)) as sender:
            yield sender, WeightPublisher(dispatch, sender, dispatch.keepalive)
            assert sender.close() == []


def assert_served(server: WeightServer, truth: dict[str, torch.Tensor], processes: int) -> None:
    """Every process of the server has its part of these, to the last bit."""
    for number in range(processes):
        for each, (name, view) in zip(server.shard_of(number).slices, server.parts[number], strict=True):
            assert torch.equal(view, each.of(truth[name].contiguous())), name


def publish_on_meshes(rank: int, model: Path, meshes: Sequence[dict[str, int]], stacks: bool, lora: int = 0) -> None:
    """With `lora`, of adapters of this rank that are merged into the weights."""
    merged = model_config(model).model_copy(update={"lora": LoraConfig(rank=lora, merge=lora > 0)})

    def lead(dispatch: RankGroup) -> None:
        dispatch.run_on_all_models(set_unit, stacks)
        for mesh in meshes:
            dispatch.init_model("policy", policy_spec(model, model=merged, **mesh))
            for processes in (1, 2):
                publish_twice(dispatch, processes)

    run_controller_or_worker(lead, BUDGET, patience=PATIENCE)


def publish_twice(dispatch: RankGroup, processes: int) -> None:
    with (
        WeightServer("127.0.0.5", processes) as server,
        publishing(dispatch, [server], []) as (_, publisher),
    ):
        for version in (1, 2):
            truth = parameters(dispatch)
            publisher.start(version)
            dispatch.run_on_ranks("policy", change, version)  # while the version is on its way
            publisher.wait_until_synced()
            assert server.version == version
            assert_served(server, truth, processes)


def publish_by_relays(rank: int, model: Path) -> None:
    """Three servers: the first gets the rows of all ranks, and forwards them to the others."""

    def lead(dispatch: RankGroup) -> None:
        dispatch.init_model("policy", policy_spec(model))
        with ExitStack() as stack:
            servers = [stack.enter_context(WeightServer("127.0.0.5")) for _ in range(3)]
            sender, publisher = stack.enter_context(publishing(dispatch, servers, [], relay_fanout=2))

            def everywhere(version: int) -> None:
                wait_for("all servers", lambda: set(sender.versions().values()) == {version}, WAIT_SECONDS)

            for version in (1, 2):
                truth = parameters(dispatch)
                publisher.start(version)
                dispatch.run_on_ranks("policy", change, version)
                everywhere(version)
                publisher.wait_until_synced()
                for server in servers:
                    assert_served(server, truth, 1)
            fed = [server for server in servers if sender._plan.source_of(server.endpoint) is not None]
            assert [server.calls.count("/init_weight_transfer_engine") for server in fed] == [1, 1]

    run_controller_or_worker(lead, BUDGET, patience=PATIENCE)


def lose_and_find_servers(rank: int, model: Path) -> None:
    run_controller_or_worker(lambda dispatch: bring_back(dispatch, model), BUDGET, patience=PATIENCE)


def bring_back(dispatch: RankGroup, model: Path) -> None:
    """A server that was restarted, and one that failed, get all ranks' rows again; a rank says why it cannot send."""
    dispatch.run_on_all_models(set_unit, True)
    dispatch.init_model("policy", policy_spec(model))
    told: Changes = []
    with (
        WeightServer("127.0.0.5") as steady,
        WeightServer("127.0.0.6", 2) as other,
        publishing(dispatch, [steady, other], told) as (sender, publisher),
    ):

        def everywhere(version: int) -> None:
            wait_for("both servers", lambda: set(sender.versions().values()) == {version}, WAIT_SECONDS)

        publisher.start(1)
        everywhere(1)
        truth = parameters(dispatch)
        other.restart()
        wait_for("the restart to be seen", lambda: (other.endpoint, None) in told, WAIT_SECONDS)
        everywhere(1)
        assert_served(other, truth, 2)

        other.failing.add("/update_weights")
        dispatch.run_on_ranks("policy", change, 1)
        publisher.start(2)
        assert publisher.wait_until_synced()["sync/servers"] == 1
        other.failing.clear()
        everywhere(2)
        assert_served(other, parameters(dispatch), 2)

        with other.held("begin_update") as asked:
            publisher.start(3)
            assert asked.wait(WAIT_SECONDS)
            wait_for("the other server", lambda: steady.version == 3, WAIT_SECONDS)
            dispatch.run_on_all_models(forget_versions)
        report = sender.wait_until_synced()
        failure = report.failures[other.endpoint]
        assert "rank 1 of the trainer: this rank does not hold version 3" in failure, failure
        publisher.start(4)
        everywhere(4)
    assert steady.loaded == [1, 2, 3, 4], "a server is not disturbed by another"


def forget_versions(state: RankState) -> None:
    if state.rank and state.snapshots:
        state.snapshots.close()


def pid(state: RankState) -> int:
    return os.getpid()


def lose_a_rank(rank: int, model: Path, out: Path) -> None:
    run_controller_or_worker(lambda dispatch: kill_a_rank(dispatch, model, out), BUDGET, patience=PATIENCE)


def kill_a_rank(dispatch: RankGroup, model: Path, out: Path) -> None:
    """Rank 1 is killed when the server has begun to receive a version."""
    dispatch.init_model("policy", policy_spec(model))
    told: Changes = []
    with hold_port() as holder, WeightServer("127.0.0.5") as server:
        meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], PASSWORD)
        config = InferenceConfig(update_seconds=5)
        with WeightSender([server.endpoint], meeting, config, 15, lambda *each: told.append(each)) as sender:
            publisher = WeightPublisher(dispatch, sender, lambda: None)
            publisher.start(1)
            publisher.wait_until_synced()
            victim = dispatch.run_on_all_models(pid)[1]
            with server.held("begin_update") as asked:
                publisher.start(2)
                assert asked.wait(WAIT_SECONDS)
                os.kill(victim, signal.SIGKILL)
            with pytest.raises(WeightSyncError, match=r"rank 1 of the trainer|Connection|init_weight_transfer"):
                publisher.wait_until_synced()
            assert told == [(server.endpoint, 1), (server.endpoint, None)], "evicted, and never current again"
            assert (server.loaded, server.version) == ([1], 1), "nothing of version 2 was served"
    out.write_text("done")


def publish_to(rank: int, model: Path, endpoints: Sequence[str], trainer: str, secret: str, folder: Path) -> None:
    """Publish a model in float32 to real servers, and it changed once more; after each version wait for a file."""

    def lead(dispatch: RankGroup) -> None:
        dispatch.run_on_all_models(set_unit, True)
        config = ModelConfig.model_validate({"path": str(model), "dtype": "float32"})
        dispatch.init_model("policy", ModelSpec("policy", config))
        with hold_port() as holder:
            meeting = MeetingPoint(trainer, holder.getsockname()[1], secret)
            updates = InferenceConfig(update_seconds=60)
            with WeightSender(endpoints, meeting, updates, 60, lambda server, version: None) as sender:
                publisher = WeightPublisher(dispatch, sender, dispatch.keepalive)
                for version in (1, 2):
                    publish_and_wait(publisher, sender, version, folder)
                    dispatch.run_on_ranks("policy", change, version)

    run_controller_or_worker(lead, BUDGET, patience=PATIENCE)


def publish_and_wait(publisher: WeightPublisher, sender: WeightSender, version: int, folder: Path) -> None:
    publisher.start(version)
    publisher.wait_until_synced()
    wait_for("all servers", lambda: set(sender.versions().values()) == {version}, WAIT_SECONDS)
    (folder / f"published {version}").touch()
    wait_for("the probe", lambda: (folder / f"probed {version}").exists(), WAIT_SECONDS)
