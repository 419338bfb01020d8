"""How two members of an nccl group meet and talk in the store, without nccl."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports import nccl
from pipeline.inference.weight_sync.transports.gloo import SERVER, TRAINER
from pipeline.inference.weight_sync.transports.nccl import NcclGroup
from pipeline.utils.signed_store import SignedStore
from pipeline.utils.waiting import Deadline

DEVICE = torch.device("cpu")


class Library:
    """nccl, as far as a meeting needs it; `aborted` has the communicators that were ended."""

    def __init__(self) -> None:
        self.aborted = []

    def ncclGetUniqueId(self) -> Any:
        return type("Identity", (), {"internal": b"7" * 128})()

    def unique_id_from_bytes(self, data: bytes) -> bytes:
        return data

    def ncclCommInitRank(self, count: int, unique: object, rank: int) -> str:
        return f"communicator of {rank}"

    def ncclSend(self) -> None: ...

    def ncclRecv(self) -> None: ...

    def ncclCommAbort(self, comm: str) -> None:
        self.aborted.append(comm)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> type[Library]:
    module = ModuleType("vllm.distributed.device_communicators.pynccl_wrapper")
    module.NCCLLibrary = Library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(nccl.torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(nccl.torch.cuda, "device", lambda device: nullcontext())
    return Library


def a_store(inner: HashStore, secret: str = "ours") -> SignedStore:
    return SignedStore(inner, secret)


def meet(store: SignedStore, rank: int, seconds: float = 5) -> NcclGroup:
    return NcclGroup(store, "g", rank, DEVICE, Deadline("the other member", seconds))


def test_the_server_joins_by_the_identity_that_the_trainer_tells() -> None:
    inner = HashStore()
    meet(a_store(inner), TRAINER)
    group = meet(a_store(inner), SERVER)
    group.leave()
    assert group._library.aborted == ["communicator of 1"]


def test_an_identity_that_a_stranger_wrote_ends_the_meeting_as_one_that_can_be_tried_again() -> None:
    inner = HashStore()
    meet(a_store(inner, "theirs"), TRAINER)
    with pytest.raises(WeightSyncError, match="carries no signature with this world's secret"):
        meet(a_store(inner), SERVER)


def test_a_version_that_a_stranger_told_ends_the_reception() -> None:
    inner = HashStore()
    meet(a_store(inner), TRAINER)
    group = meet(a_store(inner), SERVER)
    a_store(inner, "theirs").set("g/0", "7")
    with pytest.raises(WeightSyncError, match="carries no signature"):
        group.receive(torch.empty(1, dtype=torch.uint8), Deadline("weights", 5))


class Device:
    """The operations of both members on the device; each ends at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.posted: list[str] = []

        def exchange(group: NcclGroup, begin: Any, buffer: torch.Tensor, peer: int, deadline: Deadline) -> None:
            group._buffers += 1
            self.posted.append(begin.__name__)

        monkeypatch.setattr(NcclGroup, "_exchange", exchange)


@pytest.fixture
def members() -> tuple[NcclGroup, NcclGroup]:
    inner = HashStore()
    trainer = meet(a_store(inner), TRAINER)
    return trainer, meet(a_store(inner), SERVER)


def weights() -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8)


def test_a_send_is_posted_only_once_its_receiver_is_ready(
    members: tuple[NcclGroup, NcclGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    (trainer, server), device = members, Device(monkeypatch)
    with pytest.raises(WeightSyncError, match="weights"):
        trainer.send(7, weights(), Deadline("weights", 0.05))
    assert not device.posted
    with ThreadPoolExecutor(1) as pool:
        for version in (7, 8, 9):
            sending = pool.submit(trainer.send, version, weights(), Deadline("weights", 5))
            assert server.receive(weights(), Deadline("weights", 5)) == version
            sending.result(5)
    assert sorted(device.posted) == ["ncclRecv"] * 3 + ["ncclSend"] * 3


def test_a_transfer_leaves_the_keys_of_one_buffer(
    members: tuple[NcclGroup, NcclGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    (trainer, server), _ = members, Device(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        for version in range(5):
            sending = pool.submit(trainer.send, version, weights(), Deadline("weights", 5))
            server.receive(weights(), Deadline("weights", 5))
            sending.result(5)
    assert trainer._store.num_keys() == len(("g/id", "g/4", "g/4/answer"))


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_server_that_receives_no_more_ends_the_send_with_its_reason(
    members: tuple[NcclGroup, NcclGroup], is_waiting: bool
) -> None:
    trainer, server = members
    if is_waiting:
        with pytest.raises(WeightSyncError):
            server.receive(weights(), Deadline("weights", 0.05))
    else:
        server.refuse("rank 1 is gone")
    with pytest.raises(WeightSyncError, match="receives no more: " + ("weights" if is_waiting else "rank 1 is gone")):
        trainer.send(7, weights(), Deadline("the server", 5))


def test_a_member_that_never_comes_is_given_up_at_the_deadline() -> None:
    inner = HashStore()
    inner.set_timeout(timedelta(seconds=1))
    with pytest.raises(WeightSyncError, match="the other member"):
        meet(a_store(inner), SERVER, seconds=0.05)
