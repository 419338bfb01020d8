"""Methods that the trainer calls in a server's worker processes (`--worker-extension-cls`).

They are called through `/collective_rpc`, on every process of a server. Each returns a list, because vLLM converts
other types to text. None raises: see `transfer_engine`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any


class WeightsExtension:
    """A mixin of vLLM's worker class."""

    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]

    def served_weights(self) -> list[int | None]:
        """The policy version of this process's model; None before the first update."""
        return [self.weight_transfer_engine.version]

    def weights_failure(self) -> list[str]:
        """The reason why this process did not meet the trainer or install the last update; empty without a failure."""
        return [self.weight_transfer_engine.failure]

    def begin_update(self) -> list[bool]:
        """Begin to receive an update. One that its trainer did not finish ends first: vLLM would refuse another."""
        with suppress(RuntimeError):  # there is none
            self.finish_weight_update()
        self.start_weight_update()
        return [True]

    def adopt_server(self, group: str) -> list[bool]:
        """Begin to be the source of another server's weights; False if this server forwards none."""
        return [self.weight_transfer_engine.adopt_server(group)]

    def feed_server(self, group: str, version: int, seconds: float) -> list[bool]:
        """Forward a version to a server that was adopted under `group`; False if there is none."""
        return [self.weight_transfer_engine.feed_server(group, int(version), float(seconds))]

    def leave_weights(self) -> list[bool]:
        """Leave the group with the trainer, after the trainer has announced that it leaves. False if it has not."""
        return [self.weight_transfer_engine.leave()]
