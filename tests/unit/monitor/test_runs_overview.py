"""The lines of the table of runs: what each says, and where it has it from."""

import json
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.run.paths import SweepPaths
from pipeline.utils import shared_files
from slurm.monitor.runs_overview import Overview, RunSummary
from slurm.monitor.runs_table import (
    cells_of,
    failure_lines,
)
from slurm.registry import file_locks, run_registry, sweep_manifest
from slurm.scheduler.scheduler_protocol import JobQueue
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler
from tests.fakes.table_of_runs import make_run, make_sweep, queued


def look(output: Path, scheduler: FakeScheduler, sweep: str = "") -> dict[str, RunSummary]:
    return {line.path: line for line in Overview(output, sweep, lambda _: scheduler).look()}


def test_runs_come_first_and_then_each_sweeps_points_by_number(tmp_path: Path, scheduler: FakeScheduler) -> None:
    sweep = make_sweep(tmp_path / "a_sweep", *(f"seed={seed}" for seed in range(11)))
    for name in ("solo", "zoo", *(f"a_sweep/{point.name}" for point in sweep.points)):
        make_run(tmp_path / name)
    found = list(look(tmp_path, scheduler))
    assert found == ["solo", "zoo", *(f"a_sweep/{seed}-seed_{seed}" for seed in range(11))]
    assert list(look(tmp_path, scheduler, "a_sweep")) == found[2:]


def test_a_line_says_how_far_the_run_is(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=30)
    job = queued(run, scheduler)
    line = look(tmp_path, scheduler)["demo"]
    assert (line.job, line.scheduler, line.live) == (job, "RUNNING", True)
    assert (line.stage, line.step, line.steps, line.attempts) == ("rl", 30, 60, 1)
    assert line.reward is not None
    assert line.accuracy is not None
    assert cells_of(line)[:2] == ("demo", job)
    assert cells_of(line)[4:8] == ("30/60", f"{line.reward:.3f}", f"{line.accuracy:.3f}", "1")


def test_an_odd_row_of_metrics_stops_no_table(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "odd", steps=3)
    make_run(tmp_path / "sound", steps=3)
    row = {"kind": "train", "job": "sft", "step": 4, "time": 1.0, "steps": "many", "reward/mean": "0.5"}
    with run.paths.metrics.open("a") as file:
        file.write(f"{json.dumps(row)}\n{json.dumps(row | {'job': 'rl'})}\n{json.dumps(row | {'time': None})}\n")
    lines = look(tmp_path, scheduler)
    assert (lines["odd"].step, lines["odd"].reward) == (4, lines["sound"].reward)
    assert cells_of(lines["odd"])[5] == cells_of(lines["sound"])[5]


def test_a_waiting_job_says_why_it_waits(tmp_path: Path, scheduler: FakeScheduler) -> None:
    queued(make_run(tmp_path / "demo"), scheduler, "PENDING", "Resources")
    assert look(tmp_path, scheduler)["demo"].scheduler == "PENDING (Resources)"


def test_a_failed_run_shows_its_reason_in_one_line(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler, "FAILED")
    failure = FakeRun.attempt(run, "1-1")
    failure.meet()
    told = failure.fail("actor.0", 0).one_line()
    line = look(tmp_path, scheduler)["demo"]
    assert (line.state, line.failure, line.live, line.attempts) == ("failed", told, False, 2)
    assert failure_lines([line]) == [f"demo: {told}"]


def test_a_job_that_ended_without_a_word_is_interrupted(tmp_path: Path, scheduler: FakeScheduler) -> None:
    queued(make_run(tmp_path / "demo", steps=3), scheduler, "CANCELLED")
    line = look(tmp_path, scheduler)["demo"]
    assert (line.state, line.scheduler, line.live) == ("interrupted", "CANCELLED", False)


def test_a_point_that_was_never_submitted_says_why(tmp_path: Path, scheduler: FakeScheduler) -> None:
    sweep = make_sweep(tmp_path / "seeds", "seed=1", "seed=2")
    refused = sweep_manifest.Trial(number=1, overrides=("seed=2",), name="1-seed_2", refused="sbatch: limit reached")
    shared_files.write_document(SweepPaths(tmp_path / "seeds").manifest, sweep.noted(refused))
    lines = look(tmp_path, scheduler)
    assert [(line.state, line.live, line.failure) for line in lines.values()] == [
        ("not submitted", False, ""),
        ("not submitted", False, "sbatch: limit reached"),
    ]


def test_without_an_answer_files_stand_alone_and_nothing_is_called_dead(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    for name in ("one", "two"):
        queued(make_run(tmp_path / name, steps=3), scheduler)
    scheduler.fail("known", times=1)
    overview = Overview(tmp_path, connect=lambda _: scheduler)
    lines = overview.look()
    assert [(line.scheduler, line.live) for line in lines] == [("", None), ("", None)]
    assert overview.source.startswith("files alone; the scheduler gave no answer: known: Socket timed out")
    assert [(line.scheduler, line.live) for line in overview.look()] == [("RUNNING", True)] * 2
    assert overview.source == "the scheduler and files"


def test_a_machine_without_slurm_shows_what_the_files_say(tmp_path: Path, scheduler: FakeScheduler) -> None:
    def none(_name: str) -> JobQueue:
        raise ConfigError("cluster.scheduler", "slurm", "Slurm's commands on PATH")

    queued(make_run(tmp_path / "demo", steps=3), scheduler)
    overview = Overview(tmp_path, connect=none)
    assert [line.step for line in overview.look()] == [3]
    assert "files alone" in overview.source


def test_a_job_of_somebody_else_under_the_same_id_is_not_shown(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    run_registry.record_job(run.paths, "slurm", scheduler.submit("thesis", state="RUNNING"))
    line = look(tmp_path, scheduler)["demo"]
    assert (line.scheduler, line.live, line.state) == ("", False, "interrupted")


def test_runs_of_two_schedulers_are_asked_of_their_own_which_may_use_the_same_ids(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    other = FakeScheduler()
    run = make_run(tmp_path / "a", steps=3)
    run_registry.record_job(run.paths, "other", other.submit("a", state="PENDING"))
    assert queued(make_run(tmp_path / "b", steps=3), scheduler) == "1", "both jobs have this id"
    lines = Overview(tmp_path, connect={"other": other, "slurm": scheduler}.__getitem__).look()
    assert [(line.name, line.scheduler) for line in lines] == [("a", "PENDING"), ("b", "RUNNING")]
    assert (other.asked, scheduler.asked) == ([("1",)], [("1",)])


def test_a_local_run_asks_no_scheduler(tmp_path: Path) -> None:
    def none(_name: str) -> JobQueue:
        raise AssertionError("nobody asks")

    run = make_run(tmp_path / "demo", steps=3)
    run_registry.record_job(run.paths, "local", "1")
    with run_registry.held_by_job(run.paths):
        overview = Overview(tmp_path, connect=none)
        assert [(line.live, line.state) for line in overview.look()] == [(True, "training")]
    assert [(line.live, line.state) for line in overview.look()] == [(False, "interrupted")]
    assert overview.source == "files"


def test_the_scheduler_is_asked_once_a_look_and_not_again_about_what_ended(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    one, two, three = [queued(make_run(tmp_path / name, steps=3), scheduler) for name in ("a", "b", "c")]
    scheduler.set(one, "FAILED")
    scheduler.forget(two)
    overview = Overview(tmp_path, connect=lambda _: scheduler)
    first, second = overview.look(), overview.look()
    assert scheduler.asked == [(one, two, three), (three,)]
    assert [line.scheduler for line in first] == [line.scheduler for line in second] == ["FAILED", "", "RUNNING"]
    again = queued(FakeRun(tmp_path / "a"), scheduler)
    assert [line.scheduler for line in overview.look()] == ["RUNNING", "", "RUNNING"]
    assert scheduler.asked[-1] == (again, three)


def test_metrics_are_read_on_from_where_the_last_look_ended(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler)
    overview = Overview(tmp_path, connect=lambda _: scheduler)
    assert [line.step for line in overview.look()] == [3]
    size = run.paths.metrics.stat().st_size
    later = FakeRun.attempt(run, "1-1")
    later.train("rl", [4])
    kept = run.paths.metrics.read_bytes()
    run.paths.metrics.write_bytes(b" " * size + kept[size:])
    assert [(line.step, line.attempts) for line in overview.look()] == [(4, 2)]


def test_what_cannot_be_read_is_a_line_among_the_others(tmp_path: Path, scheduler: FakeScheduler) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "torn").paths.run.write_text("{")
    make_run(tmp_path / "no_job").paths.job.write_text("{")
    make_run(tmp_path / "mixed_up").paths.metrics.mkdir()
    sweep = SweepPaths(tmp_path / "sweep").manifest
    sweep.parent.mkdir()
    sweep.write_text("{")
    lines = look(tmp_path, scheduler)
    assert {name: line.state for name, line in lines.items()} == {
        "good": "not submitted",
        "mixed_up": "unreadable",
        "no_job": "unreadable",
        "sweep": "unreadable",
        "torn": "unreadable",
    }
    assert str(sweep) in lines["sweep"].failure
    assert any(
        "torn: name='torn': expected a run with a readable" in told for told in failure_lines(list(lines.values()))
    )


def test_a_local_run_that_is_starting_is_live(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo")
    with run.paths.lock.open("a+") as lock:
        assert file_locks.take_lock(lock.fileno(), run.paths.lock)
        assert look(tmp_path, scheduler)["demo"].live is True
    line = look(tmp_path, scheduler)["demo"]
    assert (line.live, line.state) == (False, "not submitted")


def test_a_finished_run_is_read_once(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler, "COMPLETED")
    run.finish(3)
    overview = Overview(tmp_path, connect=lambda _: scheduler)
    first = overview.look()
    run.paths.metrics.unlink()
    assert overview.look() == first
    assert (first[0].state, first[0].live, first[0].step) == ("finished", False, 3)


def test_a_finished_run_is_over_whether_the_scheduler_answers_or_not(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler, "COMPLETED")
    run.finish(3)
    scheduler.fail("known", times=1)
    assert [(line.state, line.live) for line in Overview(tmp_path, connect=lambda _: scheduler).look()] == [
        ("finished", False)
    ]
