"""Batches of RL from the recorded samples of another run: `GroupBatches` without streams.

Owns a replay's batches: those of the recorded run, step by step. Promises that a step has the same groups in the same
order whatever happened before it, so that a replay that was killed continues as an uninterrupted one; and that the
ledger ends as the recorded one. Must not know models or ranks.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config import RunConfig
from pipeline.rollout.recorded_groups import RecordedRun
from pipeline.rollout.training_rewards import group_advantages
from pipeline.train.loop.group_batches import Pulse
from pipeline.transport.ledger import TRAINED, BatchEntry, Ledger
from pipeline.transport.sample_records import Group, PreparedGroup


@dataclass
class RecordedBatches:
    """The batches of `recorded`, used as `GroupBatches`; `counts` are the positions that it had set aside."""

    recorded: RecordedRun
    ledger: Ledger
    config: RunConfig
    pulse: Pulse
    vocabulary: int
    counts: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0

    def next(self, version: int) -> list[PreparedGroup]:
        """The groups of the step that `version` weights begin; `ConfigError` if their samples are gone."""
        self.pulse()
        started = time.monotonic()
        self.counts.clear()
        for line in self.recorded.set_aside(version):
            self.ledger.mark_done(line.position, line.outcome, version, None, line.prompt, line.solved)
            self.counts[line.outcome] += 1
        groups = [self._prepared(group) for group in self.recorded.batch(version)]
        self.waited = time.monotonic() - started
        return groups

    def trained(self, step: int, outcome: str = TRAINED) -> None:
        """Mark the groups of the last `next` as done by step `step` (counted from 0), with `outcome`."""
        for line in self.recorded.entries(step):
            assert line.order is not None
            assert line.versions is not None
            entry = BatchEntry(order=line.order, versions=line.versions, fingerprint=line.fingerprint)
            self.ledger.mark_done(line.position, outcome, step, entry, line.prompt, line.solved)

    def publish_progress(self, version: int) -> None:
        """Nobody waits for a replay's progress."""

    def _prepared(self, group: Group) -> PreparedGroup:
        """The group with its advantages: a function of its rewards, so that a replay may use another estimator."""
        prepared = PreparedGroup(group=group, advantages=group_advantages(group.samples, self.config))
        prepared.check(self.config.model.max_length, self.vocabulary)
        return prepared


class NoServers:
    """The `WeightPublisher` and the `Evaluations` of a run without servers."""

    def start(self, version: int) -> dict[str, float]:
        return {}

    def wait_until_synced(self) -> dict[str, float]:
        return {}

    def due(self, version: int, *, last: bool = False) -> list[str]:
        return []

    def is_open(self, version: int) -> bool:
        return False

    def request(self, version: int, sets: Sequence[str]) -> None:
        """No set is ever due."""

    def collect(self) -> None:
        """There are no results."""

    def wait(self) -> None:
        """Nothing is open."""
