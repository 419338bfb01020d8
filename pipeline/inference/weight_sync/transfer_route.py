"""The exchange between one rank of the trainer and one process of a server: how they meet, and how a version travels.

Owns the two ends of an exchange: `TransferRoute` sends the rank's rows, `RowReceiver` receives those of every rank.
Promises that both cut them into the same chunks, and that the staging buffer holds one version or raises
`WeightSyncError`. Must not know vLLM or HTTP.

    server                                                     trainer, on every rank that sends
    publish_key(store, name, Receiver(...).text())
    groups = [join(store, group_name(name, number), …)         route = TransferRoute.meet(store, name, number, …)
              for number, source in enumerate(sources)]
    receiver.receive(groups, …)                                route.send(snapshot, gatherer, deadline)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.rank_rows import RowParts, RowSource, sending_order
from pipeline.inference.weight_sync.server_shards import Chunk, Shard
from pipeline.inference.weight_sync.transports.gloo import ALIGNMENT, TRAINER, TransferGroup, wait_for_key
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, Receiver, SideStream
from pipeline.inference.weight_sync.transports.gpu_transport import join_gpu_group
from pipeline.inference.weight_sync.weight_snapshot import ShardGatherer, WeightSnapshot
from pipeline.utils.waiting import Deadline

G = TypeVar("G", TransferGroup, GpuGroup)
SEAL_BYTES = 8


def process_name(group: str, process: int) -> str:
    """The key under which a server's process announces itself; `group` belongs to one meeting of the server."""
    return f"{group}/{process}"


def group_name(process: str, source: int) -> str:
    """The group of a server's process with the trainer's rank number `source`."""
    return f"{process}/{source}"


@contextmanager
def _chunk_named(chunk: str) -> Iterator[None]:
    """Name the chunk in a `WeightSyncError` of the block."""
    try:
        yield
    except WeightSyncError as error:
        raise WeightSyncError(f"{chunk}: {error}") from error


@dataclass(frozen=True, eq=False)
class TransferRoute:
    """The route from one rank of the trainer to one process of a server.

    Attributes:
        chunked: whether the process gets even a whole version in chunks, since it stages in host memory or forwards
            them.
    """

    group: TransferGroup | GpuGroup
    parts: RowParts
    chunked: bool = False

    def send(self, snapshot: WeightSnapshot, gatherer: ShardGatherer, deadline: Deadline) -> None:
        """Send the rank's rows; returns once the transport has taken all of them."""
        for number, chunk in enumerate(self.parts.chunks(snapshot.at_once and not self.chunked)):
            with _chunk_named(f"chunk {number} to the server"):
                gathered = gatherer.gather(snapshot, self.parts.shard, chunk, deadline)
                self.group.send(snapshot.version, gathered, deadline)


@dataclass(frozen=True, eq=False)
class SendingRank:
    """A sending rank of the trainer.

    Attributes:
        number: index among the `ranks` sending ranks.
        device: the sending device.
        address: this rank's address, on which groups over TCP listen.
    """

    number: int
    ranks: int
    source: RowSource
    device: torch.device
    address: str

    def meet(self, store: Store, group: str, processes: int, deadline: Deadline) -> list[TransferRoute]:
        """Join a group with every process of a server; the routes in the order in which to send.

        Every process must have announced itself.
        """
        met = [self.meet_process(store, process_name(group, process), deadline) for process in range(processes)]
        return [met[process] for process in sending_order(group, self.number, self.ranks, processes)]

    def meet_process(self, store: Store, process: str, deadline: Deadline) -> TransferRoute:
        """Join a group with one process of a server, once it has announced itself."""
        receiver, name = Receiver.parse(wait_for_key(store, process)), group_name(process, self.number)
        parts = self.source.parts(Shard.parse(self.source.layout, receiver.slices))
        if self.device.type == "cuda":
            group = join_gpu_group(store, name, TRAINER, self.device, receiver.gpu, deadline)
            return TransferRoute(group, parts, receiver.on_host)
        return TransferRoute(TransferGroup(store, name, TRAINER, self.address, deadline.left), parts, receiver.relays)


class RowReceiver:
    """Receives the rows of every rank into the staging buffer of one process of a server."""

    def __init__(
        self,
        shard: Shard,
        sources: Sequence[RowSource],
        buffer: Tensor,
        at_once: bool,
        order: Sequence[int],
        device: torch.device,
        on_host: bool = False,
        arrived: Callable[[int, int, bool], None] = lambda version, end, accepted: None,
        sealed: bool = False,
    ) -> None:
        """Prepare to receive from these sources.

        Args:
            shard: the slices that this process needs.
            sources: the sending ranks.
            buffer: uint8[shard.staged.bytes].
            at_once: the trainer's `WeightSnapshot.at_once`.
            order: the indices of the sources, as `receiving_order` gives them.
            device: the device on which bytes arrive.
            on_host: whether the buffer is in memory of the device's host, so that all rows come in chunks.
            arrived: called with the version, the end of the bytes that the buffer has from its beginning, and whether
                the version is accepted: all bytes have come, and the seal.
            sealed: whether the source is another server, which sends `SEAL_BYTES` after the last chunk
                (`weight_relay`).
        """
        self._shard, self._buffer, self._order = shard, buffer, order
        self._at_once = at_once and not on_host
        self._parts = [source.parts(shard) for source in sources]
        # One rank with all rows sends the staging buffer's own bytes. A part of the rows is strided there, so it is
        # received into a bucket of the size of the largest chunk and copied from it, as is all that a host stages.
        self._direct = not on_host and len(sources) == 1 and sources[0].rows is None
        received = () if self._direct else self._parts
        chunks = [(parts, chunk) for parts in received for chunk in parts.chunks(self._at_once)]
        self._copies = {(parts, chunk.start): parts.scattering(chunk, shard.staged) for parts, chunk in chunks}
        size = max((chunk.end - chunk.start + ALIGNMENT for _, chunk in chunks), default=0)
        self._bucket = torch.empty(size, dtype=torch.uint8, device=device)
        self._arrived, self._seal = arrived, torch.empty(SEAL_BYTES if sealed else 0, dtype=torch.uint8)
        self._stream = SideStream(device)

    def receive(
        self,
        groups: Sequence[G],
        receive: Callable[[G, Tensor], int],
        deadline: Deadline,
        after: torch.cuda.Event | None = None,
    ) -> int:
        """Fill the buffer from one group per source; returns the version.

        `receive` fills a tensor from a group and returns the version of its bytes. Copies from the bucket into the
        buffer wait for the event `after`.
        """
        versions = set()
        for source in self._order:
            parts = self._parts[source]
            for number, chunk in enumerate(parts.chunks(self._at_once)):
                with _chunk_named(f"chunk {number} from rank {source} of the trainer"):
                    here = self._target(chunk)
                    versions.add(receive(groups[source], here))
                    if self._direct:
                        self._arrived(max(versions), chunk.end, False)
                    else:
                        self._copy_to_staging(parts, chunk, here, deadline, after)
        if len(self._seal):
            versions.add(receive(groups[0], self._seal))
        if len(versions) != 1:
            raise WeightSyncError(f"received parts of versions {sorted(versions)}")
        version = versions.pop()
        self._arrived(version, len(self._buffer), True)
        return version

    def _target(self, chunk: Chunk) -> Tensor:
        if self._direct:
            return self._buffer[chunk.start : chunk.end]
        lead = chunk.start % ALIGNMENT  # so that every type is aligned
        return self._bucket[lead : lead + chunk.end - chunk.start]

    def _copy_to_staging(
        self, parts: RowParts, chunk: Chunk, here: Tensor, deadline: Deadline, after: torch.cuda.Event | None
    ) -> None:
        """Copy a received chunk from the bucket to its destinations in the staging buffer."""
        copies = self._copies[parts, chunk.start]
        with self._stream.begin(after):
            for run in copies.runs:
                source = here[run.source : run.source + run.size]
                self._buffer[run.target : run.target + run.size].copy_(source, non_blocking=True)
            for at, target in copies.strided:
                there = target.of(self._shard.staged.view(target.tensor, self._buffer))
                there.copy_(here[at : at + there.nbytes].view(there.dtype).view(there.shape), non_blocking=True)
        self._stream.wait(deadline)  # the bucket receives the next chunk now
