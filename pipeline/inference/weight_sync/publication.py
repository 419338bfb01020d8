"""Publications, which take versions of the weights for the servers, on one rank or on several.

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
    """The settings of every sending rank of the trainer.

    Attributes:
        meeting: rank 0's store.
        adapter: see `WeightSnapshot`.
        device: type of the sending device.
        on_host: whether a sending GPU holds pending versions in pinned host memory.
    """

    meeting: MeetingPoint
    adapter: Mapping[str, Any]
    device: str
    on_host: bool

    @property
    def device_here(self) -> torch.device:
        """The sending device of this process."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else CPU

    def snapshots(self, layout: WeightLayout, rows: tuple[Rows, ...] | None = None) -> RankSnapshots:
        """An empty store for the versions that this process will send: `rows` of each tensor; None: all rows."""
        source = RowSource(layout, rows, gpu_of(self.device_here))
        return RankSnapshots(source, self.adapter, self.device_here, self.on_host)


class Publication(Protocol):
    """An object that takes versions of the weights on every sending rank.

    Attributes:
        sources: the sending ranks, this one first.
    """

    sources: Sequence[RowSource]

    def take(self, version: int, in_use: Collection[int]) -> WeightSnapshot:
        """Copy the present weights on every rank; returns this rank's rows.

        Versions in use stay unchanged; others are released first.
        """

    def close(self) -> None:
        """Release this rank's versions; the other ranks release theirs at the order `close`."""


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
