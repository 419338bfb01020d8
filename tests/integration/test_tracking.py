"""`pipeline.tracking.metric_sinks` with the real wandb, offline; and with one that fails."""

import errno
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run.metrics_log import MetricSinks, Sink, roll_back
from pipeline.run.paths import AttemptPaths
from pipeline.tracking import metric_sinks as sinks_of
from pipeline.tracking.metric_sinks import TrackerSink, tracking_sinks
from pipeline.tracking.tracker_protocol import upload_commands
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.wandb_server import WandbServer
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

BLOCK_BYTES = 32768
BROKEN = """
import time
Settings = dict
class Run:
    starting_step = 0
    def define_metric(self, *_, **__): pass
    def log(self, numbers, **_): {log}
    def finish(self): {finish}
def init(**_):
    {init}
    return Run()
"""


def a_run(folder: Path, **tracking: Any) -> FakeRun:
    return FakeRun(folder / "run", make_config(tracking={"mode": "offline", **tracking}))


def attempt_of(run: FakeRun, name: str) -> AttemptPaths:
    return AttemptPaths(run.root, run.identity.run_id, name)


def broken_wandb(folder: Path, *, init: str = "pass", log: str = "pass", finish: str = "pass") -> dict[str, str]:
    """An environment in which `import wandb` finds one that does this."""
    (folder / "wandb.py").write_text(BROKEN.format(init=init, log=log, finish=finish))
    return {"PYTHONPATH": str(folder)}


def write_rows(run: FakeRun, sinks: list[Sink], attempt: str = "12-0", steps: int = 3) -> None:
    with MetricSinks(run.paths.metrics, attempt, sinks) as metrics:
        for step in range(1, 1 + steps):
            metrics.log("train", "rl", step, {"reward/mean": 0.5})


def test_offline_keeps_one_folder_with_the_runs_id_for_all_attempts(tmp_path: Path) -> None:
    run, home = a_run(tmp_path), tmp_path / "home"
    home.mkdir()
    for restart in (0, 1):
        sinks = tracking_sinks(run.config, attempt_of(run, f"12-{restart}"), {"HOME": str(home)}, seconds=60)
        write_rows(run, sinks, f"12-{restart}", steps=1 + restart)
    (kept,) = run.paths.tracking.glob("wandb/offline-run-*/*.wandb")
    assert kept.name == f"run-{run.identity.run_id}.wandb"
    # wandb's own process writes the file, and its last block a moment after `finish` has returned.
    wait_for("wandb to write", lambda: b"reward/mean" in kept.read_bytes(), WAIT_SECONDS)
    assert list(home.iterdir()) == [], "wandb writes below the tracking folder only"


def test_rows_of_sft_have_their_own_step_axis(tmp_path: Path) -> None:
    run = a_run(tmp_path, mode="online")
    with WandbServer() as server:
        variables = {"HOME": str(tmp_path), **server.variables()}
        sinks = tracking_sinks(run.config, attempt_of(run, "12-0"), variables, seconds=60)
        with MetricSinks(run.paths.metrics, "12-0", sinks) as metrics:
            metrics.log("eval", "rl", 0, {"eval/accuracy": 0.5})
            metrics.log("train", "sft", 1, {"loss": 1.0})
            metrics.log("train", "rl", 1, {"loss": 0.5})
    rows = [
        {name: value for name, value in row.items() if not name.startswith("_")}
        for row in server.history(run.identity.run_id)
    ]
    assert rows == [
        {"eval/accuracy": 0.5, "step": 0},
        {"sft/loss": 1.0, "sft/step": 1},
        {"loss": 0.5, "step": 1},
    ]


def kill_at_work(run: FakeRun, steps: int) -> None:
    """An attempt whose wandb is killed with all its processes in the middle of a row, as by the end of a Slurm job."""
    (sink,) = tracking_sinks(run.config, attempt_of(run, "12-0"), {**os.environ}, seconds=60)
    assert isinstance(sink, TrackerSink)
    metrics = MetricSinks(run.paths.metrics, "12-0", [sink])
    for step in range(1, 1 + steps):
        metrics.log("train", "rl", step, {"reward/mean": 0.25, **{f"number/{name}": 1 / step for name in range(50)}})
    # wandb writes blocks of 32 KiB, so the last row of a full block is incomplete.
    wait_for("a block", lambda: blocks(run), WAIT_SECONDS)
    kill_with_children(sink)
    metrics.close()


def kill_with_children(sink: TrackerSink) -> None:
    process = psutil.Process(sink._child.pid)
    for child in (*process.children(recursive=True), process):
        child.kill()


def sync(command: str, folder: Path, server: WandbServer) -> None:
    variables = {**os.environ, "HOME": str(folder), **server.variables()}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        command, shell=True, cwd=folder, env=variables, check=True, timeout=WAIT_SECONDS, capture_output=True
    )


def test_rows_of_attempts_after_an_upload_are_added_by_the_next_one(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    command = f"wandb sync {run.paths.tracking}/wandb/offline-run-*"
    with WandbServer() as server:
        for restart, (steps, is_uploaded) in enumerate([(3, True), (5, False), (7, True)]):
            sinks = tracking_sinks(run.config, attempt_of(run, f"12-{restart}"), {"HOME": str(tmp_path)}, seconds=60)
            with MetricSinks(run.paths.metrics, f"12-{restart}", sinks) as metrics:
                for step in range(steps - 2, steps + 1):
                    metrics.log("train", "rl", step, {"reward/mean": 0.5})
            if is_uploaded:
                sync(command, tmp_path, server)
    assert [row["step"] for row in server.history(run.identity.run_id)] == [1, 2, 3, 4, 5, 6, 7]


def attempt_offline(run: FakeRun, home: Path, restart: int, steps: range, **variables: str) -> None:
    sinks = tracking_sinks(run.config, attempt_of(run, f"12-{restart}"), {"HOME": str(home), **variables}, seconds=60)
    with MetricSinks(run.paths.metrics, f"12-{restart}", sinks) as metrics:
        for step in steps:
            metrics.log("train", "rl", step, {"reward/mean": 0.5})


def uploaded_steps(run: FakeRun, home: Path) -> list[int]:
    """The steps that a service has after the command of the report."""
    (command,) = upload_commands(run.paths)
    with WandbServer() as server:
        sync(command, home, server)
    return [row["step"] for row in server.history(run.identity.run_id)]


def folder_count(run: FakeRun) -> int:
    return len(list(run.paths.tracking.glob("wandb/offline-run-*")))


def blocks(run: FakeRun) -> list[Path]:
    """The files with a block of rows."""
    return [
        file for file in run.paths.tracking.glob("wandb/offline-run-*/*.wandb") if file.stat().st_size > BLOCK_BYTES
    ]


def test_an_attempt_whose_wandb_does_not_start_leaves_the_rows_of_those_before(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    attempt_offline(run, tmp_path, 0, range(1, 4))
    attempt_offline(run, tmp_path, 1, range(4, 6), **broken_wandb(tmp_path, init="raise RuntimeError('no')"))
    (tmp_path / "wandb.py").unlink()
    assert folder_count(run) == 1
    attempt_offline(run, tmp_path, 2, range(6, 8))
    assert folder_count(run) == 1
    assert uploaded_steps(run, tmp_path) == list(range(1, 8))


@pytest.mark.parametrize("mark", [None, "", "?"])
def test_all_rows_of_a_folder_without_a_readable_first_row_are_written_again(tmp_path: Path, mark: str | None) -> None:
    """As older code left it, or a full disk."""
    run = a_run(tmp_path)
    attempt_offline(run, tmp_path, 0, range(1, 4))
    (file,) = run.paths.tracking.glob("wandb/offline-run-*/rollcall-first-row")
    file.unlink() if mark is None else file.write_text(mark)
    attempt_offline(run, tmp_path, 1, range(4, 6))
    assert folder_count(run) == 1
    assert uploaded_steps(run, tmp_path) == [1, 2, 3, 4, 5]


def test_an_attempt_that_is_killed_while_it_writes_the_rows_again_loses_none(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    numbers = {f"number/{name}": 1 / 7 for name in range(50)}
    (sink,) = tracking_sinks(run.config, attempt_of(run, "12-0"), {"HOME": str(tmp_path)}, seconds=60)
    with MetricSinks(run.paths.metrics, "12-0", [sink]) as metrics:
        for step in range(1, 301):
            metrics.log("train", "rl", step, numbers)
    (old,) = blocks(run)
    for restart in (1, 2):
        (sink,) = tracking_sinks(run.config, attempt_of(run, f"12-{restart}"), {"HOME": str(tmp_path)}, seconds=60)
        assert isinstance(sink, TrackerSink)
        metrics = MetricSinks(run.paths.metrics, f"12-{restart}", [sink])
        wait_for("the new folder to have rows", lambda: len(blocks(run)) == 2, WAIT_SECONDS)
        kill_with_children(sink)
        metrics.close()
        assert folder_count(run) == 2
        assert upload_commands(run.paths) == [f"wandb sync {old.parent}"]
    attempt_offline(run, tmp_path, 3, range(301, 304))
    assert folder_count(run) == 1
    assert uploaded_steps(run, tmp_path) == list(range(1, 304))


def test_a_long_attempt_removes_the_old_folder_as_soon_as_its_rows_are_on_disk(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    attempt_offline(run, tmp_path, 0, range(1, 4))
    (sink,) = tracking_sinks(run.config, attempt_of(run, "12-1"), {"HOME": str(tmp_path)}, seconds=60)
    assert isinstance(sink, TrackerSink)
    metrics = MetricSinks(run.paths.metrics, "12-1", [sink])
    wait_for("the new folder", lambda: folder_count(run) == 2, WAIT_SECONDS)
    time.sleep(3)
    assert folder_count(run) == 2, "its rows are in wandb's buffer"
    for step in range(4, 104):
        metrics.log("train", "rl", step, {f"number/{name}": 1 / step for name in range(50)})
    wait_for("the old folder to be removed", lambda: folder_count(run) == 1, WAIT_SECONDS)
    kill_with_children(sink)
    metrics.close()
    assert uploaded_steps(run, tmp_path)[:4] == [1, 2, 3, 4]


def test_what_was_kept_offline_is_synced_as_one_run_with_each_step_once(tmp_path: Path) -> None:
    """By the command that docs/metrics.md names, after a kill and a rollback: the numbers of the current weights."""
    run = a_run(tmp_path)
    kill_at_work(run, steps=200)
    roll_back(run.paths.metrics, "rl", 150)
    sinks = tracking_sinks(run.config, attempt_of(run, "12-1"), {"HOME": str(tmp_path)}, seconds=60)
    with MetricSinks(run.paths.metrics, "12-1", sinks) as metrics:
        for step in range(151, 161):
            metrics.log("train", "rl", step, {"reward/mean": 0.5})
            metrics.log("eval", "rl", step, {"eval/accuracy": 0.75})
    kept = list(run.paths.tracking.glob("wandb/offline-run-*/*.wandb"))
    wait_for("wandb to write", lambda: sum(f.read_bytes().count(b"eval/accuracy") for f in kept) >= 10, WAIT_SECONDS)
    log = (run.paths.tracking / "wandb.log").read_text()
    command = log.strip().splitlines()[-1].partition("to upload this run: ")[2]
    assert command == f"wandb sync {run.paths.tracking}/wandb/offline-run-*"
    with WandbServer() as server:
        sync(command, tmp_path, server)
    assert list(server.files) == [run.identity.run_id]
    history = server.history(run.identity.run_id)
    trained = [(row["step"], row["reward/mean"]) for row in history if "reward/mean" in row]
    assert trained == [(step, 0.25 if step <= 150 else 0.5) for step in range(1, 161)]
    assert [row["step"] for row in history if "eval/accuracy" in row] == list(range(151, 161))
    assert [row["_step"] for row in history] == list(range(170))


def test_online_a_resumed_run_goes_on_where_it_was_without_a_step_twice_or_missing(tmp_path: Path) -> None:
    run = a_run(tmp_path, mode="online")
    with WandbServer() as server:
        variables = {"HOME": str(tmp_path), **server.variables()}
        write_rows(run, tracking_sinks(run.config, attempt_of(run, "12-0"), variables, seconds=60), "12-0", steps=3)
        assert [row["step"] for row in server.history(run.identity.run_id)] == [1, 2, 3]
        write_rows(run, [], "12-1", steps=5)  # wandb's process was killed before it sent anything of this attempt
        write_rows(run, tracking_sinks(run.config, attempt_of(run, "12-2"), variables, seconds=60), "12-2", steps=7)
    assert list(server.files) == [run.identity.run_id]
    history = server.history(run.identity.run_id)
    assert [row["step"] for row in history] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["_step"] for row in history] == [0, 1, 2, 3, 4, 5, 6]


def test_the_warning_has_the_reason_of_an_error_of_several_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(tmp_path)
    variables = broken_wandb(tmp_path, init="raise RuntimeError('the disk is full\\n  For help visit a page')")
    with caplog.at_level(logging.WARNING):
        write_rows(run, tracking_sinks(run.config, attempt_of(run, "12-0"), variables, seconds=20))
    (message,) = caplog.messages
    assert message.endswith("exited with code 1: RuntimeError: the disk is full For help visit a page")


@pytest.mark.parametrize("fault", ["log", "init", "finish"])
def test_a_wandb_that_raises_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    run = a_run(tmp_path)
    variables = broken_wandb(tmp_path, **{fault: 'raise RuntimeError("the disk is full")'})
    with caplog.at_level(logging.WARNING):
        write_rows(run, tracking_sinks(run.config, attempt_of(run, "12-0"), variables, seconds=20))
    (message,) = caplog.messages
    assert "exited with code 1" in message
    assert "RuntimeError: the disk is full" in message
    assert len(run.paths.metrics.read_text().splitlines()) == 3


@pytest.mark.parametrize("fault", ["log", "init", "finish"])
def test_a_wandb_that_hangs_is_ended_at_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    run = a_run(tmp_path)
    variables = broken_wandb(tmp_path, **{fault: "time.sleep(300)"})
    sinks = tracking_sinks(run.config, attempt_of(run, "12-0"), variables, seconds=1)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        write_rows(run, sinks)
    assert time.monotonic() - started < 5
    assert "killed by SIGKILL" in caplog.text


def test_a_folder_that_cannot_be_written_is_told_once_and_ends_wandb(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    class Remembered(Child):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self.pid)

    run, started = a_run(tmp_path), list[int]()
    monkeypatch.setattr(sinks_of, "Child", Remembered)
    sinks = tracking_sinks(run.config, attempt_of(run, "12-0"), broken_wandb(tmp_path))
    monkeypatch.setattr(Path, "touch", touch)
    metrics = MetricSinks(run.paths.metrics, "12-0", sinks)
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="the first error"), metrics:
        raise ValueError("the first error")
    (message,) = caplog.messages
    assert "Input/output error" in message
    assert started
    assert not any(map(psutil.pid_exists, started))


def test_a_wandb_that_cannot_be_started_is_a_warning_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(tmp_path)
    run.paths.tracking.touch()  # where its folder should be
    with caplog.at_level(logging.WARNING):
        assert tracking_sinks(run.config, attempt_of(run, "12-0"), {}) == []
    (message,) = caplog.messages
    assert "not logged to wandb: its process cannot be started" in message


def test_a_missing_wandb_is_a_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = a_run(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert tracking_sinks(run.config, attempt_of(run, "12-0"), {}) == []
    assert caplog.messages == ["metrics are not logged to wandb: wandb is not installed"]


def test_nothing_is_started_without_trackers(tmp_path: Path) -> None:
    run = a_run(tmp_path, trackers=())
    assert tracking_sinks(run.config, attempt_of(run, "12-0"), {"WANDB_API_KEY": "key"}) == []
    assert not run.paths.tracking.exists()
