"""How two members of an nccl group meet and talk in the store, without nccl."""

import sys
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


def test_a_member_that_never_comes_is_given_up_at_the_deadline() -> None:
    inner = HashStore()
    inner.set_timeout(timedelta(seconds=1))
    with pytest.raises(WeightSyncError, match="the other member"):
        meet(a_store(inner), SERVER, seconds=0.05)
