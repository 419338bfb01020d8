"""Publication of the trainer's weights after a step.

Owns the order of a publication: every rank copies its rows of the policy, then the sender gets the version. Promises
that the trainer continues while the servers receive a version; that every server has it, or is evicted, before the next
version is published; and that the actor can see the version of each server. Must not know how the bytes travel, nor
where the servers are.
"""

import logging
import time
from collections.abc import Callable

from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_publication import RankPublication
from pipeline.train.loop.group_batches import Pulse

log = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes the policy of `dispatch`.

    publisher.start(version)          # after a step: the servers receive the weights from now on
    …the next step…
    publisher.wait_until_synced()     # before the next `start`, or when every server must have the version
    """

    def __init__(
        self,
        dispatch: RankGroup,
        sender: WeightSender,
        pulse: Pulse,
        on_start: Callable[[int], None] = lambda version: None,
        on_quorum: Callable[[int], None] = lambda servers: None,
    ) -> None:
        """`on_start` is called with a version that was just started, while the servers receive it; `on_quorum` once,
        with the number of servers that have the first version."""
        self._dispatch, self._sender, self._pulse, self._on_start = dispatch, sender, pulse, on_start
        self._on_quorum = on_quorum
        self._opened = self._has_quorum = False
        self._under_way = False

    def start(self, version: int) -> dict[str, float]:
        """Publish the present weights of the policy as `version`; returns the seconds of the copy as a metric."""
        started = time.monotonic()
        if not self._opened:
            self._sender.open(RankPublication(self._dispatch, "policy", self._sender.settings))
            self._opened = True
        self._sender.take(version)
        self._dispatch.finish_weight_sync("policy")
        self._under_way = True
        self._on_start(version)
        return {"sync/handover_seconds": time.monotonic() - started}

    def wait_until_synced(self) -> dict[str, float]:
        """Wait until the servers have the started version; returns metrics of the sync, none without a version.

        Raises `WeightSyncError` when no server has the version, `Interrupted` when the attempt is ending.
        """
        if not self._under_way:
            return {}
        report = self._sender.wait_until_synced(self._pulse)
        self._under_way = False
        if not self._has_quorum:
            self._has_quorum = True
            self._on_quorum(len(report.servers))
        for server, failure in report.failures.items():
            log.warning("evicted %s: %s", server, failure)
        parts = {f"sync/{phase}_seconds": seconds for phase, seconds in report.slowest().items()}
        return {"sync/seconds": report.seconds, "sync/servers": float(len(report.servers))} | parts
