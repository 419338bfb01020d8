"""What the trainer asks the processes of a server for, beyond vLLM's own routes (`--worker-extension-cls`).

Called through `/collective_rpc`, on every process of a server; each returns a list, since vLLM would turn anything else
into text.
"""

from typing import Any


class WeightsExtension:
    """Joins vLLM's worker class."""

    weight_transfer_engine: Any

    def served_weights(self) -> list[int | None]:
        """The version that this process holds; None before the first."""
        return [self.weight_transfer_engine.version]

    def leave_weights(self) -> list[bool]:
        """Leave the group with the trainer, once it has said that it leaves; False if it has not."""
        return [self.weight_transfer_engine.leave()]
