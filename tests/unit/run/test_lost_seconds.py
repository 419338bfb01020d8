"""The division of a run's wall time into useful seconds and causes, on stories whose seconds add up by hand."""

import re
from pathlib import Path

import pytest

from pipeline.run.lost_seconds import CAUSES, AttemptTimes, Goodput, StepTime, goodput
from pipeline.run.transitions import Transition


def line(time: float, role: str, state: str, detail: str = "") -> Transition:
    return Transition(time=time, role=role, rank=0, state=state, detail=detail)


def steps(attempt: str, *times: float, dropped: bool = False) -> list[StepTime]:
    return [StepTime(time, "rl", attempt, dropped, seconds=9.0) for time in times]


def first_step(attempt: str, time: float, *, dropped: bool = False) -> StepTime:
    """Of the 30 seconds before it: 10 of the restore, 8 of the servers, 7 of the batch, and 5 of its training."""
    return StepTime(time, "rl", attempt, dropped, seconds=12.0, data=7.0, begin=8.0, restore=10.0)


def attempt(name: str, began: float, *more: Transition, stop: float | None = None) -> AttemptTimes:
    """An attempt whose agent needs 2 seconds, whose ranks meet within 1 second, and whose server is up after 16."""
    start = [line(began + 3, "trainer.0", "starting"), line(began + 3, "inference.0", "starting")]
    lines = (*start, line(began + 16, "inference.0", "ready"), *more)
    ordered = tuple(sorted(lines, key=lambda transition: transition.time))
    return AttemptTimes(name, began, began + 2, ordered, ((stop, "draining: TERM"),) if stop is not None else ())


def lost(measured: Goodput | None) -> dict[str, float]:
    """The causes that lost time. Checks the invariant."""
    assert measured is not None
    assert tuple(measured.seconds) == CAUSES
    assert measured.wall == pytest.approx(measured.useful + sum(measured.seconds.values()))
    return {cause: round(seconds, 6) for cause, seconds in measured.seconds.items() if seconds}


START = {"agent": 2.0, "rendezvous": 1.0, "trainer": 1.0, "restore": 10.0, "servers": 2.0, "weights": 6.0, "batch": 7.0}
"""The lost seconds of an attempt that begins 34 seconds before the end of its first step."""


def test_without_a_fault_only_the_start_and_the_end_are_lost() -> None:
    story = [attempt("1-0", 0, line(60, "trainer.0", "stopped"))]
    measured = goodput(story, [first_step("1-0", 34), *steps("1-0", 44, 54)])
    assert lost(measured) == START | {"other": 6.0}
    assert measured is not None
    assert (measured.wall, measured.useful, measured.restarts, measured.outages) == (60, 25, 0, ())
    assert (measured.start.resumed, sum(measured.start.seconds.values())) == (34, 29)


def test_a_killed_trainer_loses_the_cut_step_and_those_since_its_checkpoint() -> None:
    killed = [
        line(58, "trainer.0", "fault", "kill:trainer@58s"),
        line(59, "trainer.0", "restarting", "killed by SIGKILL"),
        line(60, "trainer.0", "starting"),
        line(62, "trainer.0", "ready"),
    ]
    trained = [first_step("1-0", 34), *steps("1-0", 44), *steps("1-0", 54, dropped=True), first_step("1-0", 100)]
    measured = goodput([attempt("1-0", 0, *killed)], trained)
    assert measured is not None
    (outage,) = measured.outages
    # The new process is ready to load at 70: 100, less 12 for the step, 8 for the servers and 10 for the restore.
    assert outage.seconds == {"detection": 1, "requeue": 1, "trainer": 10, "restore": 10, "weights": 8, "batch": 7} | {
        "retrained": 14
    }
    assert (outage.what, outage.time, outage.gap) == ("kill:trainer@58s", 58, 42)
    assert measured.restarts == 1
    assert lost(measured)["retrained"] == 14
    assert measured.useful == 5 + 10 + 5


def test_a_requeued_attempt_counts_from_its_last_step_to_the_next() -> None:
    first = attempt("1-0", 0, line(66, "redis.0", "stopped"), stop=50)
    trained = [first_step("1-0", 34), *steps("1-0", 44, 54), first_step("1-1", 110), *steps("1-1", 120)]
    measured = goodput([first, attempt("1-1", 76)], trained)
    assert measured is not None
    (outage,) = measured.outages
    # The step that was under way at the stop request ends at 54, and counts.
    assert outage.seconds == {"shutdown": 12.0, "requeue": 10.0, **START}
    assert (outage.what, outage.time, outage.gap) == ("draining: TERM", 50, 60)
    assert lost(measured)["requeue"] == 10
    assert measured.restarts == 1


def test_an_attempt_that_was_killed_without_a_record_loses_its_cut_step() -> None:
    first = attempt("1-0", 0, line(50, "actor.0", "ready"))
    measured = goodput([first, attempt("1-1", 76)], [first_step("1-0", 34), *steps("1-0", 44), first_step("1-1", 110)])
    assert measured is not None
    (outage,) = measured.outages
    assert outage.what == "attempt 1-0 ended"
    assert outage.seconds == {"retrained": 6, "requeue": 26, **START}
    assert lost(measured) == {
        cause: seconds * (2 if cause in START else 1) for cause, seconds in outage.seconds.items()
    }


def test_two_faults_before_a_step_are_two_outages() -> None:
    first = attempt("1-0", 0, line(60, "redis.0", "stopped"), stop=54)
    second = attempt("1-1", 70, line(90, "trainer.0", "fault", "kill:trainer@17s"), line(92, "trainer.0", "failed"))
    third = attempt("1-2", 100)
    measured = goodput([first, second, third], [first_step("1-0", 34), *steps("1-0", 54), first_step("1-2", 134)])
    assert measured is not None
    stopped, killed = measured.outages
    assert stopped.seconds == {"shutdown": 6, "requeue": 10, "agent": 2, "rendezvous": 1, "trainer": 17}
    assert killed.seconds == {"detection": 2, "requeue": 8, **START}
    assert (stopped.gap, killed.gap) == (None, 44)
    assert lost(measured)["agent"] == 6


def test_a_fault_after_the_last_step_has_no_next_step() -> None:
    ended = [line(50, "trainer.0", "fault", "kill:trainer@end"), line(51, "trainer.0", "restarting", "SIGKILL")]
    ended += [line(52, "trainer.0", "starting"), line(70, "trainer.0", "stopped")]
    measured = goodput([attempt("1-0", 0, *ended)], [first_step("1-0", 34), *steps("1-0", 44)])
    assert measured is not None
    (outage,) = measured.outages
    assert outage.seconds == {"retrained": 6, "detection": 1, "requeue": 1, "trainer": 18}
    assert outage.gap is None
    assert measured.useful == 15
    lost(measured)


def test_a_server_that_is_away_loses_the_seconds_of_steps_beyond_the_median() -> None:
    away = [
        line(70, "inference.0", "fault", "kill:inference@every=30s"),
        line(70, "inference.0", "restarting", "SIGKILL"),
        line(71, "inference.0", "starting"),
        line(80, "inference.0", "ready"),
    ]
    trained = [first_step("1-0", 34), *steps("1-0", 44, 54, 64, 74, 87, 97)]
    measured = goodput([attempt("1-0", 0, *away)], trained)
    assert measured is not None
    (outage,) = measured.outages
    assert outage.seconds == {"servers": 3}
    assert (outage.what, outage.gap) == ("kill:inference@every=30s", 4)
    assert lost(measured) == START | {"servers": START["servers"] + 3}


def test_the_change_from_sft_to_rl_waits_for_servers_in_one_process() -> None:
    sft = StepTime(20.0, "sft", "1-0", seconds=1.0, begin=0.0, restore=10.0)
    rl = StepTime(50.0, "rl", "1-0", seconds=12.0, data=7.0, begin=8.0)
    measured = goodput([attempt("1-0", 0)], [sft, rl])
    assert lost(measured) == {"agent": 2, "rendezvous": 1, "trainer": 6, "restore": 10, "weights": 8, "batch": 7} | {
        "other": 10
    }
    assert measured is not None
    assert measured.useful == 1 + 5


def test_a_run_without_steps_is_all_start() -> None:
    assert goodput([], []) is None
    measured = goodput([attempt("1-0", 0)], [], until=20)
    assert lost(measured) == {"agent": 2, "rendezvous": 1, "trainer": 17}
    assert measured is not None
    assert (measured.ratio, measured.start.gap) == (0.0, None)


def test_the_page_has_every_cause() -> None:
    page = (Path(__file__).parents[3] / "docs" / "goodput.md").read_text()
    assert tuple(re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE)) == CAUSES


def test_an_attempt_whose_machines_are_gone_ended_at_its_last_step() -> None:
    measured = goodput([attempt("1-0", 0), attempt("1-1", 76)], [*steps("1-0", 34, 44), first_step("1-1", 110)])
    assert measured is not None
    (outage,) = measured.outages
    assert (outage.what, outage.time) == ("attempt 1-0 ended", 44)
    assert outage.seconds == {"requeue": 32, **START}


def test_a_fault_of_another_role_after_the_last_step_interrupts_no_trainer_that_goes_on() -> None:
    away = [
        line(50, "actor.0", "fault", "kill:actor@end"),
        line(51, "actor.0", "restarting"),
        line(60, "actor.0", "ready"),
    ]
    trained = [first_step("1-0", 34), *steps("1-0", 44)]
    measured = goodput([attempt("1-0", 0, *away)], trained)
    assert lost(measured) == START | {"other": 16}
    assert measured is not None
    assert measured.outages == ()
    ended = attempt("1-0", 0, *away[:1], line(51, "actor.0", "failed"), line(60, "redis.0", "stopped"), stop=52)
    measured = goodput([ended], trained)
    assert lost(measured) == START | {"retrained": 6, "detection": 1, "shutdown": 9}
