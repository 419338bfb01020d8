"""Groups of two members on GPUs, and the messages that they exchange through the store.

Owns the record of a receiving process (`Receiver`), the messages of a group (`GpuGroup`), and the identity of a GPU
(`gpu_of`). Promises that every wait has a deadline and that a malformed message raises `WeightSyncError`. Must not know
vLLM's engine, HTTP, the meaning of the tensors, or which transport a group uses (`gpu_transport` chooses it).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.errors import SignatureError, WeightSyncError, reason_of
from pipeline.inference.weight_sync.server_shards import Slice
from pipeline.inference.weight_sync.transports.gloo import LeaveSignal, PreparedSignal
from pipeline.utils.waiting import Deadline

T = TypeVar("T")
_POLL_SECONDS = 0.0005


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of a server's process.

    Attributes:
        gpu: the UUID of its GPU (`gpu_of`); "" for a CPU.
        slices: its shard of the weights (`Shard.plain`).
        on_host: whether it stages the weights of its GPU in host memory, and so gets them in chunks.
        relays: whether it forwards the weights to other servers as they arrive, and so gets them in chunks.
    """

    gpu: str
    slices: list[Slice]
    on_host: bool = False
    relays: bool = False

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> "Receiver":
        """Parse the value of `text()`; `WeightSyncError` if it is malformed."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise WeightSyncError(f"the server described its process by a malformed value: {error}") from error


class GpuGroup(LeaveSignal, PreparedSignal, ABC):
    """A group of two members. Any error leaves it unusable: drop it and meet again under another name.

    For each buffer the sender sets a key in the store once the bytes are ready, and the receiver sets an answer: empty,
    or the reason why it receives no more. Which of the two comes first is the transport's.
    """

    def __init__(self, store: Store, name: str, device: torch.device) -> None:
        self._store, self._name, self._device = store, name, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = 0

    @abstractmethod
    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        """Send a filled buffer, uint8[n]; returns when all of it has been sent."""

    @abstractmethod
    def receive(self, buffer: Tensor, deadline: Deadline, after: torch.cuda.Event | None = None) -> int:
        """Fill uint8[n] once `after` has passed; returns the version of its bytes."""

    @abstractmethod
    def leave(self) -> None:
        """End the group, also with an operation in flight."""

    def refuse(self, reason: str) -> None:
        """Answer the sender of the next buffer with the reason why this member receives no more.

        Called in the thread that receives: a wait of another thread would block the store's connection.
        """
        with suppress(WeightSyncError):  # without a store the sender knows already
            self._publish(f"{self._key()}/answer", reason)

    @contextmanager
    def _refusal_on_failure(self) -> Iterator[None]:
        """Leave the group and answer the sender on any error in the block."""
        try:
            yield
        except Exception as error:
            self.leave()
            self.refuse(reason_of(error))
            raise

    def _key(self) -> str:
        """The store's key for the next buffer."""
        return f"{self._name}/{self._buffers}"

    def _await_answer(self, deadline: Deadline) -> None:
        """Wait for the receiver's answer for the next buffer; `WeightSyncError` with the reason of a refusal."""
        if refusal := self._receive(f"{self._key()}/answer", bytes.decode, deadline):
            self.leave()
            raise WeightSyncError(f"the server's process receives no more: {refusal}")

    def _forget(self, buffer: int) -> None:
        """Delete the keys of a buffer, which both members have read."""
        key = f"{self._name}/{buffer}"
        try:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/answer")
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def _publish(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def _receive(self, key: str, read: Callable[[bytes], T], deadline: Deadline) -> T:
        """Wait until the other member has set `key`; returns the parsed value."""
        try:
            self._store.wait([key], timedelta(seconds=max(deadline.left, 0.001)))
            return read(self._store.get(key))
        except (RuntimeError, ValueError, SignatureError) as error:
            raise WeightSyncError(f"{deadline.awaited}: {error}") from error


def await_event(event: torch.cuda.Event, deadline: Deadline) -> None:
    """Wait until the device has passed this event; `WeightSyncError` at the deadline.

    Polls, since `event.synchronize` has no timeout.
    """
    while not event.query():  # type: ignore[no-untyped-call]
        if deadline.passed:
            raise WeightSyncError(str(deadline.error()))
        time.sleep(_POLL_SECONDS)


class SideStream:
    """A separate stream on a GPU, so that copies neither wait for other kernels nor delay them; no effect on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[Any]:
        """A context whose copies run on this stream, once `after` has passed."""
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def wait(self, deadline: Deadline) -> None:
        """Wait until all copies are done; `WeightSyncError` at the deadline."""
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            await_event(done, deadline)


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU, which is unique over all machines; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
