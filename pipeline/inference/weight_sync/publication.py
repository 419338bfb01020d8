"""What takes versions of the weights for the servers, on one rank or on several.

Owns the contract between the owner of the weights and the sender of versions. Must not know servers, nor when a version
is taken.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.inference.weight_sync.rank_rows import Rows, RowSource
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.transports.gloo import NamedTensors, WeightLayout
from pipeline.inference.weight_sync.transports.gpu_group import gpu_of
from pipeline.inference.weight_sync.weight_snapshot import RankSnapshots, WeightSnapshot

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SenderSettings:
    """What every rank of the trainer that sends needs to know.

    Attributes:
        meeting: rank 0's store.
        adapter: see `WeightSnapshot`.
        device: type of the device that sends.
        on_host: whether versions wait in memory of the host, where a GPU sends them.
    """

    meeting: MeetingPoint
    adapter: Mapping[str, Any]
    device: str
    on_host: bool

    @property
    def device_here(self) -> torch.device:
        """The device of this process that sends."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else CPU

    def snapshots(self, layout: WeightLayout, rows: tuple[Rows, ...] | None = None) -> RankSnapshots:
        """The versions that this process will send: those rows of each tensor, or (None) all."""
        source = RowSource(layout, rows, gpu_of(self.device_here))
        return RankSnapshots(source, self.adapter, self.device_here, self.on_host)


class Publication(Protocol):
    """What takes versions of the weights on every rank that sends.

    Attributes:
        sources: these ranks, this one first.
    """

    sources: Sequence[RowSource]

    def take(self, version: int, in_use: Collection[int]) -> WeightSnapshot:
        """Hold the weights as they are now on every rank; this rank's rows. Versions in use stay as they are, others
        are forgotten first."""

    def close(self) -> None:
        """Forget this rank's versions; the others do when they are ordered to close."""


class WholeTensors:
    """The publication of a process that has all tensors whole."""

    def __init__(self, snapshots: RankSnapshots) -> None:
        self.sources: Sequence[RowSource] = (snapshots.source,)
        self.parameters: NamedTensors = ()
        self._snapshots = snapshots

    def take(self, version: int, in_use: Collection[int]) -> WeightSnapshot:
        parameters, self.parameters = self.parameters, ()
        layout = self._snapshots.source.layout
        return self._snapshots.take(version, lambda buffer: layout.pack(parameters, buffer), in_use)

    def close(self) -> None:
        self._snapshots.close()
