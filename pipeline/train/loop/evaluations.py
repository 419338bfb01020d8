"""Evaluations, run by the actor on the servers.

Owns their schedule, the trainer's requests and the results. Promises that a result is logged once, at the step of the
requested weights, also after a restart; and that no evaluation is repeated. Training does not wait for an evaluation:
its prompts run among the rollouts, and the result has the policy versions that sampled it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError
from pipeline.run.metric_names import below_task
from pipeline.run.metrics_log import MetricRecord
from pipeline.train.loop.actor_watch import ActorWatch
from pipeline.train.loop.group_batches import Pulse
from pipeline.transport import Streams
from pipeline.transport.eval_records import EvalRequest, EvalResult
from pipeline.utils.waiting import Deadline

READ_SECONDS = 0.5
Measured = tuple[str, int]
"""The name of an evaluation set, empty for the run's default set, and a policy version."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of an evaluation set.

    Attributes:
        every: interval in steps; the first and last version are always evaluated (0: only these).
        seconds: time limit of one evaluation; of the default set, the time without progress that ends it.
    """

    every: int
    seconds: float

    def has(self, version: int) -> bool:
        """Whether `version` is due, apart from the last one."""
        return version == 0 or (self.every > 0 and version % self.every == 0)


class Note(Protocol):
    """Logs the metrics of an evaluation."""

    def __call__(self, version: int, metrics: Mapping[str, float], eval_set: str) -> None: ...


def schedules_of(config: RunConfig) -> dict[str, Schedule]:
    """The schedules of a run's evaluation sets by name; the default set comes first, with the empty name."""
    every = config.training.eval_every
    own = {"": Schedule(every, config.training.data_seconds)} if config.evaluation.builtin_set else {}
    return own | {
        name: Schedule(every if eval_set.every is None else eval_set.every, eval_set.seconds)
        for name, eval_set in config.evaluation.sets.items()
    }


def results_in(rows: Iterable[MetricRecord]) -> set[Measured]:
    """The evaluations in the metric records of a run."""
    return {(row.get("set", ""), row["step"]) for row in rows if (row["kind"], row["job"]) == ("eval", "rl")}


class Evaluations:
    """Requests evaluations and logs their results."""

    def __init__(
        self,
        streams: Streams,
        attempt: str,
        schedules: Mapping[str, Schedule],
        measured: Iterable[Measured],
        note: Note,
        pulse: Pulse,
        on_request: Callable[[int], None] = lambda version: None,
        actor: ActorWatch | None = None,
        stall_seconds: float = 0.0,
    ) -> None:
        """`measured` are the evaluations that are already logged; `note` logs a new one. `on_request` is called with
        the version of sets that were requested. `wait` lasts beyond the deadlines of the sets while the `actor` has
        stood still for less than `stall_seconds`."""
        self._on_request = on_request
        self._actor, self._stall_seconds = actor or ActorWatch(), stall_seconds
        self._streams, self._attempt, self._schedules = streams, attempt, schedules
        self._note, self._pulse = note, pulse
        self._reader = streams.reader("eval_results", EvalResult, "trainer")
        self._open: dict[str, EvalRequest] = {}
        self._measured = set(measured)
        self._generation = streams.generation

    def due(self, version: int, *, last: bool = False) -> list[str]:
        """The sets that are due at `version` (all, if it is the `last`) and not requested or measured yet."""
        scheduled = [name for name, schedule in self._schedules.items() if last or schedule.has(version)]
        return [
            name
            for name in scheduled
            if (name, version) not in self._measured and self._id(name, version) not in self._open
        ]

    def request(self, version: int, sets: Sequence[str]) -> None:
        """Request evaluations of policy version `version` on these sets."""
        for name in sets:
            request = EvalRequest(id=self._id(name, version), policy_version=version, set=name)
            self._streams.publish("eval_requests", request)
            self._open[request.id] = request
        if sets:
            self._on_request(version)

    def is_open(self, version: int) -> bool:
        """Whether a result for `version` that this attempt requested is missing."""
        return any(request.policy_version == version for request in self._open.values())

    def collect(self, seconds: float = 0.0) -> None:
        """Log the results that have arrived, including those of earlier attempts' requests."""
        for entry in self._reader.read(limit=16, seconds=seconds):
            result = entry.record
            if 0 <= result.version_min < result.policy_version:
                # Meanwhile the trainer was restarted, and the servers got the weights of an earlier step.
                self._reader.acknowledge([entry.id])
                continue
            self._open.pop(result.id, None)
            if (result.set, result.policy_version) not in self._measured:
                self._measured.add((result.set, result.policy_version))
                self._note(result.policy_version, metrics_of(result), result.set)
            self._reader.acknowledge([entry.id])
        if self._generation != self._streams.generation:
            self._request_again()

    def _request_again(self) -> None:
        """Repeat the open requests that are not in the stream: a restart of the backend may have lost them."""
        self._generation = self._streams.generation
        present = {entry.record.id for entry in self._streams.scan("eval_requests", EvalRequest)}
        for name in sorted(self._open.keys() - present):
            self._streams.publish("eval_requests", self._open[name])

    def wait(self) -> None:
        """Collect until no request is open; `Interrupted` if the attempt is ending meanwhile.

        `DeadlineError` if results are missing after the deadlines of their sets, and the actor stands still.
        """
        # The actor evaluates one set after the other, so the deadline is the sum of theirs.
        seconds = sum(self._schedules[request.set].seconds for request in self._open.values())
        deadline = Deadline("the held-out evaluation", seconds)
        self._actor.begin()
        while self._open:
            missing = len(self._open)
            self.collect(READ_SECONDS)
            self._pulse()
            if len(self._open) < missing:
                self._actor.arrived()
            stalled = self._actor.stalled_seconds()
            if deadline.passed and stalled > self._stall_seconds:
                names = ", ".join(sorted(self._open))
                raise DeadlineError("the held-out evaluation", seconds, f"{names}; {self._actor.describe()}")

    def _id(self, name: str, version: int) -> str:
        return f"{self._attempt}:{name}:{version}" if name else f"{self._attempt}:{version}"


def metrics_of(result: EvalResult) -> dict[str, float]:
    """An evaluation as metrics; names of a set contain its name, such as `eval/<set>/accuracy`.

    `accuracy` and `stderr` are missing where the result has none. Those of a task of a mix have its label after the
    set: `eval/<label>/accuracy`, `eval/<set>/<label>/accuracy`.
    """
    measured = {"eval/accuracy": result.accuracy, "eval/stderr": result.error}
    metrics = {f"eval/{name}": value for name, value in below_task(result.metrics, result.parts).items()}
    metrics |= {name: value for name, value in measured.items() if value is not None} | {
        "eval/prompts": float(result.prompts),
        "eval/failed": float(result.failed),
        "eval/version_min": float(result.version_min),
        "eval/version_max": float(result.version_max),
        "eval/seconds": result.seconds,
    }
    if result.set:
        metrics |= {"eval/samples": float(result.samples), "eval/timed_out": float(result.timed_out)}
    metrics |= {f"eval/pass@{k}": share for k, share in result.pass_at.items()}
    for label, part in result.parts.items():
        own = {"accuracy": part.accuracy, "stderr": part.error, "prompts": part.prompts, "failed": part.failed}
        metrics |= {f"eval/{label}/{name}": float(value) for name, value in own.items() if value is not None}
    prefix = f"eval/{result.set}/" if result.set else "eval/"
    return {f"{prefix}{name.removeprefix('eval/')}": value for name, value in metrics.items()}
