"""The preprocessor role: converts groups to groups that are ready to train.

Owns the preparation of a group: its advantages, a teacher's log-probabilities, or the reason why it is not trained.
Promises one `PreparedGroup` per `Group`, published together with the acknowledgement of its input; that no group,
however short or odd, ends it; and that it runs until it is stopped. The trainer computes everything that needs one of
its models (reference log-probabilities, values) or the whole batch.
"""

import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from msgspec import structs

from pipeline.algorithms.advantage_estimators import has_zero_variance
from pipeline.config import RunConfig
from pipeline.errors import RecordError, RollcallError
from pipeline.roles import SERVICES, RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.roles.sample_quota import sample_store_for
from pipeline.rollout.sample_store import TRAIN, records_of_group
from pipeline.rollout.teacher_client import References, Teacher
from pipeline.rollout.time_fractions import TimeFraction
from pipeline.rollout.training_rewards import group_advantages
from pipeline.transport import Entry, Reader, Streams, connect
from pipeline.transport.rejections import lost_group
from pipeline.transport.sample_records import FILTERED, MALFORMED, Group, PreparedGroup
from pipeline.utils import heartbeat

log = logging.getLogger(__name__)

READ_LIMIT = 64
READ_SECONDS = 0.5
REPORT_SECONDS = 1.0
CONNECT_FRACTION = 0.9
"""Fraction of `cluster.startup_seconds` for which a teacher is awaited. It is below 1, so that the error names the
teacher before the role's startup deadline passes."""
GroupReader = Reader[Group | PreparedGroup]
"""Delivers a group that cannot be decoded as the malformed one that the trainer gets."""


def launch(context: RoleContext) -> RoleCommand:
    """One process with one thread."""
    argv = (sys.executable, "-P", "-m", "pipeline.roles.preprocessor", *context.arguments())
    return RoleCommand(argv=argv, env={"OMP_NUM_THREADS": "1"}, has_heartbeat=1, ready=context.is_ready, stage=SERVICES)


def prepare_group(group: Group, config: RunConfig) -> PreparedGroup:
    """The group with its advantages, or with the reason why it is done without training.

    With the baselines `batch` and `gae` the field holds the rewards, from which the trainer computes advantages.

    `malformed: …` when a sample is invalid: the trainer requests the position again. `failed: …` when fewer than
    `rollout.min_samples` samples succeeded; `filtered: …` when all advantages are zero and
    such groups are dropped (`training.zero_variance_groups`).
    """
    try:
        for sample in group.samples:
            sample.check()
    except RecordError as error:
        return PreparedGroup(group=group, outcome=f"{MALFORMED}: {error}")
    if len(group.samples) < config.rollout.min_samples:
        # Failures are counted by reason, so the detail after the colon is dropped.
        reason = group.failures[0].partition(":")[0] if group.failures else "too few samples"
        return PreparedGroup(group=group, outcome=f"failed: {reason}")
    if config.drops_equal_groups and has_zero_variance([sample.reward for sample in group.samples]):
        return PreparedGroup(group=group, outcome=FILTERED)
    return PreparedGroup(group=group, advantages=group_advantages(group.samples, config))


def attach_references(prepared: PreparedGroup, references: References | str) -> PreparedGroup:
    """The group with a teacher's log-probabilities; or as failed, with the reason why there are none."""
    if isinstance(references, str):
        return PreparedGroup(group=prepared.group, outcome=f"failed: {references.partition(':')[0]}")
    return structs.replace(
        prepared,
        references=tuple(scores.logprobs for scores in references),
        top_tokens=tuple(scores.top_tokens for scores in references if scores.top_tokens is not None),
    )


class Preprocessor:
    """The loop of the role."""

    def __init__(
        self,
        streams: Streams,
        config: RunConfig,
        report: Callable[[dict[str, float]], None],
        keep: Callable[[PreparedGroup], None] = lambda prepared: None,
    ) -> None:
        """`report` is called about once a second with counts, and the fractions of time since its last call; `keep`
        with each published group, and must not block."""
        self._streams, self._config, self._report, self._keep = streams, config, report, keep
        self._teacher = Teacher(config.teacher) if config.teacher.url else None
        self._outcomes: Counter[str] = Counter()
        self._starved, self._full = TimeFraction(), TimeFraction()
        self._reported = float("-inf")

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Prepare groups until `should_stop()`; raises the errors of `Teacher.meet`."""
        reader: GroupReader = self._streams.reader("groups", Group, "preprocessor", lost_group)

        def stopped() -> bool:
            heartbeat.beat()
            return should_stop()

        if self._teacher is not None:
            self._teacher.meet(CONNECT_FRACTION * self._config.cluster.startup_seconds, stopped)
        while not stopped():
            self._report_counts()
            with self._starved:
                entries = reader.read(READ_LIMIT, READ_SECONDS)
            if entries:
                self._pass_on(reader, entries, stopped)

    def _pass_on(
        self, reader: GroupReader, entries: list[Entry[Group | PreparedGroup]], should_stop: Callable[[], bool]
    ) -> None:
        groups = [entry.record for entry in entries]
        prepared = [prepare_group(group, self._config) if isinstance(group, Group) else group for group in groups]
        # A stop leaves the entries unacknowledged: they are delivered again.
        if self._teacher is not None and not self._ask(self._teacher, prepared, should_stop):
            return
        done = (reader, [entry.id for entry in entries])
        with self._full:
            passed = self._streams.publish_many("prepared", prepared, acknowledging=done, should_stop=should_stop)
        if passed:
            self._outcomes.update(group.outcome.partition(":")[0] for group in prepared)
            for group in prepared:
                self._keep(group)

    def _ask(self, teacher: Teacher, prepared: list[PreparedGroup], should_stop: Callable[[], bool]) -> bool:
        """Attach the teacher's log-probabilities to the groups to train; False when the role must stop."""
        indices = [index for index, group in enumerate(prepared) if group.outcome == "train"]
        references = teacher.references([prepared[index].group for index in indices], should_stop)
        for index, reference in zip(indices, references or (), strict=False):
            prepared[index] = attach_references(prepared[index], reference)
        for reason in {reference for reference in references or () if isinstance(reference, str)}:
            log.warning("a group is not trained: %s", reason)
        return references is not None

    def _report_counts(self) -> None:
        now = time.monotonic()
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            fractions = {"starved": self._starved.pop(), "backpressure": self._full.pop()}
            self._report(fractions | {f"groups/{outcome}": count for outcome, count in self._outcomes.items()})


def main(arguments: list[str]) -> None:
    """The role's process."""
    heartbeat.start()
    context = RoleContext.from_arguments(arguments)
    context.configure_logs()
    context.report("starting")
    context.wait_for_debugger()
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    config = context.config

    def keep(prepared: PreparedGroup) -> None:
        if prepared.outcome.partition(":")[0] != MALFORMED:
            store.add(records_of_group(prepared, config.task.name, config.loss.advantage_estimator))

    try:
        with connect(context) as streams, sample_store_for(context, TRAIN) as store:
            preprocessor = Preprocessor(streams, config, lambda numbers: context.report("ready", "", **numbers), keep)
            preprocessor.run(stop.is_set)
    except RollcallError as error:
        context.report_failure(error, str(error))
        log.error("%s", error)
        sys.exit(error.exit_code)
    context.report("stopped")


if __name__ == "__main__":
    main(sys.argv[1:])
