"""The `gloo` weight-transfer engine: weights over TCP, on CPUs.

Each process of a server receives all weights and reloads its part of the model from them, in a server that is paused;
an adapter changes between two steps. See `transfer_engine`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pipeline.inference.vllm.transfer_engine import TransferEngine, reload_model
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.server_shards import Shard
from pipeline.inference.weight_sync.transfer_route import RowReceiver
from pipeline.inference.weight_sync.transports.gloo import SERVER, TransferGroup, WeightLayout
from pipeline.utils.waiting import Deadline


class GlooEngine(TransferEngine[TransferGroup]):
    """Receives every parameter, then reloads the model, or installs an adapter, from the staging buffer."""

    def _stage(self, layout: WeightLayout, on_host: bool) -> tuple[Shard, Tensor]:
        self._layout = layout
        self._staging = torch.empty(layout.bytes, dtype=torch.uint8)
        return Shard.whole(layout), self._staging

    def _join(self, store: Store, name: str, source: RowSource, address: str, deadline: Deadline) -> TransferGroup:
        return TransferGroup(store, name, SERVER, address, deadline.left)

    def _receive(self, groups: Sequence[TransferGroup], rows: RowReceiver, deadline: Deadline) -> int:
        return rows.receive(groups, lambda group, buffer: group.receive(buffer, deadline), deadline)

    def _arrived(self) -> Iterable[tuple[str, Tensor]]:
        return self._layout.views(self._staging)

    def _take(self) -> None:
        reload_model(self.model, self.model_config, self._layout.views(self._staging))
