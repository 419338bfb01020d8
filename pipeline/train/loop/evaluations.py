"""Evaluations, measured by the actor on the servers.

Owns their schedule, the requests of the trainer and the answers. Promises that an answer is logged once, at the step
whose weights were asked for, also when it comes after a restart; and that nothing is measured twice. During training
nobody waits for it: its prompts run among the rollouts, and the versions that answered are logged with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError
from pipeline.run.metrics_log import MetricRecord
from pipeline.train.loop.group_batches import Pulse
from pipeline.transport import Streams
from pipeline.transport.sample_records import EvalRequest, EvalResult
from pipeline.utils.waiting import Deadline

READ_SECONDS = 0.5
Measured = tuple[str, int]
"""The name of a set, empty for the run's own held-out prompts, and a weight version."""


@dataclass(frozen=True)
class Schedule:
    """When a set is evaluated: after each `every` steps, first and last in any case (0: only then), and for how many
    `seconds` one evaluation may go on."""

    every: int
    seconds: float

    def has(self, version: int) -> bool:
        """Whether weights `version` are to be measured, whichever are the last."""
        return version == 0 or (self.every > 0 and version % self.every == 0)


class Note(Protocol):
    """Logs the metrics of an evaluation."""

    def __call__(self, version: int, metrics: Mapping[str, float], eval_set: str) -> None: ...


def schedules_of(config: RunConfig) -> dict[str, Schedule]:
    """Of every set of a run, by name; its own held-out prompts first, with the empty name."""
    every = config.training.eval_every
    own = {"": Schedule(every, config.training.data_seconds)} if config.evaluation.own else {}
    return own | {
        name: Schedule(every if each.every is None else each.every, each.seconds)
        for name, each in config.evaluation.sets.items()
    }


def results_in(rows: Iterable[MetricRecord]) -> set[Measured]:
    """What the rows of a run's metrics tell of."""
    return {(row.get("set", ""), row["step"]) for row in rows if (row["kind"], row["job"]) == ("eval", "rl")}


class Evaluations:
    """Asks for evaluations and logs what comes back."""

    def __init__(
        self,
        streams: Streams,
        attempt: str,
        schedules: Mapping[str, Schedule],
        measured: Iterable[Measured],
        note: Note,
        pulse: Pulse,
    ) -> None:
        """`measured` is what is logged so far, `note` logs one more."""
        self._streams, self._attempt, self._schedules = streams, attempt, schedules
        self._note, self._pulse = note, pulse
        self._reader = streams.reader("eval_results", EvalResult, "trainer")
        self._open: dict[str, EvalRequest] = {}
        self._measured = set(measured)
        self._generation = streams.generation

    def due(self, version: int, *, last: bool = False) -> list[str]:
        """The sets whose turn it is with weights `version`, all with the `last`, that are not asked or measured yet."""
        turn = [name for name, schedule in self._schedules.items() if last or schedule.has(version)]
        return [
            name for name in turn if (name, version) not in self._measured and self._id(name, version) not in self._open
        ]

    def request(self, version: int, sets: Sequence[str]) -> None:
        """Ask how weights `version` do on these sets."""
        for name in sets:
            request = EvalRequest(id=self._id(name, version), policy_version=version, set=name)
            self._streams.publish("eval_requests", request)
            self._open[request.id] = request

    def collect(self, seconds: float = 0.0) -> None:
        """Log the results that have come, of earlier attempts too."""
        for entry in self._reader.read(limit=16, seconds=seconds):
            result = entry.record
            self._open.pop(result.id, None)
            if (result.set, result.policy_version) not in self._measured:
                self._measured.add((result.set, result.policy_version))
                self._note(result.policy_version, metrics_of(result), result.set)
            self._reader.acknowledge([entry.id])
        if self._generation != self._streams.generation:
            self._ask_again()

    def _ask_again(self) -> None:
        """Repeat the requests that are neither there nor answered: the streams may have lost them."""
        self._generation = self._streams.generation
        there = {entry.record.id for entry in self._streams.scan("eval_requests", EvalRequest)}
        for name in sorted(self._open.keys() - there):
            self._streams.publish("eval_requests", self._open[name])

    def wait(self) -> None:
        """Collect until nothing is open; `Interrupted` when the attempt is ending meanwhile.

        The actor evaluates one set after the other, so the deadline is the sum of theirs.
        """
        seconds = sum(self._schedules[request.set].seconds for request in self._open.values())
        deadline = Deadline("the held-out evaluation", seconds)
        while self._open:
            self.collect(READ_SECONDS)
            self._pulse()
            if deadline.passed:
                raise DeadlineError("the held-out evaluation", seconds, ", ".join(sorted(self._open)))

    def _id(self, name: str, version: int) -> str:
        return f"{self._attempt}:{name}:{version}" if name else f"{self._attempt}:{version}"


def metrics_of(result: EvalResult) -> dict[str, float]:
    """An evaluation as metrics; those of a set have its name, as `eval/<set>/accuracy`."""
    found = {
        "eval/accuracy": result.accuracy,
        "eval/error": result.error,
        "eval/prompts": float(result.prompts),
        "eval/failed": float(result.failed),
        "eval/version_min": float(result.version_min),
        "eval/version_max": float(result.version_max),
        "eval/seconds": result.seconds,
    }
    if result.set:
        found |= {"eval/samples": float(result.samples), "eval/late": float(result.timed_out)}
    found |= {f"eval/pass@{k}": share for k, share in result.pass_at.items()}
    found |= {f"eval/{name}": value for name, value in result.metrics.items()}
    prefix = f"eval/{result.set}/" if result.set else "eval/"
    return {f"{prefix}{name.removeprefix('eval/')}": value for name, value in found.items()}
