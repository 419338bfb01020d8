"""Two members of a group on one GPU: who says what, and when; without a GPU, whose memory is ordinary memory here."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports import gpu_transport, ipc
from pipeline.inference.weight_sync.transports.gloo import SERVER, TRAINER, publish_key, wait_for_key
from pipeline.inference.weight_sync.transports.ipc import CudaIpcHandle, IpcGroup
from pipeline.inference.weight_sync.transports.nccl import NcclGroup
from pipeline.utils.signed_store import SignedStore
from pipeline.utils.waiting import Deadline
from tests.patience import WAIT_SECONDS

CPU = torch.device("cpu")
MAPPING = CudaIpcHandle(
    version=7, handle=b"h", size=8, offset=0, counter=b"c", slot=0, event=b"e", sync=True, start=2, length=4
)


class Event:
    """Passes when it is told to."""

    passed = True

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return self.passed


class Cuda:
    """What the group asks of CUDA; `memory` is what a mapping shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.collected = torch.arange(4, dtype=torch.uint8), 0
        self.waited = list[object]()
        monkeypatch.setattr(
            ipc, "_export_handle", lambda version, buffer: msgspec.structs.replace(MAPPING, version=version)
        )
        monkeypatch.setattr(ipc, "_open_handle", lambda mapping, device: self.memory)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_event=self.waited.append))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "ipc_collect", self._collect)

    def _collect(self) -> None:
        self.collected += 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def members() -> tuple[IpcGroup, IpcGroup]:
    inner = HashStore()
    inner.set_timeout(timedelta(seconds=WAIT_SECONDS))
    trainer, server = (IpcGroup(SignedStore(inner, "ours"), "g", CPU) for _ in range(2))
    return trainer, server


def soon(seconds: float = WAIT_SECONDS) -> Deadline:
    return Deadline("weights", seconds)


def buffer() -> Tensor:
    return torch.zeros(4, dtype=torch.uint8)


def test_the_bytes_come_out_of_the_senders_memory_and_it_waits_until_they_are_taken(
    members: tuple[IpcGroup, IpcGroup], cuda: Cuda
) -> None:
    trainer, server = members
    into = buffer()
    with ThreadPoolExecutor(1) as pool:
        for version in (7, 8):
            sending = pool.submit(trainer.send, version, buffer(), soon())
            assert server.receive(into, soon()) == version
            sending.result(WAIT_SECONDS)
    assert torch.equal(into, cuda.memory)
    assert cuda.collected == 2


def test_the_copy_waits_for_the_last_one_to_be_taken_into_the_model(
    members: tuple[IpcGroup, IpcGroup], cuda: Cuda
) -> None:
    trainer, server = members
    taken = torch.cuda.Event()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.send, 7, buffer(), soon())
        server.receive(buffer(), soon(), taken)
        sending.result(WAIT_SECONDS)
    assert cuda.waited == [taken]


def test_a_buffer_that_nobody_takes_is_given_up_at_the_deadline(members: tuple[IpcGroup, IpcGroup]) -> None:
    with pytest.raises(WeightSyncError, match="weights"):
        members[0].send(7, buffer(), soon(0.05))


def test_a_copy_that_does_not_end_is_given_up_and_the_sender_told_why(
    members: tuple[IpcGroup, IpcGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, server = members
    monkeypatch.setattr(Event, "passed", False)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.send, 7, buffer(), Deadline("the server's word", WAIT_SECONDS))
        trainer._store.wait(["g/0"], timedelta(seconds=WAIT_SECONDS))
        with pytest.raises(WeightSyncError, match="weights"):
            server.receive(buffer(), soon(0.1))
        with pytest.raises(WeightSyncError, match=r"receives no more: .*weights"):
            sending.result(WAIT_SECONDS)
    with pytest.raises(WeightSyncError, match="was left"):
        server.receive(buffer(), soon())


def test_memory_that_cannot_be_mapped_is_told_to_the_sender_at_once(
    members: tuple[IpcGroup, IpcGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mapping: CudaIpcHandle, device: torch.device) -> Tensor:
        raise RuntimeError("CUDA error: invalid resource handle\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(ipc, "_open_handle", refuse)
    trainer, server = members
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.send, 7, buffer(), Deadline("the server's word", WAIT_SECONDS))
        with pytest.raises(WeightSyncError, match="invalid resource handle"):
            server.receive(buffer(), soon())
        with pytest.raises(WeightSyncError, match=r"receives no more: .*invalid resource handle"):
            sending.result(WAIT_SECONDS)
    with pytest.raises(WeightSyncError, match="was left"):
        trainer.send(8, buffer(), soon())


def test_a_mapping_that_a_stranger_wrote_is_not_followed(members: tuple[IpcGroup, IpcGroup]) -> None:
    _, server = members
    stranger = SignedStore(server._store._inner, "theirs")
    stranger.set("g/0", msgspec.json.encode(MAPPING).decode())
    with pytest.raises(WeightSyncError, match="carries no signature"):
        server.receive(buffer(), soon())


def test_memory_that_cannot_be_shared_is_named_with_what_forbids_it(
    members: tuple[IpcGroup, IpcGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(version: int, buffer: Tensor) -> CudaIpcHandle:
        raise RuntimeError("does not support expandable segments")

    monkeypatch.setattr(ipc, "_export_handle", refuse)
    with pytest.raises(WeightSyncError, match="PYTORCH_CUDA_ALLOC_CONF"):
        members[0].send(7, buffer(), soon())


@pytest.mark.parametrize(("gpus", "kind"), [(("a", "a"), IpcGroup), (("a", "b"), NcclGroup)], ids=["one", "two"])
def test_members_on_one_gpu_share_its_memory_and_others_use_nccl(
    gpus: tuple[str, str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclGroup, "__init__", lambda self, *arguments: None)
    store = HashStore()
    publish_key(store, "g", gpus[1])
    monkeypatch.setattr(gpu_transport, "gpu_of", lambda device: gpus[0])
    trainer = gpu_transport.join_gpu_group(store, "g", TRAINER, CPU, wait_for_key(store, "g"), soon())
    monkeypatch.setattr(gpu_transport, "gpu_of", lambda device: gpus[1])
    server = gpu_transport.join_gpu_group(store, "g", SERVER, CPU, gpus[0], soon())
    assert type(trainer) is type(server) is kind
