"""The table of runs: what each line says, and where it has it from."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import ConfigError, SchedulerError
from pipeline.rundir.paths import SweepPaths
from pipeline.system import files
from slurm.registry import locks, manifest, runs
from slurm.registry.manifest import SweepManifest
from slurm.scheduler.protocol import QueuedJob, Scheduler
from slurm.watch import table, view
from slurm.watch.overview import Line, Overview
from slurm.watch.table import (
    COLUMNS,
    age,
    aligned_lines,
    cells_of,
    fitting_lines,
    follow_table,
    main,
    print_table,
    render_table,
)
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler

TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 2, "warm_start": {"steps": 20}}


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


def make_run(folder: Path, steps: int = 0, job: str = "1") -> FakeRun:
    run = FakeRun(folder, make_config(name=folder.name, training=TRAINING))
    if steps:
        attempt = run.attempt(f"{job}-0")
        attempt.meet()
        attempt.all_roles("starting", "ready")
        attempt.train("rl", range(1, steps + 1), eval_every=10)
    return run


def make_sweep(folder: Path, *overrides: str) -> SweepManifest:
    sweep = manifest.extended(None, [], [[text] for text in overrides])
    files.write_document(SweepPaths(folder).manifest, sweep)
    return sweep


def queued(run: FakeRun, scheduler: FakeScheduler, state: str = "RUNNING", reason: str = "") -> str:
    job = scheduler.submit(run.root.name, state=state)
    scheduler.set(job, state, reason)
    runs.record_job(run.paths, "slurm", job)
    return job


def look(output: Path, scheduler: FakeScheduler, sweep: str = "") -> dict[str, Line]:
    return {line.path: line for line in Overview(output, sweep, lambda: scheduler).look()}


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
    assert f"demo: {told}" in shown([line])


def test_a_job_that_ended_without_a_word_is_interrupted(tmp_path: Path, scheduler: FakeScheduler) -> None:
    queued(make_run(tmp_path / "demo", steps=3), scheduler, "CANCELLED")
    line = look(tmp_path, scheduler)["demo"]
    assert (line.state, line.scheduler, line.live) == ("interrupted", "CANCELLED", False)


def test_a_point_that_was_never_submitted_says_why(tmp_path: Path, scheduler: FakeScheduler) -> None:
    sweep = make_sweep(tmp_path / "seeds", "seed=1", "seed=2")
    refused = manifest.Point(number=1, overrides=("seed=2",), name="1-seed_2", refused="sbatch: limit reached")
    files.write_document(SweepPaths(tmp_path / "seeds").manifest, sweep.noted(refused))
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
    overview = Overview(tmp_path, scheduler=lambda: scheduler)
    lines = overview.look()
    assert [(line.scheduler, line.live) for line in lines] == [("", None), ("", None)]
    assert overview.source.startswith("files alone; the scheduler gave no answer: known: Socket timed out")
    assert [(line.scheduler, line.live) for line in overview.look()] == [("RUNNING", True)] * 2
    assert overview.source == "the scheduler and files"


def test_a_machine_without_slurm_shows_what_the_files_say(tmp_path: Path, scheduler: FakeScheduler) -> None:
    def none() -> Scheduler:
        raise ConfigError("cluster.kind", "slurm", "Slurm's commands on PATH")

    queued(make_run(tmp_path / "demo", steps=3), scheduler)
    overview = Overview(tmp_path, scheduler=none)
    assert [line.step for line in overview.look()] == [3]
    assert "files alone" in overview.source


def test_a_job_of_somebody_else_under_the_same_id_is_not_shown(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    runs.record_job(run.paths, "slurm", scheduler.submit("thesis", state="RUNNING"))
    line = look(tmp_path, scheduler)["demo"]
    assert (line.scheduler, line.live, line.state) == ("", False, "interrupted")


def test_a_local_run_asks_no_scheduler(tmp_path: Path) -> None:
    def none() -> Scheduler:
        raise AssertionError("nobody asks")

    run = make_run(tmp_path / "demo", steps=3)
    runs.record_job(run.paths, "local", "1")
    with runs.held_by_job(run.paths):
        overview = Overview(tmp_path, scheduler=none)
        assert [(line.live, line.state) for line in overview.look()] == [(True, "training")]
    assert [(line.live, line.state) for line in overview.look()] == [(False, "interrupted")]
    assert overview.source == "files"


def test_the_scheduler_is_asked_once_a_look_and_not_again_about_what_ended(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    one, two, three = [queued(make_run(tmp_path / name, steps=3), scheduler) for name in ("a", "b", "c")]
    scheduler.set(one, "FAILED")
    scheduler.forget(two)
    overview = Overview(tmp_path, scheduler=lambda: scheduler)
    first, second = overview.look(), overview.look()
    assert scheduler.asked == [(one, two, three), (three,)]
    assert [line.scheduler for line in first] == [line.scheduler for line in second] == ["FAILED", "", "RUNNING"]
    again = queued(FakeRun(tmp_path / "a"), scheduler)
    assert [line.scheduler for line in overview.look()] == ["RUNNING", "", "RUNNING"]
    assert scheduler.asked[-1] == (again, three)


def test_metrics_are_read_on_from_where_the_last_look_ended(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler)
    overview = Overview(tmp_path, scheduler=lambda: scheduler)
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
    assert "torn: name='torn': expected a run with a readable" in shown(list(lines.values()))


def test_a_local_run_that_is_starting_is_live(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo")
    with run.paths.lock.open("a+") as lock:
        assert locks.take_lock(lock.fileno(), run.paths.lock)
        assert look(tmp_path, scheduler)["demo"].live is True
    line = look(tmp_path, scheduler)["demo"]
    assert (line.live, line.state) == (False, "not submitted")


def test_a_finished_run_is_read_once(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler, "COMPLETED")
    run.finish(3)
    overview = Overview(tmp_path, scheduler=lambda: scheduler)
    first = overview.look()
    run.paths.metrics.unlink()
    assert overview.look() == first
    assert (first[0].state, first[0].live, first[0].step) == ("finished", False, 3)


def test_a_finished_run_is_over_whether_the_scheduler_answers_or_not(tmp_path: Path, scheduler: FakeScheduler) -> None:
    run = make_run(tmp_path / "demo", steps=3)
    queued(run, scheduler, "COMPLETED")
    run.finish(3)
    scheduler.fail("known", times=1)
    assert [(line.state, line.live) for line in Overview(tmp_path, scheduler=lambda: scheduler).look()] == [
        ("finished", False)
    ]


def shown(lines: list[Line], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(lines, "files", console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_plain_columns_are_aligned_and_carry_no_control_codes() -> None:
    lines = [Line("", "demo", "12", "RUNNING", "training", True, "rl", 3, 60, 0.5), Line("seeds", "0-seed_1")]
    header, one, other = aligned_lines(lines)
    assert header.split() == list(COLUMNS)
    assert [text.index(word) for text, word in ((header, "state"), (one, "training"), (other, "not"))] == [
        header.index("state")
    ] * 3
    assert "\x1b" not in shown(lines)
    assert shown(lines).endswith("1 training, 1 not submitted (from files)\n")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_narrow_terminal_keeps_the_numbers(width: int) -> None:
    line = Line("seeds", "0-a_rather_long_name_of_a_point", "12", "PENDING (Resources)", "training", True, "rl", 3, 60)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render_table([line], "files", width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/60" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_low_terminal_shows_first_what_is_not_over_and_then_what_failed() -> None:
    states = {3: "training", 5: "failed", 8: "queued"}
    lines = [
        Line("seeds", f"{number}-seed", state=states.get(number, "finished"), live=number in (3, 8))
        for number in range(10)
    ]
    assert [line.name for line in fitting_lines(lines, 5)] == ["3-seed", "8-seed", "5-seed", "0-seed"]
    assert fitting_lines(lines, 11) == lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 12)])
def test_a_followed_table_fits_its_terminal(width: int, height: int) -> None:
    lines = [
        Line(
            sweep="a_sweep_with_a_long_name",
            name=f"{number}-optim.lr_0.0001-loss_grpo-temperature_0.7-model_an_instruct",
            job=str(123456 + number),
            scheduler="PENDING (QOSMaxJobsPerUserLimit)" if number > 30 else "RUNNING",
            state="failed" if number % 3 == 0 else "training",
            live=number % 3 != 0,
            step=number,
            steps=400,
            failure="actor.0 on rank 0: killed by SIGKILL " * 5 if number % 3 == 0 else "",
        )
        for number in range(50)
    ]
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(
        render_table(lines, "files alone; the scheduler gave no answer: " + "squeue " * 30, width, height - 1)
    )
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(shown) <= height - 1
    assert max(map(len, shown)) <= width
    text = "\n".join(shown)
    assert "1-optim.lr" in text
    assert "1/400" in text
    assert "and 14 more\n" in text
    assert "more runs" in text


def test_following_tells_every_change_once_and_ends_with_the_last_job(tmp_path: Path, scheduler: FakeScheduler) -> None:
    one, other = make_run(tmp_path / "one", steps=3), make_run(tmp_path / "two", steps=3, job="2")
    jobs = [queued(run, scheduler) for run in (one, other)]

    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                one.finish(3)
                scheduler.set(jobs[0], "COMPLETED")
            if len(self.slept) == 5:
                scheduler.set(jobs[1], "CANCELLED")

    console = Console(file=io.StringIO(), width=200)
    clock = Clock()
    lines = follow_table(Overview(tmp_path, scheduler=lambda: scheduler), console, clock)
    assert [line.state for line in lines] == ["finished", "interrupted"]
    assert len(clock.slept) == 5
    told = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told[:4] == ["one: training", "two: training", "one: finished", "two: interrupted"]


def test_a_sweep_is_watched_as_long_as_a_launcher_is_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its points no job is live."""
    paths = SweepPaths(tmp_path / "lr")
    make_sweep(paths.root, "seed=1")
    monkeypatch.setattr(locks, "is_held", lambda path: path == paths.lock and len(clock.slept) < 3)
    clock = FakeClock()
    assert table.watch_sweep([f"sweep={paths.root}"], clock) == 1
    assert len(clock.slept) == 3


def test_following_waits_while_the_scheduler_is_silent(tmp_path: Path) -> None:
    class Silent(FakeScheduler):
        """Answers once, is silent three times, and then knows that the job ended."""

        questions = 0

        def known(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
            self.questions += 1
            if 2 <= self.questions <= 4:
                raise SchedulerError("squeue: no answer")
            if self.questions == 5:
                self.set(ids[0], "CANCELLED")
            return super().known(ids)

    silent, clock = Silent(), FakeClock()
    queued(make_run(tmp_path / "demo", steps=3), silent)
    lines = follow_table(Overview(tmp_path, scheduler=lambda: silent), Console(file=io.StringIO()), clock)
    assert [line.live for line in lines] == [False]
    assert (silent.questions, len(clock.slept)) == (5, 4)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "—"), (-3, "0 s"), (0, "0 s"), (119, "119 s"), (600, "10 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_ages_are_rounded_to_what_matters(seconds: float | None, said: str) -> None:
    assert age(seconds) == said


def test_the_command_prints_json_that_machines_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "demo", steps=3)
    assert main([f"output={tmp_path}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["source"], [(run["name"], run["step"]) for run in document["runs"]]) == ("files", [("demo", 3)])


def test_a_sweep_is_named_or_given_as_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path / "seeds", "seed=1")
    make_run(tmp_path / "demo")
    for arguments in ([f"output={tmp_path}", "sweep=seeds"], [f"sweep={tmp_path / 'seeds'}"]):
        assert main(arguments) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "seeds/0-seed_1", "1"]


def test_a_sweep_is_looked_for_only_in_the_output_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_sweep(tmp_path / "runs" / "lr", "seed=1")
    (tmp_path / "other").mkdir()
    assert main(["sweep=lr"]) == 0
    assert main(["output=other", "sweep=lr"]) == 2
    assert "expected a sweep below other/" in capsys.readouterr().err


def test_a_sweep_is_watched_by_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = make_sweep(tmp_path / "runs" / "lr", "seed=1", "seed=2")
    points = [make_run(tmp_path / "runs" / "lr" / point.name, steps=3) for point in sweep.points]
    points[0].finish(3)
    assert view.main(["sweep=lr"]) == 1
    points[1].finish(3)
    assert view.main(["sweep=lr"]) == 0
    assert "2 finished" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["sweep=none"], ["output=/no/such/folder"], ["demo"], ["--jsn"], ["sweep="]])
def test_a_wrong_argument_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
