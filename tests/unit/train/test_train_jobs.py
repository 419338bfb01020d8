"""Jobs as files, the queue that they wait in, and their logs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.cross_checks import check_config
from pipeline.errors import ConfigError
from pipeline.train.offline.job_log import JobLog
from pipeline.train.offline.job_queue import JobQueue, waiting
from pipeline.train.train_jobs import (
    DemonstrationsInput,
    Job,
    PackedInput,
    RlJob,
    SftJob,
    StreamInput,
    check_offline,
    jobs_of,
    read_job,
    write_job,
)
from pipeline.utils import atomic_dirs
from tests.fakes.configs import make_config

RL: dict[str, Any] = {
    "kind": "rl",
    "version": 1,
    "inputs": {"kind": "packed", "folder": "data"},
    "checkpoint": "adapter-1",
    "optimizer_state": "s3://bucket/state",
    "output": "adapter-2",
    "log": "rl.jsonl",
    "schedule": {"steps": 4, "prompts": 2, "optim": {"lr": 1e-3}},
}
SFT: dict[str, Any] = {
    "kind": "sft",
    "version": 1,
    "inputs": {"kind": "demonstrations"},
    "optimizer_state": "state",
    "output": "model",
    "log": "sft.jsonl",
    "schedule": {"steps": 4, "batch": 8},
}


def write(folder: Path, name: str, tree: dict[str, Any], age: int = 0) -> Path:
    """A job file that is `age` seconds old."""
    path = folder / name
    path.write_text(json.dumps(tree))
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_job(path)
    assert str(refused.value).startswith(str(path))
    return str(refused.value).removeprefix(f"{path}: ")


def test_paths_in_a_file_are_relative_to_it_and_urls_stay(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "a.json", RL))
    assert isinstance(job, RlJob)
    assert job.inputs == PackedInput(folder=str(tmp_path / "data"))
    assert (job.checkpoint, job.output) == (str(tmp_path / "adapter-1"), str(tmp_path / "adapter-2"))
    assert job.optimizer_state == "s3://bucket/state"
    assert (job.steps, job.prompts, job.optim.lr) == (4, 2, 1e-3)


@pytest.mark.parametrize("tree", [RL, SFT])
def test_a_job_that_is_written_is_read_back_equal(tree: dict[str, Any], tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "a.json", tree))
    write_job(tmp_path / "b.json", job)
    assert read_job(tmp_path / "b.json") == job


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "dpo"}, "kind='dpo': expected one of sft, preference, rl; choose from: preference, rl, sft"),
        ({"kind": None}, "kind=None: expected one of sft, preference, rl; choose from: preference, rl, sft"),
        ({"version": 2}, "version=2: expected 1, which this code reads; write the file with the version"),
        ({"chekpoint": "a"}, "chekpoint='a': expected a known key; did you mean checkpoint?"),
        (
            {"inputs": {"kind": "demonstrations"}},
            "inputs.kind='demonstrations': expected one of 'stream', 'recorded', 'packed'",
        ),
        ({"inputs": {"kind": "packed"}}, "inputs.folder=None: expected a value"),
        ({"inputs": {}}, "inputs={}: expected an object with a kind"),
        ({"schedule": {"steps": 0, "prompts": 1}}, "schedule.steps=0: expected greater than 0"),
        ({"schedule": {"steps": 1}}, "schedule.prompts=None: expected a value"),
        ({"schedule": {"steps": 1, "batch": 2, "prompts": 2}}, "schedule.batch=2: expected a known key"),
        ({"schedule": {"steps": 1, "prompts": 2, "optim": {"lr": 7}}}, "schedule.optim.lr=7: expected less than"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, "a.json", RL | change)).startswith(said)


def test_a_file_that_is_no_job_at_all_is_named(tmp_path: Path) -> None:
    for content in ("", "{", "[1]", '"rl"'):
        (tmp_path / "a.json").write_text(content)
        assert "expected a job in JSON" in refusal(tmp_path / "a.json") or "JSON object" in refusal(tmp_path / "a.json")
    assert "No such file" in refusal(tmp_path / "gone.json")


def test_a_run_has_its_two_jobs_in_the_same_form(tmp_path: Path) -> None:
    training = {"steps": 7, "prompts_per_step": 3, "sft": {"steps": 5, "batch": 2, "lr": 0.5}}
    config = make_config(training=training, optim={"lr": 0.25, "schedule": "linear"})
    for job in jobs_of(config):
        write_job(tmp_path / "jobs" / f"{job.name}.json", job)
    sft, rl = (read_job(tmp_path / "jobs" / f"{name}.json") for name in ("sft", "rl"))
    assert isinstance(sft, SftJob)
    assert isinstance(rl, RlJob)
    assert (sft.inputs, sft.steps, sft.batch, sft.optim.lr) == (DemonstrationsInput(), 5, 2, 0.5)
    assert (rl.inputs, rl.steps, rl.prompts, rl.optim) == (StreamInput(), 7, 3, config.optim)
    assert rl.output == str(tmp_path / "model")
    assert rl.log == str(tmp_path / "metrics.jsonl")


def test_a_run_without_sft_has_one_job() -> None:
    assert [job.kind for job in jobs_of(make_config())] == ["rl"]


def test_sft_alone_makes_the_runs_model_on_the_schedule_of_the_config() -> None:
    training = {"steps": 0, "prompts_per_step": 1, "sft": {"steps": 5, "batch": 2, "lr": 0.5}}
    schedule = {"schedule": "cosine", "warmup_steps": 2, "clip_norm": 3.0}
    (job,) = jobs_of(make_config(training=training, optim={"lr": 0.25, **schedule}))
    assert (job.kind, job.steps, job.output) == ("sft", 5, "../model")
    assert job.optim.model_dump(include={"lr", *schedule}) == {"lr": 0.5, **schedule}


def test_jobs_that_ask_for_different_things_have_different_digests(tmp_path: Path) -> None:
    def digest(tree: dict[str, Any]) -> str:
        job: Job = read_job(write(tmp_path, "a.json", tree))
        return job.digest

    changed = RL | {"schedule": RL["schedule"] | {"steps": 5}}
    assert digest(RL) == digest(dict(reversed(RL.items())))
    assert len({digest(RL), digest(SFT), digest(changed)}) == 3


def test_the_oldest_job_is_next_until_none_is_left(tmp_path: Path) -> None:
    write(tmp_path, "b.json", RL, age=1)
    write(tmp_path, "a.json", RL)
    write(tmp_path, "c.json", SFT, age=2)
    queue, order = JobQueue(tmp_path), []
    while (path := queue.next()) is not None:
        order.append(path.name)
        queue.done(path)
    assert order == ["c.json", "b.json", "a.json"]
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == ["a.json", "b.json", "c.json"]


def test_after_a_failure_jobs_that_need_nothing_of_it_go_on_and_others_wait(tmp_path: Path) -> None:
    first = write(tmp_path, "1.json", RL | {"output": "x", "optimizer_state": "p"}, age=9)
    needing = RL | {"checkpoint": "x", "output": "y", "optimizer_state": "q"}
    second = write(tmp_path, "2.json", needing, age=8)
    third = write(tmp_path, "3.json", RL | {"checkpoint": "y", "optimizer_state": "r"}, age=7)
    other = write(tmp_path, "4.json", RL | {"checkpoint": "z", "output": "w", "optimizer_state": "s"}, age=6)
    queue = JobQueue(tmp_path)
    assert queue.next() == first
    queue.failed(first, "TrainingError: no luck")
    assert queue.next() == other
    queue.done(other)
    assert queue.next() is None
    assert queue.left == {second: str(tmp_path / "x"), third: str(tmp_path / "y")}
    assert (tmp_path / "failed" / "1.error").read_text() == "TrainingError: no luck\n"
    assert (tmp_path / "failed" / "1.json").exists()


def test_jobs_wait_for_a_failed_one_in_a_later_process_too(tmp_path: Path) -> None:
    first = write(tmp_path, "1.json", SFT, age=2)
    needy = write(tmp_path, "2.json", RL | {"checkpoint": "model"}, age=1)
    JobQueue(tmp_path).failed(first, "no space")
    later = JobQueue(tmp_path)
    assert later.next() is None
    assert later.left == {needy: str(tmp_path / "model")}
    (tmp_path / "failed" / "1.json").rename(first)
    assert JobQueue(tmp_path).next() == first


def test_files_that_leave_while_they_are_looked_at_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = write(tmp_path, "1.json", RL), write(tmp_path, "2.json", RL)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [gone, stays])
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    gone.unlink()
    assert waiting(tmp_path) == [stays]


def test_a_file_that_is_no_job_stops_the_queue_and_stays(tmp_path: Path) -> None:
    bad = write(tmp_path, "1.json", RL | {"kind": "dpo"}, age=1)
    write(tmp_path, "2.json", RL)
    with pytest.raises(ConfigError, match="dpo"):
        JobQueue(tmp_path).next()
    assert bad.exists()


def test_the_log_of_a_new_execution_is_a_new_file_of_whole_lines(tmp_path: Path) -> None:
    """Whoever follows it by its name sees at once that the job began again."""
    path = tmp_path / "new" / "log.jsonl"
    log = JobLog(path)
    log.write("started", steps=2)
    log.write("step", step=1, loss=float("inf"))
    with path.open() as followed:
        assert [json.loads(line)["event"] for line in followed] == ["started", "step"]
        log.clear()
        log.write("started")
        assert followed.read() == ""
        assert path.stat().st_ino != os.fstat(followed.fileno()).st_ino
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["started"]


def fill(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)
    return folder


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("old", "new"):
        atomic_dirs.repair(target)
        atomic_dirs.replace(target, fill(atomic_dirs.unfinished(target, "1-0"), text))
        assert (target / "weights").read_text() == text
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_crash_left_of_a_replacement_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fill(tmp_path / "model", "old")
    renamed = Path.rename

    def crash_at_second(path: Path, to: Path) -> Path:
        if ".part" in path.name:
            raise KeyboardInterrupt
        return renamed(path, to)

    monkeypatch.setattr(Path, "rename", crash_at_second)
    with pytest.raises(KeyboardInterrupt):
        atomic_dirs.replace(target, fill(atomic_dirs.unfinished(target, "1-0"), "new"))
    monkeypatch.undo()
    assert not target.exists()
    atomic_dirs.repair(target)
    assert (target / "weights").read_text() == "old"
    atomic_dirs.replace(target, fill(atomic_dirs.unfinished(target, "1-0"), "newer"))
    assert (target / "weights").read_text() == "newer"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"output": "state"}, "apart from its optimizer_state"),
        ({"output": "all", "optimizer_state": "all/state"}, "apart from its optimizer_state"),
        ({"output": "state/model"}, "apart from its optimizer_state"),
        ({"output": "all", "log": "all/log.jsonl"}, "apart from its log"),
        ({"output": "."}, "apart from the job"),
        ({"output": "data", "inputs": {"kind": "packed", "folder": "data"}}, "apart from its inputs"),
        ({"output": "notes"}, "a new folder, or one with a model or adapter to replace"),
        ({"log": "a.json"}, "neither the job nor a folder"),
        ({"log": "notes"}, "neither the job nor a folder"),
    ],
    ids=str,
)
def test_a_job_may_replace_nothing_but_a_model(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thoughts.txt").touch()
    for kind in (SFT, RL | {"optimizer_state": "state"}):
        file = write(tmp_path, "a.json", kind | changed)
        with pytest.raises(ConfigError, match=said):
            check_offline(file, read_job(file), make_config())


def test_a_job_may_replace_the_model_that_it_starts_from(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    file = write(tmp_path, "a.json", SFT | {"checkpoint": "model"})
    check_offline(file, read_job(file), make_config())


def test_a_job_that_is_reached_by_a_link_may_not_replace_its_own_folder_either(tmp_path: Path) -> None:
    (tmp_path / "real" / "jobs").mkdir(parents=True)
    (tmp_path / "real" / "config.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for state in ("../../state", f"file://{tmp_path}/link/state"):
        write(
            tmp_path / "real" / "jobs", "a.json", SFT | {"output": "..", "optimizer_state": state, "log": "../../log"}
        )
        file = tmp_path / "link" / "jobs" / "a.json"
        with pytest.raises(ConfigError, match="apart from the job"):
            check_offline(file, read_job(file), make_config())
    write(tmp_path / "real" / "jobs", "a.json", SFT | {"output": "../state", "optimizer_state": state})
    with pytest.raises(ConfigError, match="apart from its optimizer_state"):
        check_offline(file, read_job(file), make_config())


def test_an_optimizer_state_without_a_bucket_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", RL | {"optimizer_state": "s3://"})
    with pytest.raises(ConfigError, match="optimizer_state='s3://': expected a bucket or a folder after s3://"):
        check_offline(file, read_job(file), make_config())


def test_the_prompts_of_a_job_of_rl_are_cut_into_mini_batches_of_one_size(tmp_path: Path) -> None:
    three = make_config(training={"steps": 1, "prompts_per_step": 32, "mini_batches": 3})
    folder = tmp_path / "jobs"
    folder.mkdir()
    file = write(folder, "a.json", RL | {"schedule": {"steps": 1, "prompts": 6}})
    check_config(three)
    check_offline(file, read_job(file), three)
    check_offline(write(tmp_path, "b.json", SFT), read_job(tmp_path / "b.json"), three)
    file = write(folder, "a.json", RL | {"schedule": {"steps": 1, "prompts": 32}})
    with pytest.raises(
        ConfigError, match=r"mini_batches=3: expected a divisor of schedule\.prompts of .*a\.json \(32\)"
    ):
        check_offline(file, read_job(file), three)
