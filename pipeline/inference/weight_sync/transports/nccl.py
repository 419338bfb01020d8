"""The transport between GPUs: one buffer over an nccl communicator of two members.

Owns the communicator and its handshake. nccl has no deadlines, and an operation that waits on the device for the other
member can block all other kernels of that device. So the members meet in the store before each buffer:

    receiver   answers that it will receive this buffer from this sender
    sender     announces the send, after the answer, and posts it
    receiver   posts the receive, after the announcement

The announcement comes first, since the first operation of two members connects them, for which each waits on the host.
Both are ready then, so an operation that takes longer than its bytes explain is stuck, and is aborted long before the
deadline of the update. Dropping the group leaves it.

Must not know vLLM's engine, HTTP, or the meaning of the tensors.
"""

from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports.gloo import SERVER, TRAINER
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, await_event
from pipeline.utils.waiting import Deadline

STUCK_SECONDS, SLOWEST_BYTES_PER_SECOND = 10.0, 5e7
"""The limit of an operation that both members have posted: these seconds, and its bytes at this rate."""


class NcclGroup(GpuGroup):
    """A group of two members on two GPUs."""

    _comm: Any = None

    def __init__(self, store: Store, name: str, rank: int, device: torch.device, deadline: Deadline) -> None:
        """Meet the other member under `name`, which is used once; `WeightSyncError` at the deadline."""
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        super().__init__(store, name, device)
        self._rank, self._library = rank, NCCLLibrary()
        self._join(deadline)

    _rank: int
    _library: Any

    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        self._await_answer(deadline)
        if self._buffers:
            self._forget(self._buffers - 1)
        self._publish(self._key(), str(version))
        self._exchange(self._library.ncclSend, buffer, SERVER, deadline)

    def receive(self, buffer: Tensor, deadline: Deadline, after: torch.cuda.Event | None = None) -> int:
        self._publish(f"{self._key()}/answer", "")
        with self._refusal_on_failure():
            version = self._receive(self._key(), int, deadline)
            if after is not None:
                self._stream.wait_event(after)
            self._exchange(self._library.ncclRecv, buffer, TRAINER, deadline)
        return version

    def leave(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._library.ncclCommAbort(comm)

    def __del__(self) -> None:
        self.leave()

    def _join(self, deadline: Deadline) -> None:
        """Create the communicator, in a thread, since nccl waits for the other member without a timeout."""
        if self._rank == TRAINER:
            unique = self._library.ncclGetUniqueId()
            self._publish(f"{self._name}/id", bytes(unique.internal).hex())
        else:
            unique_id = self._receive(f"{self._name}/id", lambda data: bytes.fromhex(data.decode()), deadline)
            unique = self._library.unique_id_from_bytes(unique_id)
        made: Future[Any] = Future()
        Thread(target=self._make, args=(unique, made), name="nccl", daemon=True).start()
        try:
            self._comm = made.result(deadline.left)
        except TimeoutError:
            made.add_done_callback(self._abort_late)
            raise WeightSyncError(str(deadline.error())) from None
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the other member did not come: {error}") from error

    def _make(self, unique: Any, made: "Future[Any]") -> None:
        try:
            with torch.cuda.device(self._device):
                made.set_result(self._library.ncclCommInitRank(2, unique, self._rank))
        except RuntimeError as error:
            made.set_exception(error)

    def _abort_late(self, made: "Future[Any]") -> None:
        """Abort a communicator that was created after its deadline."""
        if made.exception() is None:
            self._library.ncclCommAbort(made.result())

    def _exchange(self, begin: Any, buffer: Tensor, peer: int, deadline: Deadline) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import buffer_type, cudaStream_t, ncclDataTypeEnum

        if self._comm is None:
            raise WeightSyncError(f"group {self._name} was left")
        seconds = STUCK_SECONDS + buffer.numel() / SLOWEST_BYTES_PER_SECOND
        stuck = Deadline(f"{buffer.numel()} bytes over nccl ({deadline.awaited})", min(seconds, deadline.left))
        buffer.record_stream(self._stream)  # torch must not reuse the memory before this stream is done with it
        self._buffers += 1
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.device(self._device):
                pointer, stream = buffer_type(buffer.data_ptr()), cudaStream_t(self._stream.cuda_stream)
                kind = ncclDataTypeEnum.from_torch(torch.uint8)
                begin(pointer, buffer.numel(), kind, peer, self._comm, stream)
                done.record(self._stream)
        except RuntimeError as error:
            self.leave()
            raise WeightSyncError(f"{stuck.awaited}: {error}") from error
        try:
            await_event(done, stuck)
        except WeightSyncError:
            self.leave()
            raise
