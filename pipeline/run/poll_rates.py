"""How often the processes of a run access the shared file system, by the number of its ranks.

Owns every interval that must grow with the ranks, so that the rate of all ranks together is bounded, and the schedule
by which one process reads documents of one kind. Must not know the documents, nor how agents are linked.

| access | by | limit for all ranks together |
|---|---|---|
| events, revisions of the world | rank 0 of the tree of agents (`slurm.agent.control_tree`) | 10 reads a second |
| the same | an agent with a link in the tree | `MAX_LINKED_POLLS_PER_SECOND`, up to 3,000 ranks |
| the same | an agent without a link; the trainer's rank 0 | `MAX_POLLS_PER_SECOND`, up to 1,000 ranks |
| its heartbeat file | every agent | `MAX_TOUCHES_PER_SECOND`, up to 4,000 ranks |
| a neighbor's heartbeat file | an agent that the neighbor does not answer | the same, after the suspicion below |
| all exit markers | an agent of a failed attempt that waits for the others | `MAX_LISTINGS_PER_SECOND` |

While the link of a neighbor suggests its loss, for 5 to 20 s, its file is read once a second (`slurm.agent.loss_rule`).
"""

from pipeline.utils.waiting import CLOCK, Clock

MAX_POLLS_PER_SECOND = 500
"""Limit for all ranks together, on one file server, while nothing happens."""
MAX_LINKED_POLLS_PER_SECOND = 100
MAX_TOUCHES_PER_SECOND = 200
MAX_LISTINGS_PER_SECOND = 200
TOUCH_SECONDS = 5.0
"""Seconds between two touches of a heartbeat file in a run of up to 1,000 ranks."""
ROOT_SECONDS = 0.1
"""Seconds between two reads of the one agent that no other one gives hints."""
_MIN_PAUSE, _MAX_PAUSE = 0.1, 2.0
_MIN_LINKED_PAUSE, _MAX_LINKED_PAUSE = 5.0, 60.0
_MAX_TOUCH_PAUSE = 20.0
_MIN_LISTING_PAUSE = 0.2


def poll_interval(ranks: int) -> float:
    """Seconds between two reads of a process in an attempt with `ranks` ranks: of each agent without a link, and of the
    trainer's rank 0. The total rate of all processes stays below `MAX_POLLS_PER_SECOND` where the maximum pause
    allows."""
    return min(max(_MIN_PAUSE, (ranks + 1) / MAX_POLLS_PER_SECOND), _MAX_PAUSE)


def linked_poll_interval(ranks: int) -> float:
    """Most seconds between two reads of an agent that would get a hint of each change; the fewest are half of them."""
    return min(max(_MIN_LINKED_PAUSE, 2 * ranks / MAX_LINKED_POLLS_PER_SECOND), _MAX_LINKED_PAUSE)


def touch_interval(ranks: int) -> float:
    """Seconds between two touches of an agent's heartbeat file; few enough for every reader of its age
    (`pipeline.observability.run_status.SILENT_SECONDS`)."""
    return min(max(TOUCH_SECONDS, ranks / MAX_TOUCHES_PER_SECOND), _MAX_TOUCH_PAUSE)


def listing_interval(ranks: int) -> float:
    """Seconds between two listings of a folder that has a name for each rank."""
    return max(_MIN_LISTING_PAUSE, ranks / MAX_LISTINGS_PER_SECOND)


class ReadSchedule:
    """When a process reads documents of one kind again: `poll_interval(ranks)` after the last read.

    if schedule.is_due():
        schedule.begin()
        schedule.finish(len(read()))      # not after an error
    """

    def __init__(self, ranks: int, clock: Clock = CLOCK, min_seconds: float = 0.0) -> None:
        """The documents are not read more often than every `min_seconds`, unless there is a hint."""
        self._seconds, self._clock = max(poll_interval(ranks), min_seconds), clock
        self._last = float("-inf")

    def is_due(self) -> bool:
        return self._clock.now() - self._last >= self._interval()

    def begin(self) -> None:
        """Note that a read begins now."""
        self._last = self._clock.now()

    def finish(self, count: int) -> None:
        """Note that the read has succeeded, and found `count` documents."""

    def _interval(self) -> float:
        return self._seconds
