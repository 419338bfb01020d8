"""Held-out accuracy, measured by the actor on the servers.

Owns the requests of the trainer and their answers. Promises that an answer is logged once, at the step whose weights
were asked for, also when it comes after a restart; and that nothing is measured twice. During training nobody waits for
it: its prompts run among the rollouts, and the versions that answered are logged with it.
"""

from collections.abc import Callable, Iterable, Mapping

from pipeline.errors import DeadlineError
from pipeline.groups.records import EvalRequest, EvalResult
from pipeline.streams import Streams
from pipeline.system.waiting import Deadline
from pipeline.training.batches import Pulse

READ_SECONDS = 0.5


class Evaluations:
    """Asks for evaluations and logs what comes back."""

    def __init__(
        self,
        streams: Streams,
        attempt: str,
        seconds: float,
        measured: Iterable[int],
        note: Callable[[int, Mapping[str, float]], None],
        pulse: Pulse,
    ) -> None:
        """`measured` are the versions logged so far; `note(version, metrics)` logs one; `seconds` bounds a wait."""
        self._streams, self._attempt, self._seconds = streams, attempt, seconds
        self._note, self._pulse = note, pulse
        self._reader = streams.reader("eval_results", EvalResult, "trainer")
        self._open: set[str] = set()
        self._measured = set(measured)
        self._generation = streams.generation

    def wants(self, version: int) -> bool:
        """Whether weights `version` are neither measured nor asked for."""
        return version not in self._measured and self._name(version) not in self._open

    def request(self, version: int) -> None:
        """Ask for the accuracy of weights `version`."""
        self._streams.publish("eval_requests", EvalRequest(id=self._name(version), weights=version))
        self._open.add(self._name(version))

    def collect(self, seconds: float = 0.0) -> None:
        """Log the results that have come, of earlier attempts too."""
        for entry in self._reader.read(limit=16, seconds=seconds):
            result = entry.record
            self._open.discard(result.id)
            if result.weights not in self._measured:
                self._measured.add(result.weights)
                self._note(result.weights, metrics_of(result))
            self._reader.acknowledge([entry.id])
        if self._generation != self._streams.generation:
            self._ask_again()

    def _ask_again(self) -> None:
        """Repeat the requests that are neither there nor answered: the streams may have lost them."""
        self._generation = self._streams.generation
        there = {entry.record.id for entry in self._streams.scan("eval_requests", EvalRequest)}
        for name in sorted(self._open - there):
            self._streams.publish("eval_requests", EvalRequest(id=name, weights=int(name.rpartition(":")[2])))

    def wait(self) -> None:
        """Collect until nothing is open; `Interrupted` when the attempt is ending meanwhile."""
        deadline = Deadline("the held-out evaluation", self._seconds)
        while self._open:
            self.collect(READ_SECONDS)
            self._pulse()
            if deadline.passed:
                raise DeadlineError("the held-out evaluation", self._seconds, ", ".join(sorted(self._open)))

    def _name(self, version: int) -> str:
        return f"{self._attempt}:{version}"


def metrics_of(result: EvalResult) -> dict[str, float]:
    """An evaluation as metrics."""
    return {
        "eval/accuracy": result.accuracy,
        "eval/prompts": float(result.prompts),
        "eval/failed": float(result.failed),
        "eval/version_min": float(result.version_min),
        "eval/version_max": float(result.version_max),
        "eval/seconds": result.seconds,
    } | {f"eval/{name}": value for name, value in result.metrics.items()}
