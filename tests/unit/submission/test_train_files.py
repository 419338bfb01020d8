"""`launchers/train.py`: jobs of files as a run, and what is refused before anything starts."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.config.cross_checks import check_run
from pipeline.errors import ConfigError
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished
from pipeline.topology.plan import Plan
from pipeline.utils import shared_files
from slurm.agent.gpu_locks import Claimant, claim_visible
from slurm.submission import submission_checks, submit_run, train_files
from slurm.submission.compose_config import compose_config
from slurm.submission.train_files import compose_jobs, name_of
from tests.fakes.gpus import give_gpus
from tests.unit.train.test_train_jobs import RL, SFT, write

Started = list[tuple[RunConfig, Plan]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What would have been started."""
    found: Started = []
    monkeypatch.setattr(submit_run, "run_here", lambda config, plan: found.append((config, plan)) or 0)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert train_files.main([*arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    return said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a b.json", "a-b"),
        ("lr=1.json", "lr-1"),
        ("007", "007"),
        ("-.json", "jobs"),
        ("é.json", "jobs"),
        ("_x{y}", "x-y-"),
        (f"{'long' * 30}.json", ("long" * 30)[:58]),
    ],
)
def test_a_path_of_any_letters_gives_the_run_a_name(name: str, expected: str, tmp_path: Path) -> None:
    assert name_of(tmp_path / name) == expected
    assert compose_jobs(tmp_path / name, [f"output={tmp_path}"]).name == expected


def test_jobs_below_a_path_of_any_letters_are_a_run_with_trainers_only(
    tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lr=1 [é] it's ${x}"
    folder.mkdir()
    file = write(folder, "step 7, lr=2.json", SFT)
    output = f"output={tmp_path / 'runs'}"
    assert [train_files.main([str(path), output, "resources.trainer.nodes=3"]) for path in (file, folder)] == [0, 0]
    told = [(config.training.jobs, config.name, config.training.steps) for config, _ in started]
    assert told == [(str(file), "step-7-lr-2", 0), (str(folder), "lr-1-it-s-x-", 0)]
    assert [seat.name for seat in started[0][1].bundles] == ["trainer.0", "trainer.1", "trainer.2"]
    assert f"lr-1-it-s-x-  the jobs of {folder}\n" in capsys.readouterr().out


def test_a_relative_path_is_kept_as_an_absolute_one(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.json", SFT)
    monkeypatch.chdir(tmp_path)
    assert train_files.main(["a.json", "output=runs"]) == 0
    assert started[0][0].training.jobs == str(tmp_path / "a.json")


def test_the_next_run_of_the_same_jobs_begins_when_the_one_before_is_finished(tmp_path: Path) -> None:
    def name() -> str:
        return compose_jobs(tmp_path / "queue", [f"output={tmp_path}"]).name

    assert name() == "queue"
    for finished in ("queue", "queue-2"):
        RunPaths(tmp_path / finished).root.mkdir()
        assert name() == finished, "one that is there and not finished is gone on with"
        end = Finished(time=0.0, steps=1, attempt="a-0")
        shared_files.write_document(RunPaths(tmp_path / finished).finished, end)
    assert name() == "queue-3"
    assert compose_jobs(tmp_path / "queue", [f"output={tmp_path}", "name=queue"]).name == "queue"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "jobs=None: expected a job file, or a folder of them, as the first argument; see docs/jobs.md"),
        (["optim.lr=1"], "jobs=None: expected a job file"),
        (["--dry-run"], "jobs=None: expected a job file"),
        (["no-such-folder"], "expected a job file, or a folder with at least one *.json; see docs/jobs.md"),
        (["FOLDER", "-m"], "option='--multirun': expected one run"),
        (
            ["FOLDER", "training.steps=5"],
            "training.steps=5: expected 0 with training.jobs: each job file sets its",
        ),
        (["FOLDER", "experiment=demo"], "expected 0 with training.jobs"),
        (["FOLDER", "model.pth=x"], "model.pth='x': expected a known key; did you mean model.path?"),
        (["FOLDER", "model.path=/gone"], "expected a directory with config.json and tokenizer.json"),
        (["FOLDER", "cluster.partition=x"], "cluster.partition='x': expected nothing, on one machine"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a.json", SFT)
    given = [str(tmp_path) if argument == "FOLDER" else argument for argument in arguments]
    assert said in refusal(capsys, *given, *([f"output={tmp_path / 'runs'}"] if given else []))
    assert not started
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (RL | {"kind": "dpo"}, "kind='dpo': expected one of sft, preference, rl"),
        (SFT | {"output": ""}, "output='': expected a path"),
        (RL | {"inputs": {"kind": "stream"}}, "expected packed, in a job from a file"),
        (RL | {"schedule": {"steps": 1, "prompts": 3}}, "mini_batches=2: expected a divisor of schedule.prompts"),
    ],
)
def test_every_job_that_waits_is_read_before_the_first_one_starts(
    second: dict[str, Any], said: str, tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "1.json", SFT)
    write(tmp_path, "2.json", second)
    assert said in refusal(capsys, str(tmp_path), f"output={tmp_path / 'runs'}", "training.mini_batches=2")
    assert not started


def test_demonstrations_of_a_task_that_has_none_are_refused(
    tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "1.json", SFT)
    task = ("task.name=tests.unit.environments.user_tasks:Endless", f"output={tmp_path / 'runs'}")
    assert "1.json: inputs.kind='demonstrations': expected packed" in refusal(capsys, str(tmp_path), *task)


def test_a_run_whose_jobs_are_all_done_can_be_gone_on_with(tmp_path: Path) -> None:
    """It was cut short between its last job and its end."""
    config = compose_jobs(tmp_path / "queue", [f"output={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match="a folder with at least one"):
        submission_checks.check_inputs(config)
    run = RunPaths(config.directory)
    run.root.mkdir(parents=True)
    run.run.touch()
    submission_checks.check_inputs(config)


def test_a_folder_of_jobs_is_not_the_runs_own_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "queue").mkdir()
    write(tmp_path / "queue", "a.json", SFT)
    assert "another folder than the run's own directory" in refusal(
        capsys, str(tmp_path / "queue"), f"output={tmp_path}"
    )


def test_jobs_are_refused_where_other_runs_have_the_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every run: its agents claim theirs."""
    give_gpus(monkeypatch, tmp_path, 0, 0)
    write(tmp_path, "a.json", SFT)
    gpus = ("resources.device=cuda", "resources.trainer.gpus=1", "resources.trainer.processes=2")
    arguments = (str(tmp_path / "a.json"), f"output={tmp_path / 'runs'}", *gpus)
    with ExitStack() as held:
        claim_visible(None, [1], Claimant(run_id="other-1f3a", attempt="local-0", pid=4711, user="ann"), held)
        assert "2 GPUs needed, 1 of 2 free" in refusal(capsys, *arguments)
    assert train_files.main([*arguments, "--dry-run"]) == 0


def test_jobs_can_be_submitted_by_their_key_too() -> None:
    check_run(compose_config(["name=a", "training.jobs=queue", "training.steps=0"]))
