"""Where RL's data comes from: the stream of prepared groups.

Owns the cutting of batches. Promises that a batch of groups holds each position once, none that is refused
for its age, nothing that cannot be trained, and nothing that the ledger has settled; that what is not trained is
settled with its reason or asked for again; and that stream entries are acknowledged only after the commit that covers
them. Must not know models or ranks.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError, RecordError, RollcallError, StreamError
from pipeline.transport import Entry, Streams
from pipeline.transport.ledger import TRAINED, Ledger
from pipeline.transport.sample_records import MALFORMED, PreparedGroup, Reissue
from pipeline.transport.shared_state import SharedState
from pipeline.transport.staleness import is_refused

log = logging.getLogger(__name__)

READ_SECONDS = 0.5
MAX_MALFORMED = 3
"""A position that came malformed so often is settled as failed: it would hold up all that come after it."""


class Interrupted(RollcallError):
    """The attempt is ending: there will be no further batch."""


Pulse = Callable[[], None]
"""Called in every loop that waits, where no operation runs and nothing is half taken: shows the other ranks that the
controller lives, and may acknowledge what a commit covers. Raises `Interrupted`, or what ended the commit under way."""


@dataclass
class GroupBatches:
    """Cuts batches from the topic `prepared`.

        groups = batches.next(version)      # exactly training.prompts_per_step
        …train them…
        batches.trained(step)               # now the ledger has them
        batches.tell_progress(step + 1)     # may fail, with the streams: so it comes when the step counts
        batches.covered                     # stream entries that the next commit covers
        batches.begin_checkpoint()              # the same, when it begins; early if batches.crowded
        batches.acknowledge(covered)        # once that commit is durable, with what it covers

    The model knows token ids below `vocabulary`. `counts` says what was set aside since the last `next`: `duplicate`,
    `stale`, `malformed`, and the reasons of those that are settled.
    """

    streams: Streams
    board: SharedState
    ledger: Ledger
    config: RunConfig
    pulse: Pulse
    vocabulary: int
    counts: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0

    def __post_init__(self) -> None:
        self._reader = self.streams.reader("prepared", PreparedGroup, "trainer")
        self._fresh: dict[int, Entry[PreparedGroup]] = {}
        self._covered: list[str] = []
        self._uncommitted = 0
        self._malformed: Counter[int] = Counter()
        self._overtaken: set[int] = set()

    def next(self, version: int) -> list[PreparedGroup]:
        """The groups of the next step, in their order of arrival, for weights of `version`.

        Raises what `pulse` raises, and `DeadlineError` when no batch came for `training.data_seconds`.
        """
        self.counts.clear()
        started, wanted = time.monotonic(), self.config.training.prompts_per_step
        while len(self._fresh) < wanted:
            self.pulse()
            self._receive(wanted, version)
            self.waited = time.monotonic() - started
            if self.waited > self.config.training.data_seconds:
                aside = ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common(3)) or "nothing"
                missing = f"{wanted - len(self._fresh)} of {wanted} groups; set aside meanwhile: {aside}"
                raise DeadlineError("a batch from the preprocessor", self.waited, missing)
        return [entry.record for entry in self._fresh.values()]

    def _receive(self, wanted: int, version: int) -> None:
        try:
            for entry in self._reader.read(wanted - len(self._fresh), READ_SECONDS):
                self._take(entry, version)
            self.publish_progress(version)
        except StreamError:
            self.pulse()  # an attempt that is ending needs no data: the streams were not waited for
            raise

    def trained(self, step: int, outcome: str = TRAINED) -> None:
        """Settle the groups of the last `next`: step `step`, counted from 0, made of them what `outcome` says.

        It talks to nobody, so a step and its settlements happen together or not at all.
        """
        for position, entry in self._fresh.items():
            self._mark_done(position, outcome, step)
            self._note_consumed(entry)
        self._fresh.clear()

    def publish_progress(self, version: int) -> None:
        """Let the actor know the trainer's version and how much is settled."""
        self.board.post_progress(version, self.ledger.done_count)

    @property
    def covered(self) -> tuple[str, ...]:
        """Stream entries that the ledger covers and that are not acknowledged yet."""
        return tuple(self._covered)

    def begin_checkpoint(self) -> tuple[str, ...]:
        """What a commit that begins now covers."""
        self._uncommitted = 0
        return self.covered

    @property
    def is_near_budget(self) -> bool:
        """Whether what was settled since the last commit began takes half of what the topic may hold.

        Time to commit early: else the preprocessor soon waits for room, and the trainer for the preprocessor.
        """
        return self._uncommitted >= self.streams.budget // 2

    def acknowledge(self, covered: Sequence[str]) -> None:
        """Give up the stream entries `covered`, which a durable commit covers; those settled since then stay."""
        self._reader.acknowledge(covered)
        given_up = set(covered)
        self._covered = [entry for entry in self._covered if entry not in given_up]

    def _take(self, entry: Entry[PreparedGroup], version: int) -> None:
        prepared, training = entry.record, self.config.training
        position = prepared.group.position
        if position in self._fresh and self._fresh[position].id == entry.id:
            return  # delivered again: given up with its batch, not before
        if self.ledger.is_done(position) or position in self._fresh:
            self._discard(entry, "duplicate")
        elif fault := self._fault(prepared):
            self._refuse(entry, fault, version)
        elif prepared.outcome != "train":
            self._mark_done(position, prepared.outcome, version)
            self._discard(entry, prepared.outcome)
        elif is_refused(version, prepared.group, training.max_lag, training.stale, training.masked_finish):
            again = Reissue(position=position, reason="older than max_lag", awaited=position in self._overtaken)
            self.streams.publish("reissue", again)
            self._overtaken.add(position)
            self._discard(entry, "stale")
        else:
            self._fresh[position] = entry

    def _fault(self, prepared: PreparedGroup) -> str:
        """Why a group that came over the wire makes no sense; empty if it does."""
        try:
            prepared.check(self.config.model.max_length, self.vocabulary)
        except RecordError as error:
            return str(error)
        return ""

    def _refuse(self, entry: Entry[PreparedGroup], fault: str, version: int) -> None:
        position = entry.record.group.position
        self._malformed[position] += 1
        times = self._malformed[position]
        log.warning("position %d came malformed (%d of %d): %s", position, times, MAX_MALFORMED, fault)
        if times < MAX_MALFORMED:
            self.streams.publish("reissue", Reissue(position=position, reason=fault))
        else:
            self._mark_done(position, f"failed: {MALFORMED}", version)
        self._discard(entry, MALFORMED)

    def _mark_done(self, position: int, outcome: str, step: int) -> None:
        self.ledger.mark_done(position, outcome, step)
        self._overtaken.discard(position)

    def _discard(self, entry: Entry[PreparedGroup], reason: str) -> None:
        self.counts[reason] += 1
        self._note_consumed(entry)

    def _note_consumed(self, entry: Entry[PreparedGroup]) -> None:
        self._covered.append(entry.id)
        self._uncommitted += entry.size
