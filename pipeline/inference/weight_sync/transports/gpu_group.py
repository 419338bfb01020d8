"""What two members on GPUs tell each other through the store, before and after bytes travel.

Owns the record of a receiving process (`Receiver`), the messages of a group (`GpuGroup`), and the identity of a GPU
(`gpu_of`). Promises that every wait has a deadline and that a malformed message raises `WeightSyncError`. Must not know
vLLM's engine, HTTP, what the tensors mean, or which transport a group uses (`gpu_transport` chooses it).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.errors import SignatureError, WeightSyncError
from pipeline.inference.weight_sync.server_shards import Slice
from pipeline.inference.weight_sync.transports.gloo import LeaveSignal, PreparedSignal
from pipeline.utils.waiting import Deadline

T = TypeVar("T")
_POLL_SECONDS = 0.0005


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a server, as it announces itself.

    Attributes:
        gpu: on which it is, as `gpu_of` says it.
        slices: its shard of the weights, as `Shard.plain` says it.
    """

    gpu: str
    slices: list[Slice]

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> "Receiver":
        """The receiver whose `text()` this is; `WeightSyncError` for anything else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise WeightSyncError(f"the server says of itself what cannot be read: {error}") from error


class GpuGroup(LeaveSignal, PreparedSignal, ABC):
    """Two members. Any error leaves it unusable: drop it and meet again under another name.

    The sender says under a key of its own for each buffer that the bytes are there; only then does the receiver begin.
    """

    def __init__(self, store: Store, name: str, device: torch.device) -> None:
        self._store, self._name, self._device = store, name, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = 0

    @abstractmethod
    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        """Send uint8[n], whose bytes are there; returns when all of it is handed over."""

    @abstractmethod
    def receive(self, buffer: Tensor, deadline: Deadline, after: torch.cuda.Event | None = None) -> int:
        """Fill uint8[n] once `after` has passed; the version of what is in it."""

    @abstractmethod
    def leave(self) -> None:
        """End the group, also with an operation under way."""

    def _key(self) -> str:
        """Of the buffer that is next."""
        return f"{self._name}/{self._buffers}"

    def _tell(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def _receive(self, key: str, read: Callable[[bytes], T], deadline: Deadline) -> T:
        """What the other member says under `key`, once it does."""
        try:
            self._store.wait([key], timedelta(seconds=max(deadline.left, 0.001)))
            return read(self._store.get(key))
        except (RuntimeError, ValueError, SignatureError) as error:
            raise WeightSyncError(f"{deadline.awaited}: {error}") from error


def await_event(event: torch.cuda.Event, deadline: Deadline) -> None:
    """Wait until the device has come to this event; `WeightSyncError` if it does not in time."""
    while not event.query():  # type: ignore[no-untyped-call]
        if deadline.passed:
            raise WeightSyncError(str(deadline.error()))
        time.sleep(_POLL_SECONDS)


class SideStream:
    """A stream of its own on a GPU, for copies that neither wait for what else runs there nor hold it up; nothing on a
    CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[Any]:
        """What is copied within is copied there, once `after` has passed."""
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def settle(self, deadline: Deadline) -> None:
        """Wait until all of it is copied; `WeightSyncError` if it is not in time."""
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            await_event(done, deadline)


def gpu_of(device: torch.device) -> str:
    """Which GPU of which machine this is, by the number that NVIDIA gave it; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
