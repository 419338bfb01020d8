"""What the trainer asks the actor to measure, and what it makes of the answers."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.errors import DeadlineError
from pipeline.groups.records import EvalRequest, EvalResult
from pipeline.rundir.paths import AttemptPaths
from pipeline.streams import Streams
from pipeline.streams.files import FileStreams
from pipeline.training.batches import Interrupted
from pipeline.training.evaluation import Evaluations


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as opened:
        yield opened


class Notes(dict[int, Mapping[str, float]]):
    """Metrics by version; a version that is noted twice is an error."""

    def __call__(self, version: int, metrics: Mapping[str, float]) -> None:
        assert version not in self
        self[version] = metrics


def answer(streams: Streams, name: str, weights: int, accuracy: float = 0.5) -> None:
    result = EvalResult(
        id=name, weights=weights, accuracy=accuracy, prompts=4, version_min=weights, version_max=weights, seconds=0.1
    )
    streams.publish("eval_results", result)


def evaluations(streams: Streams, notes: Notes, *measured: int, seconds: float = 5) -> Evaluations:
    return Evaluations(streams, "a-0", seconds, measured, notes, lambda: None)


def test_a_request_names_its_attempt_and_version_and_its_answer_is_noted(streams: Streams) -> None:
    notes = Notes()
    asked = evaluations(streams, notes)
    asked.request(25)
    (request,) = [entry.record for entry in streams.scan("eval_requests", EvalRequest)]
    assert (request.id, request.weights) == ("a-0:25", 25)
    answer(streams, request.id, 25, accuracy=0.75)
    asked.wait()
    assert notes[25]["eval/accuracy"] == 0.75


class Restarted(FileStreams):
    """Streams whose backend can be told to have been restarted."""

    generation = 0


def test_a_request_that_the_streams_lost_is_made_again_once(tmp_path: Path) -> None:
    paths = AttemptPaths(tmp_path, "r", "a-0")
    with Restarted(paths, 1 << 20) as streams:
        asked = evaluations(streams, Notes())
        asked.request(25)
        (lost,) = streams.reader("eval_requests", EvalRequest, "actor").read(1, 5)
        streams.reader("eval_requests", EvalRequest, "actor").acknowledge([lost.id])
        asked.request(50)
        for _ in range(2):
            streams.generation = 1
            asked.collect()
        assert [entry.record.weights for entry in streams.scan("eval_requests", EvalRequest)] == [50, 25]


def test_an_answer_of_an_earlier_attempt_is_noted_too_and_nothing_is_measured_twice(streams: Streams) -> None:
    notes = Notes()
    asked = evaluations(streams, notes, 0)
    answer(streams, "z-0:0", 0)
    answer(streams, "z-0:25", 25)
    asked.collect()
    assert list(notes) == [25]
    assert [asked.wants(version) for version in (0, 25, 50)] == [False, False, True]


def test_an_open_request_is_not_wanted_again(streams: Streams) -> None:
    asked = evaluations(streams, Notes())
    asked.request(50)
    assert not asked.wants(50)


def test_an_answer_that_does_not_come_is_missed_by_name(streams: Streams) -> None:
    asked = evaluations(streams, Notes(), seconds=0.2)
    asked.request(50)
    with pytest.raises(DeadlineError, match="a-0:50"):
        asked.wait()


def test_an_ending_attempt_waits_for_no_answer(streams: Streams) -> None:
    def pulse() -> None:
        raise Interrupted("for the test")

    asked = Evaluations(streams, "a-0", 60, (), Notes(), pulse)
    asked.request(50)
    with pytest.raises(Interrupted):
        asked.wait()
