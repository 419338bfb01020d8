"""The trainer's weights on their way to the servers.

Owns having every rank hold its rows of the policy after a step, and handing the version to the sender. Promises that
the trainer goes on while the servers take a version; that they took it, or are evicted, before the next one is handed
over; and that the actor can see which server has what. Must not know how the bytes travel, nor where the servers are.
"""

import logging
import time

from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_publication import RankPublication
from pipeline.train.loop.group_batches import Pulse

log = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes the policy of `dispatch`.

    publisher.start(version)      # after a step: the servers take the weights from now on
    …the next step…
    publisher.settle()            # before the next `start`, or when the version has to be everywhere
    """

    def __init__(self, dispatch: RankGroup, sender: WeightSender, pulse: Pulse) -> None:
        self._dispatch, self._sender, self._pulse = dispatch, sender, pulse
        self._opened = False
        self._under_way = False

    def start(self, version: int) -> dict[str, float]:
        """Hand the policy as it is now to the servers, as `version`; what it took."""
        started = time.monotonic()
        if not self._opened:
            self._sender.open(RankPublication(self._dispatch, "policy", self._sender.settings))
            self._opened = True
        self._sender.take(version)
        self._dispatch.finish_weight_sync("policy")
        self._under_way = True
        return {"sync/handover_seconds": time.monotonic() - started}

    def wait_until_synced(self) -> dict[str, float]:
        """Wait until the servers have what was started; what became of it, nothing if all was settled before.

        Raises `WeightSyncError` when no server could be brought there, `Interrupted` when the attempt is ending.
        """
        if not self._under_way:
            return {}
        report = self._sender.wait_until_synced(self._pulse)
        self._under_way = False
        for server, failure in report.failures.items():
            log.warning("evicted %s: %s", server, failure)
        parts = {f"sync/{phase}_seconds": seconds for phase, seconds in report.slowest().items()}
        return {"sync/seconds": report.seconds, "sync/servers": float(len(report.servers))} | parts
