"""The transport between CPUs: one buffer of bytes, in chunks, over a gloo group of two members.

Owns the layout of the buffer, the group, and the order of its messages; trainer and server both use this module, so
they cannot disagree. Each pair of a rank and a server's process has a separate group, so a late, lost or slow server
delays no other. Must not know vLLM, HTTP, or the meaning of the tensors.

A message is an int64[1] with the weight version, then the buffer in chunks of at most `CHUNK_BYTES`. The version
`ABANDONED` comes without a buffer: the sender does not have the version any more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from pipeline.errors import SignatureError, WeightSyncError
from pipeline.utils.listeners import listen_on_held
from pipeline.utils.signed_store import SignedStore
from pipeline.utils.waiting import Deadline

TRAINER, SERVER = 0, 1
ABANDONED = -1
SOURCE_LOST = "the server that forwards the weights does not have this version any more"
CHUNK_BYTES = 1 << 26
LEAVE_SECONDS = 3.0
"""How long a server waits for its trainer's signal before it ends its part of a group."""
ALIGNMENT = 64
_BACKLOG = 1024

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Parameter:
    """One tensor of the buffer: its name in a Hugging Face checkpoint, torch dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Parameter":
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return _dtype(self.dtype)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.width


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of the buffer, in order; each begins at a multiple of `ALIGNMENT` bytes."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def of(cls, tensors: NamedTensors) -> "WeightLayout":
        """The layout of these tensors in this order."""
        return cls(tuple(Parameter.of(name, tensor) for name, tensor in tensors))

    @classmethod
    def parse(cls, plain: Sequence[Sequence[Any]]) -> "WeightLayout":
        """Parse the value of `plain()`."""
        return cls(tuple(Parameter(name, dtype, tuple(shape)) for name, dtype, shape in plain))

    def plain(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The layout as values that JSON holds."""
        return [(p.name, p.dtype, p.shape) for p in self.parameters]

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        return self.offsets[-1]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins, and the end of the buffer."""
        return list(accumulate((-(-p.bytes // ALIGNMENT) * ALIGNMENT for p in self.parameters), initial=0))

    def pack(self, tensors: NamedTensors, buffer: Tensor | None = None) -> Tensor:
        """Copy the tensors into `buffer` or a new one, uint8[bytes]; `WeightSyncError` if their layout differs.

        Reads the tensors one by one, so a generator needs memory for one. Copies from a GPU (to its own memory or to
        pinned host memory) are asynchronous: they are done once the current stream has passed them.
        """
        if buffer is None:
            buffer = torch.empty(self.bytes, dtype=torch.uint8)
        asynchronous = buffer.is_cuda or buffer.is_pinned()
        expected = zip(self.parameters, self.views(buffer), strict=True)
        for name, tensor in tensors:
            parameter, (_, target) = next(expected, (None, ("", buffer)))
            if Parameter.of(name, tensor) != parameter:
                raise _layout_difference(f"{name!r} came", parameter)
            target.copy_(tensor.detach(), non_blocking=asynchronous and tensor.is_cuda)
        for parameter, _ in expected:
            raise _layout_difference("no more came", parameter)
        return buffer

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The named tensors in a buffer of this layout, without a copy."""
        return [(parameter.name, self.view(index, buffer)) for index, parameter in enumerate(self.parameters)]

    def view(self, index: int, buffer: Tensor) -> Tensor:
        """The tensor of this index in a buffer of this layout, without a copy."""
        start, parameter = self.offsets[index], self.parameters[index]
        return buffer[start : start + parameter.bytes].view(parameter.torch_dtype).view(parameter.shape)


def create_store(address: str, port: int, password: str, seconds: float) -> Store:
    """Create the trainer's store, where groups meet, on this address alone; waits in it end after `seconds`.

    Every process that reaches the address can read the store; only values signed with the password are accepted.
    """
    limit = timedelta(seconds=seconds)
    listening = listen_on_held(address, port, _BACKLOG).detach()  # TCPStore itself would listen on all interfaces
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening)
    return SignedStore(store, password)


def connect_store(address: str, port: int, password: str, seconds: float) -> Store:
    """A connection to the trainer's store; `WeightSyncError` when there is none within `seconds`."""
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise WeightSyncError(f"no trainer at {address}:{port}: {error}") from error
    return SignedStore(store, password)


def publish_key(store: Store, name: str, value: str = "") -> None:
    """Announce that a server's process is about to join group `name`; `value` describes the process to the trainer."""
    store.set(f"{name}/announced", value)


def wait_for_key(store: Store, name: str) -> str:
    """The value that the announced server stored; `WeightSyncError` when the store is lost."""
    try:
        return str(store.get(f"{name}/announced").decode())
    except (RuntimeError, SignatureError) as error:
        raise WeightSyncError(f"group {name}: the store is lost: {error}") from error


def is_published(store: Store, name: str) -> bool:
    """Whether the server announced itself; does not wait. `WeightSyncError` when the store is lost."""
    try:
        return bool(store.check([f"{name}/announced"]))
    except RuntimeError as error:
        raise WeightSyncError(f"group {name}: the store is lost: {error}") from error


class LeaveSignal:
    """The protocol by which two members leave their group: neither ends it while the other may still use it.

        the trainer asks the server to leave, and sets a key in the store: the trainer has no operation in flight
        the server reads the key, ends its part, and answers
        the trainer ends its part

    A server that does not see the key within `LEAVE_SECONDS`, since its trainer is gone, ends its part regardless.
    """

    _store: Store
    _name: str

    def announce_leaving(self) -> None:
        """Set the trainer's key; `WeightSyncError` when the store is lost."""
        try:
            self._store.set(f"{self._name}/leaves", "yes")
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def wait_for_leaving(self, seconds: float = LEAVE_SECONDS) -> bool:
        """Wait for the trainer's key; False after `seconds` without it."""
        try:
            self._store.wait([f"{self._name}/leaves"], timedelta(seconds=seconds))
        except (RuntimeError, SignatureError):
            return False
        return True


class PreparedSignal:
    """The signal by which a server's process reports that it has received and prepared an update.

    The trainer requests the update only after each process has: none installs a version that another lacks, and the
    engine does not wait for bytes between two steps.
    """

    _store: Store
    _name: str

    def report_prepared(self, version: int, failure: str = "") -> None:
        """Report the end of the preparation, with the reason of a failure; `WeightSyncError` when the store is lost."""
        try:
            self._store.set(f"{self._name}/prepared/{version}", failure)
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def report_lost(self, reason: str) -> None:
        """Report that no version arrives over this group any more; `WeightSyncError` when the store is lost."""
        try:
            self._store.set(f"{self._name}/lost", reason)
        except RuntimeError as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def find_loss(self) -> str:
        """The reported reason of a loss; empty without one. `WeightSyncError` when the store is lost."""
        return self._find("lost") or ""

    def is_reported(self, version: int) -> bool:
        """Whether the process has reported the end of a preparation; `WeightSyncError` when the store is lost."""
        return self._find(f"prepared/{version}") is not None

    def _find(self, key: str) -> str | None:
        try:
            is_set = self._store.check([f"{self._name}/{key}"])
            return self._store.get(f"{self._name}/{key}").decode() if is_set else None
        except (RuntimeError, SignatureError) as error:
            raise WeightSyncError(f"group {self._name}: the store is lost: {error}") from error

    def await_prepared(self, version: int, deadline: Deadline) -> None:
        """Wait for the report; `WeightSyncError` with the reason of a failure, or at the deadline."""
        key = f"{self._name}/prepared/{version}"
        try:
            self._store.wait([key], timedelta(seconds=max(deadline.left, 0.001)))
            failure = self._store.get(key).decode()
        except (RuntimeError, SignatureError) as error:
            raise WeightSyncError(f"{deadline.awaited}: a process did not report that it has them: {error}") from error
        if failure:
            raise WeightSyncError(failure)


class ProcessSignals(LeaveSignal, PreparedSignal):
    """The signals of a server's process whose group has another server as its other member."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name


class TransferGroup(LeaveSignal, PreparedSignal):
    """A gloo group of two members that exchange weights.

    Any error leaves the group unusable: drop it and meet again under another name. Dropping it closes its connections,
    so the peer's wait ends at once.
    """

    def __init__(self, store: Store, name: str, rank: int, address: str, seconds: float) -> None:
        """Meet the other member under `name`, which is used once; listens on `address` only."""
        gloo: Any = ProcessGroupGloo
        self._store, self._name = store, name  # torch's C++ holds no reference to the Python part of the store
        options = gloo._Options()
        options._timeout = timedelta(seconds=seconds)
        try:
            options._devices = [gloo.create_device(hostname=address)]
            self._gloo = gloo(PrefixStore(name, store), rank, 2, options)
        except (RuntimeError, SignatureError) as error:
            raise WeightSyncError(f"group {name}: the other member did not come: {error}") from error

    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        """Send a buffer; returns once gloo has taken it. `WeightSyncError` at the deadline or for a lost peer."""
        for part in self._parts(torch.tensor([version]), buffer):
            self._exchange(self._gloo.send, part, SERVER, deadline)

    def abandon(self, deadline: Deadline) -> None:
        """Send `ABANDONED` in place of the next buffer. Raises like `send`."""
        self._exchange(self._gloo.send, torch.tensor([ABANDONED]), SERVER, deadline)

    def receive(self, buffer: Tensor, deadline: Deadline) -> int:
        """Fill the buffer; returns its version. Raises like `send`, and for a version that the sender abandoned; the
        buffer's contents are then undefined."""
        version = torch.zeros(1, dtype=torch.int64)
        for part in self._parts(version, buffer):
            self._exchange(self._gloo.recv, part, TRAINER, deadline)
            if int(version.item()) == ABANDONED:
                raise WeightSyncError(SOURCE_LOST)
        return int(version.item())

    @staticmethod
    def _parts(version: Tensor, buffer: Tensor) -> list[Tensor]:
        cuts = [*range(0, len(buffer), CHUNK_BYTES), len(buffer)]
        return [version, *(buffer[start:end] for start, end in pairwise(cuts))]

    @staticmethod
    def _exchange(begin: Callable[..., Any], part: Tensor, peer: int, deadline: Deadline) -> None:
        """Begin an operation and wait for its end; both fail when the peer is lost."""
        try:
            begin([part], peer, 0).wait(timedelta(seconds=max(deadline.left, 0.001)))
        except RuntimeError as error:
            raise WeightSyncError(f"{deadline.awaited}: {error}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{name!r} is not a dtype of torch")
    return dtype


def _layout_difference(received: str, expected: Parameter | None) -> WeightSyncError:
    described = f"{expected.name!r} {expected.dtype}{list(expected.shape)}" if expected else "nothing more"
    return WeightSyncError(f"the parameters are not those that were announced: {received} in place of {described}")
