"""Batches of RL, from the stream of prepared groups.

Owns the trainer's staleness gate. Promises that a batch has each position once, no group that is too old, none that
cannot be trained, and none that the ledger has as done. A group that is not trained is marked as done with its reason,
or its position is issued again. Stream entries are acknowledged only after the checkpoint that covers them is durable.
Must not know models or ranks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from msgspec import structs

from pipeline.config import RunConfig
from pipeline.config.routing_shape import routing_shape
from pipeline.errors import DeadlineError, RecordError, RollcallError, StreamError
from pipeline.rollout.training_rewards import group_advantages
from pipeline.train.loop.actor_watch import ActorWatch
from pipeline.transport import Entry, Streams
from pipeline.transport.ledger import TRAINED, BatchEntry, Ledger
from pipeline.transport.rejections import lost_group
from pipeline.transport.sample_records import FILTERED, MALFORMED, Group, PreparedGroup, Reissue, solved_fraction
from pipeline.transport.shared_state import SharedState
from pipeline.transport.staleness import is_refused

log = logging.getLogger(__name__)

READ_SECONDS = 0.5
TOPICS = ("groups", "prepared")
"""The topics on the way of a group to the trainer."""
MAX_MALFORMED = 3
"""Malformed deliveries after which a position is marked as failed; without a limit it would be reissued forever."""


class Interrupted(RollcallError):
    """The attempt is ending: there will be no further batch."""


Pulse = Callable[[], None]
"""Called in every waiting loop, between operations, at points where no state is partially updated. Sends a sign of life
to the other ranks, and may acknowledge entries of a durable checkpoint. Raises `Interrupted`, or the error of a failed
save."""


@dataclass
class GroupBatches:
    """Reads batches from the topic `prepared`.

        groups = batches.next(version)      # exactly training.prompts_per_step
        …train them…
        batches.trained(step)               # now the ledger has them
        batches.publish_progress(step + 1)  # may fail with the streams, so it comes after the step counts
        batches.begin_checkpoint()          # stream entries that a checkpoint covers; early if batches.is_near_budget
        batches.acknowledge(covered)        # once that checkpoint is durable, with its entries

    Token ids must be below `vocabulary`. `counts` are the groups discarded since the last `next`, by reason:
    `duplicate`, `stale`, `malformed`, and the outcomes of groups that the preprocessor filtered or failed. `actor`
    observes whether the episodes of missing groups advance.
    """

    streams: Streams
    board: SharedState
    ledger: Ledger
    config: RunConfig
    pulse: Pulse
    vocabulary: int
    counts: Counter[str] = field(default_factory=Counter)
    actor: ActorWatch = field(default_factory=ActorWatch)

    def __post_init__(self) -> None:
        self._reader = self.streams.reader("prepared", PreparedGroup, "trainer", lost_group)
        self._routing = routing_shape(self.config)
        self._pending: dict[int, Entry[PreparedGroup]] = {}
        self._covered: list[str] = []
        self._uncommitted = 0
        self._malformed: Counter[int] = Counter()
        self._overtaken: set[int] = set()

    def next(self, version: int) -> list[PreparedGroup]:
        """The groups of the next step, in their order of arrival, for weights of `version`.

        Raises errors of `pulse`, and `DeadlineError` if for `training.data_seconds` no group that can be trained
        arrived, and no episode of the actor advanced. Slow episodes may take longer (`actor_watch`).
        """
        self.counts.clear()
        size = self.config.training.prompts_per_step
        self.actor.begin()
        while len(self._pending) < size:
            self.pulse()
            before = len(self._pending)
            self._receive(size, version)
            if len(self._pending) > before:
                self.actor.arrived()
            elif (stalled := self._stalled_seconds(size)) > self.config.training.data_seconds:
                discarded = ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common(3)) or "nothing"
                missing = (
                    f"{size - len(self._pending)} of {size} groups; set aside meanwhile: {discarded}{self._rejected()}"
                )
                raise DeadlineError("a batch from the preprocessor", stalled, f"{missing}; {self.actor.describe()}")
        return [entry.record for entry in self._pending.values()]

    def _rejected(self) -> str:
        """The entries that were rejected since the run began; empty without any.

        Without those that the streams cannot tell: the text belongs to an error, which it must not replace.
        """
        texts = []
        for topic in TOPICS:
            with suppress(StreamError):
                if rejected := self.streams.rejected(topic):
                    count = self.streams.depth(topic).rejected
                    texts.append(f"; {count} entries of {topic!r} rejected, the last: {rejected[-1].reason}")
        return "".join(texts)

    def _stalled_seconds(self, size: int) -> float:
        """Seconds without progress.

        Progress of an actor whose groups are malformed leads to no batch. Once the positions of a whole batch could be
        marked as failed for that, only groups count.
        """
        stalled = self.actor.stalled_seconds()
        return self.actor.seconds_without_arrival() if self.counts[MALFORMED] >= MAX_MALFORMED * size else stalled

    def _receive(self, size: int, version: int) -> None:
        try:
            # Never more than the batch lacks: a group that waits here for a later step would age unseen.
            for entry in self._reader.read(size - len(self._pending), READ_SECONDS):
                self._take(entry, version)
            # Discarded groups are done too. Without this the actor's gate would count them as outstanding and close.
            self.publish_progress(version)
        except StreamError:
            self.pulse()  # raises `Interrupted` in an attempt that is ending, which needs no data any more
            raise

    def trained(self, step: int, outcome: str = TRAINED) -> None:
        """Mark the groups of the last `next` as done by step `step` (counted from 0), with `outcome`.

        Pure memory, no I/O: a step and its ledger entries happen together or not at all.
        """
        for order, entry in enumerate(self._pending.values()):
            group = entry.record.group
            batch_entry = BatchEntry(order=order, versions=group.versions, fingerprint=group.fingerprint())
            self._mark_done(group, outcome, step, batch_entry)
            self._note_consumed(entry)
        self._pending.clear()

    def publish_progress(self, version: int) -> None:
        """Post the trainer's version and the number of done positions to the board, for the actor's gate."""
        self.board.post_progress(version, self.ledger.done_count)

    @property
    def covered(self) -> tuple[str, ...]:
        """Stream entries that are in the ledger and not acknowledged yet."""
        return tuple(self._covered)

    def begin_checkpoint(self) -> tuple[str, ...]:
        """The stream entries that a checkpoint covers if its save begins now."""
        self._uncommitted = 0
        return self.covered

    @property
    def is_near_budget(self) -> bool:
        """Whether entries consumed since the last save began fill half of the topic's budget.

        Then a checkpoint comes early. Otherwise the preprocessor would wait for room, and the trainer for it.
        """
        return self._uncommitted >= self.streams.budget // 2

    def acknowledge(self, covered: Sequence[str]) -> None:
        """Acknowledge the entries `covered` by a durable checkpoint; entries consumed since its save began stay."""
        self._reader.acknowledge(covered)
        acknowledged = set(covered)
        self._covered = [entry for entry in self._covered if entry not in acknowledged]

    def _take(self, entry: Entry[PreparedGroup], version: int) -> None:
        prepared, training = entry.record, self.config.training
        position = prepared.group.position
        if position in self._pending and self._pending[position].id == entry.id:
            return  # delivered again after a reconnection; acknowledged with its batch, not before
        if self.ledger.is_done(position) or position in self._pending:
            self._discard(entry, "duplicate")
        elif fault := self._fault(prepared):
            self._refuse(prepared.group, fault, version)
            self._note_consumed(entry)
        elif prepared.outcome != "train" and not self._fills_batch(prepared):
            self._mark_done(prepared.group, prepared.outcome, version)
            self._discard(entry, prepared.outcome)
        elif is_refused(version, prepared.group, training.max_lag, training.stale, training.masked_finish):
            # Refused for the second time: `awaited` makes the actor's gate hold later groups back until this one
            # arrives, so that no position is refused forever (`pipeline.transport.staleness`).
            again = Reissue(position=position, reason="older than max_lag", awaited=position in self._overtaken)
            self.streams.publish("reissue", again)
            self._overtaken.add(position)
            self._discard(entry, "stale")
        else:
            self._pending[position] = replace(entry, record=self._as_trained(prepared))

    def _fills_batch(self, prepared: PreparedGroup) -> bool:
        """Whether a group with equal rewards is trained all the same, since this step has dropped enough of them.

        Otherwise a policy that solves all prompts, or none, would sample forever for one batch.
        """
        training = self.config.training
        limit = training.max_dropped_batches * training.prompts_per_step
        return prepared.outcome == FILTERED and self.counts[FILTERED] >= limit

    def _as_trained(self, prepared: PreparedGroup) -> PreparedGroup:
        """The group as it is trained, and as a replay trains it."""
        if prepared.top_tokens:
            within = tuple(tokens.within(self.vocabulary) for tokens in prepared.top_tokens)
            prepared = structs.replace(prepared, top_tokens=within)
        if prepared.outcome == "train":
            return prepared
        advantages = group_advantages(prepared.group.samples, self.config)
        return structs.replace(prepared, outcome="train", advantages=advantages)

    def _fault(self, prepared: PreparedGroup) -> str:
        """Why a received group is malformed; empty if it is valid."""
        try:
            prepared.check(self.config.model.max_length, self.vocabulary, self._routing, self.config.teacher.top_k)
        except RecordError as error:
            return str(error)
        return ""

    def _refuse(self, group: Group, fault: str, version: int) -> None:
        """Have the position of a malformed group sampled again; after `MAX_MALFORMED` times it has failed."""
        position = group.position
        self._malformed[position] += 1
        times = self._malformed[position]
        log.warning("position %d came malformed (%d of %d): %s", position, times, MAX_MALFORMED, fault)
        if times < MAX_MALFORMED:
            self.streams.publish("reissue", Reissue(position=position, reason=fault))
        else:
            # Its rewards cannot be trusted: it has no samples in the ledger.
            self._mark_done(structs.replace(group, samples=()), f"failed: {MALFORMED}", version)
        self.counts[MALFORMED] += 1

    def _mark_done(self, group: Group, outcome: str, step: int, entry: BatchEntry | None = None) -> None:
        solved = solved_fraction(group, self.config.rollout.curriculum.correct)
        self.ledger.mark_done(group.position, outcome, step, entry, group.prompt, solved)
        self._overtaken.discard(group.position)

    def _discard(self, entry: Entry[PreparedGroup], reason: str) -> None:
        self.counts[reason] += 1
        self._note_consumed(entry)

    def _note_consumed(self, entry: Entry[PreparedGroup]) -> None:
        self._covered.append(entry.id)
        self._uncommitted += entry.size
