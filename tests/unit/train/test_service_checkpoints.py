"""What a trainer goes on from: real commits of a policy that is one tensor, and the files that belong to them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.checkpoints import newest_checkpoint
from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.errors import CheckpointError, SupersededError
from pipeline.run.metrics_log import MetricSinks, read_rows
from pipeline.run.paths import AttemptPaths
from pipeline.train.controller import model_saving
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines
from pipeline.train.loop.run_recorder import RunRecorder
from pipeline.train.train_jobs import jobs_of
from pipeline.utils import pinned_memory
from slurm.batch.attempt_summary import summarize_attempt
from tests.fakes.configs import make_config
from tests.fakes.cuda_runtime import CudaRuntime
from tests.fakes.full_disk import room_for
from tests.fakes.run_directory import FakeRun


class OneRank:
    """A dispatch whose only rank is this process, with models of one number. `moved` names those that an operation
    wanted on the device."""

    patience, broken = Deadlines(), False

    def __init__(self) -> None:
        self.models: dict[str, torch.Tensor] = {}
        self.saver, self.moved = AsyncSaver(), list[str]()

    def init_model(self, name: str, spec: object) -> None:
        self.models[name] = torch.zeros(1)

    def remove_model(self, name: str) -> None:
        del self.models[name]

    def run_on_all_models(
        self, function: Callable[..., Any], *args: Any, needs: Mapping[str, str] | None = None
    ) -> list[Any]:
        self.moved += needs or ()
        site = SimpleNamespace(worker=self._worker, background=None, patience=self.patience, saver=self.saver)
        return [function(site, *args)]

    def keepalive(self) -> None:
        pass

    def _worker(self, name: str) -> Any:
        return SimpleNamespace(state=lambda: {"model": {"w": self.models[name]}}, load_state=lambda state: None)


class Trainer:
    """The trainer of one attempt; after `done` steps its policy is that number."""

    def __init__(self, run: FakeRun, attempt: str) -> None:
        self.run, self.ranks, self.paths = run, OneRank(), run.attempt(attempt).paths
        self.commits = RunRecorder(self.paths, run.config, cast(RankGroup, self.ranks))
        self.done = self.commits.restore().done

    @property
    def policy(self) -> float:
        return float(self.ranks.models["policy"])

    def commit(self, done: int) -> None:
        for step in range(self.done, done):
            self.commits.ledger.mark_done(step, "trained", step + 1)
        self.done = done
        self.ranks.models["policy"].fill_(done)
        self.commits.save_checkpoint(jobs_of(self.run.config)[-1], done, (), wait=True)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", make_config(model={"path": "tiny_qwen3", "init": "random"}))


def test_a_run_that_begins_logs_where_its_weights_come_from(run: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trainer = Trainer(run, "12-0")
    said = "weights: random ones in the shape of tiny_qwen3"
    assert said in caplog.messages
    trainer.commit(50)
    caplog.clear()
    Trainer(run, "12-1")
    assert said not in caplog.messages


def test_memory_for_commits_is_made_when_the_models_are_and_moves_none_of_them(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(pinned_memory, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    trainer = Trainer(run, "12-0")
    trainer.ranks.saver._wait_until_idle()
    early = dict(runtime.pinned)
    assert [*early.values()] == [4]
    assert trainer.ranks.moved == []
    trainer.commit(50)
    assert runtime.pinned == early
    monkeypatch.undo()
    assert Trainer(run, "12-1").policy == 50.0


def rot(run: FakeRun, *steps: int, file: str = "__0_0.distcp") -> None:
    for step in steps:
        (path,) = run.paths.checkpoints.glob(f"rl-{step}/*/{file}")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def newest(run: FakeRun) -> str:
    found = newest_checkpoint(str(run.paths.checkpoints))
    return found.folder if found else ""


@pytest.mark.parametrize("file", ["__0_0.distcp", "state.msgpack", ".metadata"])
def test_a_damaged_commit_is_given_up_for_the_one_before(run: FakeRun, file: str) -> None:
    first = Trainer(run, "12-0")
    for step in (50, 100):
        first.commit(step)
    rot(run, 100, file=file)
    second = Trainer(run, "12-1")
    assert (second.done, second.policy) == (50, 50.0)
    assert len(run.paths.ledger.read_text().splitlines()) == 50


def test_lines_that_a_damaged_commit_covered_are_kept_aside(run: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    first = Trainer(run, "12-0")
    log(run, "12-0", range(1, 111))
    for step in (50, 100):
        first.commit(step)
    rot(run, 100)
    second = Trainer(run, "12-1")
    place = run.paths.aside / "1"
    assert [row["step"] for row in read_rows(run.paths.metrics)] == list(range(1, 51))
    dropped = AttemptPaths(run.paths.root, run.identity.run_id, "12-1").dropped(0)
    assert [row["step"] for row in read_rows(dropped)] == list(range(51, 111))
    assert len((place / "ledger.jsonl").read_text().splitlines()) == 50
    said = "going on from rl-50, since rl-100/12-0 is damaged: 60 rows of metrics.jsonl are kept in"
    said = f"{said} {dropped}, and 50 of ledger.jsonl in {place}"
    assert [message for message in caplog.messages if "rows of" in message] == [said]
    second.commit(60)
    Trainer(run, "12-2")
    assert [path.name for path in run.paths.aside.iterdir()] == ["1"]


def test_rows_that_no_commit_covered_stay_with_the_attempt_that_drops_them(run: FakeRun) -> None:
    first = Trainer(run, "12-0")
    first.commit(50)
    log(run, "12-0", range(1, 61))
    assert Trainer(run, "12-1").done == 50
    dropped = AttemptPaths(run.paths.root, run.identity.run_id, "12-1").dropped(0)
    assert [row["step"] for row in read_rows(dropped)] == list(range(51, 61))
    assert not run.paths.aside.exists()


def test_what_an_attempt_commits_after_a_damaged_one_stays_and_is_gone_on_from(run: FakeRun) -> None:
    first = Trainer(run, "12-0")
    for step in (50, 100, 150):
        first.commit(step)
    rot(run, 150)
    second = Trainer(run, "12-1")
    assert second.done == 100
    for step in (110, 120):
        second.commit(step)
        assert newest(run) == f"rl-{step}/12-1"
    assert Trainer(run, "12-2").done == 120


def test_a_run_whose_commits_are_all_damaged_is_not_begun_again_and_keeps_its_rows(run: FakeRun) -> None:
    first = Trainer(run, "12-0")
    log(run, "12-0", range(1, 151))
    for step in (100, 150):
        first.commit(step)
    rot(run, 100, 150)
    before = run.paths.metrics.read_bytes(), run.paths.ledger.read_bytes()
    for attempt in ("12-1", "12-2"):
        with pytest.raises(CheckpointError, match=r"had progress \(attempt 12-0 committed, .*resume=scratch"):
            Trainer(run, attempt)
    assert (run.paths.metrics.read_bytes(), run.paths.ledger.read_bytes()) == before
    rot(run, 150)  # the same bits: it is as it was committed again
    assert Trainer(run, "12-3").policy == 150.0


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(run: FakeRun) -> None:
    Trainer(run, "12-0").commit(50)
    away = run.paths.checkpoints.rename(run.root / "away")
    with pytest.raises(CheckpointError, match=r"attempt 12-0 committed, 50 lines of ledger.jsonl"):
        Trainer(run, "12-1")
    shutil.rmtree(run.paths.checkpoints)
    away.rename(run.paths.checkpoints)
    assert Trainer(run, "12-2").policy == 50.0


def test_a_run_that_was_cut_off_before_its_first_commit_begins_again(run: FakeRun) -> None:
    log(run, "12-0", range(1, 9))
    assert Trainer(run, "12-0").done == 0
    log(run, "12-0", range(1, 9))
    assert Trainer(run, "12-1").done == 0
    assert read_rows(run.paths.metrics) == []


def test_a_requeue_sees_the_progress_that_came_after_a_damaged_commit(run: FakeRun) -> None:
    first = Trainer(run, "12-0")
    for step in (100, 150):
        first.commit(step)
    rot(run, 150)
    second = Trainer(run, "12-1")
    second.commit(110)
    facts = summarize_attempt(run.paths, second.paths, 1, 4, 1, late=0.0)
    assert facts.advanced
    assert facts.trained


def log(run: FakeRun, attempt: str, steps: range) -> None:
    with MetricSinks(run.paths.metrics, attempt) as sinks:
        for step in steps:
            sinks.log("train", "rl", step, {"loss": 1.0})


def settled(run: FakeRun) -> list[int]:
    whole = run.paths.ledger.read_text().rpartition("\n")[0]
    return [json.loads(line)["position"] for line in whole.splitlines()]


def test_after_a_hard_kill_no_row_tells_of_a_step_that_the_model_did_not_go_through(run: FakeRun) -> None:
    first = Trainer(run, "12-0")
    log(run, "12-0", range(1, 26))
    first.commit(25)
    log(run, "12-0", range(26, 33))
    with run.paths.metrics.open("ab") as file:
        file.write(b'{"kind": "tra')
    second = Trainer(run, "12-1")
    assert second.done == 25
    assert [row["step"] for row in read_rows(run.paths.metrics)] == list(range(1, 26))
    log(run, "12-1", range(26, 28))
    assert [row["step"] for row in read_rows(run.paths.metrics)] == list(range(1, 28))


def test_a_run_that_starts_over_has_no_rows_and_no_settled_positions(run: FakeRun) -> None:
    Trainer(run, "12-0")
    log(run, "12-0", range(1, 9))
    run.paths.ledger.write_bytes(b'{"position":0}\n')
    Trainer(run, "12-1")
    assert read_rows(run.paths.metrics) == []
    assert settled(run) == []


def test_a_full_disk_under_the_ledger_costs_no_commit_and_its_lines_come_later(run: FakeRun) -> None:
    trainer = Trainer(run, "12-0")
    trainer.commit(1000)
    full = run.paths.ledger.stat().st_size
    with room_for(full + 10):
        trainer.commit(1100)
    assert settled(run) == list(range(1000))
    trainer.commit(1200)
    assert settled(run) == list(range(1200))
    assert Trainer(run, "12-1").done == 1200
    assert settled(run) == list(range(1200))


def test_what_a_trainer_settles_late_after_it_was_replaced_is_not_in_the_ledger(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write when it looks, and hangs until the next attempt has begun."""
    zombie = Trainer(run, "12-0")
    zombie.commit(10)
    owners, check = list[Trainer](), zombie.commits.fence.check

    def hang() -> None:
        check()
        if not owners:
            owners.append(Trainer(run, "12-1"))
            owners[0].commit(12)

    monkeypatch.setattr(zombie.commits._settled, "_check", hang)
    with pytest.raises(SupersededError):
        zombie.commit(20)
    assert settled(run) == list(range(12))
    assert newest(run) == "rl-12/12-1"


def test_an_attempt_that_is_replaced_while_it_restores_drops_nothing_of_the_owner(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(run, "12-0").commit(10)
    load, owners = model_saving.load_shards, list[Trainer]()

    def hang(*arguments: Any, **options: Any) -> Any:
        if not owners:
            monkeypatch.setattr(model_saving, "load_shards", load)
            owners.append(Trainer(run, "12-2"))
            log(run, "12-2", range(11, 13))
            owners[0].commit(12)
        return load(*arguments, **options)

    monkeypatch.setattr(model_saving, "load_shards", hang)
    with pytest.raises(SupersededError):
        Trainer(run, "12-1")
    assert settled(run) == list(range(12))
    assert [row["step"] for row in read_rows(run.paths.metrics)] == [11, 12]
    assert newest(run) == "rl-12/12-2"
    assert not [path for path in run.root.iterdir() if path.name.startswith(".")]
