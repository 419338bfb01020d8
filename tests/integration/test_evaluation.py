"""What the trainer asks the actor to measure, and what it makes of the answers."""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DeadlineError
from pipeline.run.metrics_log import MetricSinks, read_rows
from pipeline.run.paths import AttemptPaths
from pipeline.train.loop.actor_watch import ActorReport, ActorWatch
from pipeline.train.loop.evaluations import Evaluations, Schedule, results_in
from pipeline.train.loop.group_batches import Interrupted
from pipeline.transport import Streams
from pipeline.transport.eval_records import EVALUATED, EvalRequest, EvalResult
from pipeline.transport.file_streams import FileStreams
from tests.fakes.clock import FakeClock


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as opened:
        yield opened


OWN = ""
"""The name of the run's own held-out prompts."""


class Notes(dict[tuple[str, int], Mapping[str, float]]):
    """Metrics by set and version; what is noted twice is an error."""

    def __call__(self, version: int, metrics: Mapping[str, float], eval_set: str) -> None:
        assert (eval_set, version) not in self
        self[eval_set, version] = metrics


def answer(streams: Streams, name: str, weights: int, accuracy: float = 0.5, **more: Any) -> None:
    numbers = {"prompts": 4, "version_min": weights, "version_max": weights, "seconds": 0.1}
    streams.publish("eval_results", EvalResult(id=name, policy_version=weights, accuracy=accuracy, **numbers, **more))


def evaluations(
    streams: Streams, notes: Notes, *measured: tuple[str, int], seconds: float = 5, **sets: Schedule
) -> Evaluations:
    schedules = {OWN: Schedule(25, seconds), **sets}
    return Evaluations(streams, "a-0", schedules, measured, notes, lambda: None)


def test_a_request_names_its_attempt_and_version_and_its_answer_is_noted(streams: Streams) -> None:
    notes = Notes()
    asked = evaluations(streams, notes)
    asked.request(25, [OWN])
    (request,) = [entry.record for entry in streams.scan("eval_requests", EvalRequest)]
    assert (request.id, request.policy_version) == ("a-0:25", 25)
    answer(streams, request.id, 25, accuracy=0.75)
    asked.wait()
    assert notes[OWN, 25]["eval/accuracy"] == 0.75


class Restarted(FileStreams):
    """Streams whose backend can be told to have been restarted."""

    generation = 0


def test_a_request_that_the_streams_lost_is_made_again_once(tmp_path: Path) -> None:
    paths = AttemptPaths(tmp_path, "r", "a-0")
    with Restarted(paths, 1 << 20) as streams:
        asked = evaluations(streams, Notes())
        asked.request(25, [OWN])
        (lost,) = streams.reader("eval_requests", EvalRequest, "actor").read(1, 5)
        streams.reader("eval_requests", EvalRequest, "actor").acknowledge([lost.id])
        asked.request(50, [OWN])
        for _ in range(2):
            streams.generation = 1
            asked.collect()
        assert [entry.record.policy_version for entry in streams.scan("eval_requests", EvalRequest)] == [50, 25]


def test_an_answer_of_an_earlier_attempt_is_noted_too_and_nothing_is_measured_twice(streams: Streams) -> None:
    notes = Notes()
    asked = evaluations(streams, notes, (OWN, 0))
    answer(streams, "z-0:0", 0)
    answer(streams, "z-0:25", 25)
    asked.collect()
    assert list(notes) == [(OWN, 25)]
    assert [asked.due(version) for version in (0, 25, 50)] == [[], [], [OWN]]


def test_an_answer_of_weights_that_a_restarted_trainer_took_back_is_not_noted(streams: Streams) -> None:
    notes = Notes()
    asked = evaluations(streams, notes)
    streams.publish(
        "eval_results",
        EvalResult(id="a-0:50", policy_version=50, accuracy=1, prompts=4, version_min=48, version_max=50, seconds=1),
    )
    asked.collect()
    assert (notes, asked.due(50)) == ({}, [OWN])
    asked.request(50, [OWN])
    answer(streams, "a-0:50", 50)
    asked.wait()
    assert list(notes) == [(OWN, 50)]


def test_an_open_request_is_not_wanted_again(streams: Streams) -> None:
    asked = evaluations(streams, Notes())
    asked.request(50, [OWN])
    assert asked.due(50) == []


def test_an_answer_that_does_not_come_is_missed_by_name(streams: Streams) -> None:
    asked = evaluations(streams, Notes(), seconds=0.2)
    asked.request(50, [OWN])
    with pytest.raises(DeadlineError, match="a-0:50"):
        asked.wait()


def test_a_slow_evaluation_is_waited_for_beyond_its_deadline_while_it_advances(streams: Streams) -> None:
    clock, reports, notes = FakeClock(), count(1), Notes()
    actor = ActorWatch(lambda: ActorReport(turn := float(next(reports)), "ready", {EVALUATED: turn}), clock)
    waits = 0

    def pulse() -> None:
        nonlocal waits
        waits += 1
        clock.time += 3600
        if waits == 3:
            answer(streams, "a-0:50", 50)

    asked = Evaluations(streams, "a-0", {OWN: Schedule(25, 0.1)}, (), notes, pulse, actor=actor, stall_seconds=600)
    asked.request(50, [OWN])
    asked.wait()
    assert list(notes) == [(OWN, 50)]
    assert clock.time > 2 * 3600


def test_an_evaluation_that_stands_still_is_missed_with_what_the_actor_does(streams: Streams) -> None:
    clock = FakeClock()

    def pulse() -> None:
        clock.time += 400

    actor = ActorWatch(lambda: ActorReport(clock.time, "ready", {EVALUATED: 5.0}), clock)
    asked = Evaluations(streams, "a-0", {OWN: Schedule(25, 0.1)}, (), Notes(), pulse, actor=actor, stall_seconds=600)
    asked.request(50, [OWN])
    with pytest.raises(DeadlineError, match="a-0:50; the actor runs, but its episodes do not advance"):
        asked.wait()
    assert clock.time <= 4 * 400


def test_an_ending_attempt_waits_for_no_answer(streams: Streams) -> None:
    def pulse() -> None:
        raise Interrupted("for the test")

    asked = Evaluations(streams, "a-0", {OWN: Schedule(25, 60)}, (), Notes(), pulse)
    asked.request(50, [OWN])
    with pytest.raises(Interrupted):
        asked.wait()


def test_each_set_has_its_own_turn_and_all_are_measured_at_the_end(streams: Streams) -> None:
    asked = evaluations(streams, Notes(), hard=Schedule(50, 5), ends=Schedule(0, 5))
    assert [asked.due(version) for version in (0, 25, 30, 50)] == [[OWN, "hard", "ends"], [OWN], [], [OWN, "hard"]]
    assert asked.due(60, last=True) == [OWN, "hard", "ends"]


def test_sets_are_measured_apart_and_named_in_their_numbers(streams: Streams) -> None:
    notes = Notes()
    asked = evaluations(streams, notes, hard=Schedule(25, 5))
    asked.request(25, asked.due(25))
    requests = [entry.record for entry in streams.scan("eval_requests", EvalRequest)]
    assert [(request.id, request.set) for request in requests] == [("a-0:25", OWN), ("a-0:hard:25", "hard")]
    answer(
        streams, "a-0:hard:25", 25, 0.25, set="hard", samples=4, timed_out=1, pass_at={4: 0.5}, metrics={"tools/x": 2.0}
    )
    answer(streams, "a-0:25", 25)
    asked.wait()
    assert set(notes) == {(OWN, 25), ("hard", 25)}
    hard = notes["hard", 25]
    assert (hard["eval/hard/accuracy"], hard["eval/hard/pass@4"], hard["eval/hard/tools/x"]) == (0.25, 0.5, 2.0)
    assert (hard["eval/hard/samples"], hard["eval/hard/timed_out"]) == (4, 1)
    assert "eval/accuracy" not in hard


def test_what_is_logged_of_a_set_is_not_measured_again_after_a_restart(tmp_path: Path, streams: Streams) -> None:
    with MetricSinks(tmp_path / "metrics.jsonl", "z-0") as sinks:
        sinks.log("eval", "rl", 0, {"eval/accuracy": 0.5})
        sinks.log("eval", "rl", 25, {"eval/hard/accuracy": 0.5}, eval_set="hard")
        sinks.log("train", "rl", 50, {"loss": 0.5})
    measured = results_in(read_rows(tmp_path / "metrics.jsonl"))
    assert measured == {(OWN, 0), ("hard", 25)}
    asked = evaluations(streams, Notes(), *measured, hard=Schedule(25, 5))
    assert [asked.due(version) for version in (0, 25)] == [["hard"], [OWN]]


def test_the_wait_at_the_end_is_as_long_as_all_open_sets_may_take(streams: Streams) -> None:
    asked = evaluations(streams, Notes(), seconds=0.1, hard=Schedule(0, 0.2))
    asked.request(50, [OWN, "hard"])
    with pytest.raises(DeadlineError, match=r"waited 0.3 s .* missing: a-0:50, a-0:hard:50"):
        asked.wait()
