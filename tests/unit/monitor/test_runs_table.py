"""The table of runs: how its lines are shown, followed and printed."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import SchedulerError
from pipeline.run.paths import SweepPaths
from slurm.monitor import live_view, runs_table
from slurm.monitor.runs_overview import Overview, RunSummary
from slurm.monitor.runs_table import (
    COLUMNS,
    age,
    aligned_lines,
    follow_table,
    lines_that_fit,
    main,
    print_table,
    render_table,
)
from slurm.registry import file_locks
from slurm.scheduler.scheduler_protocol import QueuedJob
from tests.fakes.clock import FakeClock
from tests.fakes.scheduler import FakeScheduler
from tests.fakes.table_of_runs import make_run, make_sweep, queued


def shown(lines: list[RunSummary], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(lines, "files", console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_plain_columns_are_aligned_and_carry_no_control_codes() -> None:
    lines = [
        RunSummary("", "demo", "12", "RUNNING", "training", True, "rl", 3, 60, 0.5),
        RunSummary("seeds", "0-seed_1"),
    ]
    header, one, other = aligned_lines(lines)
    assert header.split() == list(COLUMNS)
    assert [text.index(word) for text, word in ((header, "state"), (one, "training"), (other, "not"))] == [
        header.index("state")
    ] * 3
    assert "\x1b" not in shown(lines)
    assert shown(lines).endswith("1 training, 1 not submitted (from files)\n")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_narrow_terminal_keeps_the_numbers(width: int) -> None:
    line = RunSummary(
        "seeds", "0-a_rather_long_name_of_a_point", "12", "PENDING (Resources)", "training", True, "rl", 3, 60
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render_table([line], "files", width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/60" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_low_terminal_shows_first_what_is_not_over_and_then_what_failed() -> None:
    states = {3: "training", 5: "failed", 8: "queued"}
    lines = [
        RunSummary("seeds", f"{number}-seed", state=states.get(number, "finished"), live=number in (3, 8))
        for number in range(10)
    ]
    assert [line.name for line in lines_that_fit(lines, 5)] == ["3-seed", "8-seed", "5-seed", "0-seed"]
    assert lines_that_fit(lines, 11) == lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 12)])
def test_a_followed_table_fits_its_terminal(width: int, height: int) -> None:
    lines = [
        RunSummary(
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
    lines = follow_table(Overview(tmp_path, connect=lambda _: scheduler), console, clock)
    assert [line.state for line in lines] == ["finished", "interrupted"]
    assert len(clock.slept) == 5
    told = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told[:4] == ["one: training", "two: training", "one: finished", "two: interrupted"]


def test_a_sweep_is_watched_as_long_as_a_launcher_is_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its points no job is live."""
    paths = SweepPaths(tmp_path / "lr")
    make_sweep(paths.root, "seed=1")
    monkeypatch.setattr(file_locks, "is_held", lambda path: path == paths.lock and len(clock.slept) < 3)
    clock = FakeClock()
    assert runs_table.watch_sweep([f"sweep={paths.root}"], clock) == 1
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
    lines = follow_table(Overview(tmp_path, connect=lambda _: silent), Console(file=io.StringIO()), clock)
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
    assert live_view.main(["sweep=lr"]) == 1
    points[1].finish(3)
    assert live_view.main(["sweep=lr"]) == 0
    assert "2 finished" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["sweep=none"], ["output=/no/such/folder"], ["demo"], ["--jsn"], ["sweep="]])
def test_a_wrong_argument_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
