"""The loop that issues groups without end, as fast as the servers and the trainer allow.

Owns when positions are issued, and the publishing of their groups. Promises that positions are issued in order, under
the staleness gate, at most `rollout.concurrency` at a time, or fewer if the servers are overloaded; that a full topic
delays only groups; and that no position is lost: a position is issued again if it was in flight when an actor crashed,
was refused by the trainer, or was lost with the last writes of a streams' backend; and that the recorded episodes of a
position that was in flight continue. Never decides that training is over. Must not know tasks or the meaning of tokens.

Only servers that the trainer declared current receive requests: the board lists them.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import asdict, dataclass

from pipeline.config import RunConfig
from pipeline.rollout.concurrency_control import ConcurrencyController, ServerLoad, Slots
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.rollout.issue_queue import IssueQueue
from pipeline.rollout.server_pool import InferenceClient
from pipeline.rollout.time_fractions import TimeFraction
from pipeline.transport import AsyncStreams
from pipeline.transport.ledger import Ledger
from pipeline.transport.sample_records import Group, PreparedGroup, Reissue
from pipeline.transport.shared_state import SharedState, TrainerProgress
from pipeline.transport.staleness import StalenessGate
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.03
ADAPT_SECONDS = 5.0
START_GROUPS = 8
"""Groups in flight at first, if their number follows the servers' load."""
READ_SECONDS = 60.0
READ_LIMIT = 256


@dataclass
class Counts:
    """Totals since the actor started."""

    groups: int = 0
    samples: int = 0
    abandoned: int = 0
    tokens: int = 0
    reused: int = 0
    resampled: int = 0
    in_flight: int = 0

    def add(self, group: Group) -> None:
        """Count a published group; `tokens` counts sampled tokens."""
        self.groups += 1
        self.samples += len(group.samples)
        self.abandoned += len(group.abandoned)
        self.reused += group.reused
        self.resampled += group.resampled
        self.tokens += sum(int(row.sampled.sum()) for sample in group.samples for row in sample.rows())


class IssueLoop:
    """Issues positions and publishes their groups; used by one event loop."""

    def __init__(
        self,
        streams: AsyncStreams,
        board: SharedState,
        builder: GroupBuilder,
        client: InferenceClient,
        config: RunConfig,
    ) -> None:
        self._streams, self._board, self._builder, self._client = streams, board, builder, client
        self._gate = StalenessGate(config.training.prompts_per_step, config.training.max_lag)
        self._max_lag = config.training.max_lag
        self._patience = 2 * config.cluster.startup_seconds
        self._slots = Slots(config.rollout.concurrency)
        self._adapts = config.rollout.adaptive_concurrency
        self._group_size = config.rollout.group_size + config.rollout.oversample
        self._drafts = config.inference.speculation.method != "none"
        self._changed = asyncio.Condition()
        self._progress = TrainerProgress(version=0, done=0)
        self._refusals: dict[int, list[str]] = {}
        self._awaited: set[int] = set()
        self._blocked, self._full = TimeFraction(), TimeFraction()
        self.counts = Counts()

    async def run(self) -> None:
        """Run until cancelled; `TaskError` when the task never succeeds, `DeadlineError` without a trainer."""
        self._reissues = await self._streams.reader("reissue", Reissue, "actor")
        self._generation = self._streams.generation
        missing, first_new = await self._unissued()
        # Of the other positions, the group is published or done.
        in_flight = set(missing)
        self._builder.journal.retain(lambda position: position >= first_new or position in in_flight)
        self._queue = IssueQueue(missing, first_new)
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._watch())
            self._tasks.create_task(self._take_back())
            if self._adapts:
                self._tasks.create_task(self._adapt())
            if self._drafts:
                self._tasks.create_task(self._watch_drafts())
            self._tasks.create_task(self._issue_all())

    def numbers(self) -> dict[str, float]:
        """Values for the status: counts since the start, and fractions of the time since the last call."""
        counts, gate = self.counts, self._gate
        failures: Counter[str] = self._builder.patience.counts
        curriculum = self._builder.curriculum.numbers() if self._builder.curriculum else {}
        return {
            "groups": counts.groups,
            "samples": counts.samples,
            "abandoned_samples": counts.abandoned,
            "tokens": counts.tokens,
            "reused_tokens": counts.reused,
            "resampled_tokens": counts.resampled,
            "in_flight": counts.in_flight,
            "concurrency": self._slots.limit,
            "failed_samples": failures.total(),
            "version": self._progress.version,
            "slowest_server": -1 if gate.slowest is None else gate.slowest,
            "gate_blocked": self._blocked.pop(),
            "backpressure": self._full.pop(),
        } | {**curriculum, **{f"failed/{kind}": count for kind, count in failures.items()}}

    async def _unissued(self) -> tuple[list[int], int]:
        """The positions to issue (see `Ledger.unissued`), once the trainer has posted its ledger.

        `pipeline.transport.shared_state` explains the order of the reads.
        """
        deadline = Deadline("the trainer's ledger", self._patience)
        while await asyncio.to_thread(self._board.ledger) is None:
            if deadline.passed:
                raise deadline.error("the trainer, which posts it when it starts")
            await asyncio.sleep(WATCH_SECONDS)
        groups = await self._streams.scan("groups", Group)
        prepared = await self._streams.scan("prepared", PreparedGroup)
        committed = await asyncio.to_thread(self._board.ledger)
        ledger = Ledger.restore(committed) if committed else Ledger()
        known = {entry.record.position for entry in groups} | {entry.record.group.position for entry in prepared}
        return ledger.unissued(known)

    async def _find_lost(self) -> None:
        """Issue positions again that the streams lost. A position in flight may be sampled twice; the ledger counts it
        once."""
        self._generation = self._streams.generation
        unissued = await self._unissued()
        async with self._changed:
            count = self._queue.lost(*unissued, self._refusals)
            self._changed.notify_all()
        log.warning("the streams were restarted: %d positions are issued again", count)

    async def _watch(self) -> None:
        """Follow the trainer's progress and the policy versions of the servers."""
        while True:
            progress, servers = await asyncio.to_thread(lambda: (self._board.progress(), self._board.servers()))
            self._client.follow(servers)
            if progress is not None:
                current = [version for version in servers.values() if version is not None]
                await self._advance(progress, min(current, default=None))
            if self._generation != self._streams.generation:
                await self._find_lost()
            await asyncio.sleep(WATCH_SECONDS)

    async def _advance(self, progress: TrainerProgress, slowest: int | None) -> None:
        async with self._changed:
            self._progress = progress
            self._gate.advance(progress.version, slowest)
            self._changed.notify_all()

    async def _adapt(self) -> None:
        """Let the number of slots follow the servers' load."""
        controller = ConcurrencyController(self._slots.limit, START_GROUPS, self._group_size)
        while True:
            self._slots.set_limit(controller.limit)
            await asyncio.sleep(ADAPT_SECONDS)
            load = await self._client.load()
            controller.update(ServerLoad(self.counts.in_flight, **asdict(load)))

    async def _watch_drafts(self) -> None:
        """Read again and again how many tokens the servers drafted and accepted."""
        while True:
            await self._client.read_drafts()
            await asyncio.sleep(ADAPT_SECONDS)

    async def _issue_all(self) -> None:
        while True:
            await self._slots.acquire()
            with self._blocked:
                position = await self._admitted()
            self._tasks.create_task(self._produce(position))

    async def _admitted(self) -> int:
        """The next position, once the gate admits it. A position that was refused twice holds back later ones."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._gate.room(self._queue.outstanding(self._progress.done)))
            position = self._queue.take()
            if position in self._awaited:
                self._gate.wait_for(position)
        return position

    async def _produce(self, position: int) -> None:
        self.counts.in_flight += 1
        try:
            group = await self._builder.build(position, self._oldest(position))
            await self._publish(group)
            self._builder.journal.drop(position)
        finally:
            self.counts.in_flight -= 1
            self._slots.release()

    def _oldest(self, position: int) -> int:
        """The oldest policy version whose recorded tokens the group of a position may have. An awaited one is not
        refused again, since the gate counts it with the weights of its issue."""
        if position in self._awaited and self._gate.slowest is not None:
            return self._gate.slowest
        return self._progress.version - self._max_lag

    async def _publish(self, group: Group) -> None:
        """Publish a group, and acknowledge the reissue requests for it in the same operation."""
        refusals = self._refusals.pop(group.position, [])
        self._awaited.discard(group.position)
        with self._full:
            await self._streams.publish("groups", group, acknowledging=(self._reissues, refusals) if refusals else None)
        self.counts.add(group)
        async with self._changed:
            self._gate.arrived(group.position)
            self._changed.notify_all()

    async def _take_back(self) -> None:
        """Issue refused positions again. A request is acknowledged together with the new group, so it survives a
        restart of the actor."""
        while True:
            for entry in await self._streams.read(self._reissues, READ_LIMIT, READ_SECONDS):
                position = entry.record.position
                if entry.id in self._refusals.get(position, ()):
                    continue  # the stream delivered the entry again
                self._refusals.setdefault(position, []).append(entry.id)
                if entry.record.awaited:
                    self._awaited.add(position)
                async with self._changed:
                    self._queue.again(position)
                    self._changed.notify_all()
