"""Methods that the trainer calls in a server's worker processes (`--worker-extension-cls`).

They are called through `/collective_rpc`, on every process of a server. Each returns a list, because vLLM converts
other types to text.
"""

from typing import Any


class WeightsExtension:
    """A mixin of vLLM's worker class."""

    weight_transfer_engine: Any

    def served_weights(self) -> list[int | None]:
        """The policy version of this process's model; None before the first update."""
        return [self.weight_transfer_engine.version]

    def leave_weights(self) -> list[bool]:
        """Leave the group with the trainer, after the trainer has announced that it leaves. False if it has not."""
        return [self.weight_transfer_engine.leave()]
