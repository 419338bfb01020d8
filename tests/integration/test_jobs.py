"""Jobs that stand alone, executed on real models in a world of one process, and of two.

python -m pytest -m trial tests/integration/test_jobs.py kills the two.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints import TrainerState
from pipeline.checkpoints.sharded_state import save
from pipeline.config import RunConfig
from pipeline.errors import CheckpointError, TrainingError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.offline import job_execution as execution
from pipeline.train.offline.job_execution import run_job_file, run_job_files
from pipeline.train.offline.job_log import JobLog
from pipeline.train.offline.job_resume import JobState
from pipeline.train.train_jobs import read_job
from pipeline.utils import atomic_dirs
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import (
    STEPS,
    assert_same,
    config_of,
    events,
    weights,
    write_job,
)
from tests.support.ranks.forked_ranks import end_ranks, run_ranks, start_ranks
from tests.support.ranks.job_ranks import KILLED_AT, execute_on_rank

pytestmark = pytest.mark.integration


class Crash(BaseException):
    """The process ends here."""


def moments_taken(worker: ModelWorker) -> set[float]:
    """How many steps AdamW counts for its parameters."""
    assert worker.optimizer is not None
    return {float(state["step"]) for state in worker.optimizer.adamw.state.values()}


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_job_trains_its_rows_and_leaves_a_model_and_nothing_else(
    kind: str, dispatch: RankGroup, config: RunConfig, model: Path, tmp_path: Path
) -> None:
    file = write_job(tmp_path, kind)
    run_job_file(file, dispatch, config)
    assert {path.name for path in tmp_path.iterdir()} == {
        file.name, f"{kind}-state", f"{kind}-model", f"{kind}.jsonl"
    }  # fmt: skip
    assert events(tmp_path / f"{kind}.jsonl") == ["started", *["step"] * STEPS, "finished"]
    changed = [
        name for name, tensor in weights(tmp_path / f"{kind}-model").items() if (tensor != weights(model)[name]).any()
    ]
    assert len(changed) == len(weights(model))
    assert not dispatch.models


def test_supervised_jobs_learn_their_rows(dispatch: RankGroup, config: RunConfig, tmp_path: Path) -> None:
    schedule = {"steps": 12, "batch": 12, "optim": {"lr": 5e-3}}
    run_job_file(write_job(tmp_path, "sft", schedule=schedule), dispatch, config)
    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert losses[-1] < losses[0] - 1


def test_demonstrations_need_no_packed_rows(dispatch: RankGroup, tmp_path: Path) -> None:
    config = config_of(Path("tiny_qwen3"))
    model = config.model.model_copy(update={"init": "random", "max_length": 48})
    file = write_job(tmp_path, "sft", inputs={"kind": "demonstrations"})
    run_job_file(file, dispatch, config.model_copy(update={"model": model}))
    assert events(tmp_path / "sft.jsonl") == ["started", *["step"] * STEPS, "finished"]
    assert (tmp_path / "sft-model" / "tokenizer.json").exists()


REMEMBERED: list[torch.UntypedStorage] = []


def remember_storages(worker: ModelWorker) -> None:
    """The storages of a model and its moments: who holds them sees whether their bytes are given back."""
    assert worker.optimizer is not None
    REMEMBERED[:] = [
        local(each).untyped_storage() for each in (*worker.model.parameters(), *worker.optimizer.moments())
    ]


class Trace:
    """What was the case whenever one of the acts of a completion began."""

    def __init__(self, dispatch: RankGroup, data: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, dict[str, bool]]] = []
        self._dispatch, self._data, self._output = dispatch, data, output
        self._watch(monkeypatch, RankGroup, "save_hf_model", "export")
        self._watch(monkeypatch, execution, "release_device", "release")
        self._watch(monkeypatch, execution, "remove_packed", "remove data")
        self._watch(monkeypatch, JobLog, "write", "announce", only=lambda *args: args[1] == "finished")

    def _watch(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        act: str,
        only: Callable[..., bool] = lambda *args: True,
    ) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if only(*args):
                self.seen.append((act, self._situation()))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    def _situation(self) -> dict[str, bool]:
        if self._dispatch.models:
            self._dispatch.run_on_ranks("policy", remember_storages)
        held = sum(storage.nbytes() for storage in REMEMBERED)  # also when nobody else knows of them
        return {
            "mapped": str(self._data) in Path("/proc/self/maps").read_text(),
            "on device": held > 0,
            "data there": self._data.exists(),
            "model there": self._output.exists(),
        }


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_job_is_announced_when_nothing_is_held_any_more(
    kind: str, dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path, kind)
    trace = Trace(dispatch, tmp_path / f"{kind}-data", tmp_path / f"{kind}-model", monkeypatch)
    run_job_file(file, dispatch, config)

    def situation(mapped: bool, on_device: bool, data: bool, model: bool) -> dict[str, bool]:
        return {"mapped": mapped, "on device": on_device, "data there": data, "model there": model}

    assert trace.seen == [
        ("export", situation(mapped=False, on_device=True, data=True, model=False)),
        ("release", situation(mapped=False, on_device=True, data=True, model=True)),
        ("remove data", situation(mapped=False, on_device=False, data=True, model=True)),
        ("announce", situation(mapped=False, on_device=False, data=False, model=True)),
    ]


def test_a_rank_that_still_holds_memory_is_not_announced(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path, "sft")
    monkeypatch.setattr(ModelWorker, "discard", lambda worker: None)
    with pytest.raises(TrainingError, match=r"rank 0 still holds \d+ bytes of policy after the end of the job"):
        run_job_file(file, dispatch, config)
    assert events(tmp_path / "sft.jsonl")[-1] == "failed"
    assert (tmp_path / "sft-data").exists()


def crash_in(owner: Any, name: str, *, after: bool, at: int = 1) -> Callable[[pytest.MonkeyPatch], None]:
    """Crash at call number `at` of a function, before or after it did its work."""

    def arm(monkeypatch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(owner, name), []

        def crashing(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) == at and not after:
                raise Crash
            result = original(*args, **kwargs)
            if len(calls) == at:
                raise Crash
            return result

        monkeypatch.setattr(owner, name, crashing)

    return arm


CRASHES = {
    "before the first commit": crash_in(JobState, "save_checkpoint", after=False),
    "after the first commit": crash_in(JobState, "save_checkpoint", after=True),
    "after the last commit": crash_in(JobState, "save_checkpoint", after=True, at=2),
    "while the model is written": crash_in(RankGroup, "save_hf_model", after=True),
    "after the model has its name": crash_in(atomic_dirs, "replace", after=True),
    "before the data goes": crash_in(execution, "remove_packed", after=False),
    "after the data went": crash_in(execution, "remove_packed", after=True),
    "before the announcement": crash_in(JobLog, "write", after=False, at=STEPS + 2),
}


@pytest.fixture(scope="module")
def uninterrupted(dispatch: RankGroup, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a job that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_job_file(write_job(folder, "rl"), dispatch, config_of(model))
    return folder / "rl-model"


@pytest.mark.parametrize("point", CRASHES)
def test_a_job_that_crashed_before_its_announcement_is_done_when_it_runs_again(
    point: str, uninterrupted: Path, dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    file = write_job(tmp_path, "rl")
    with pytest.MonkeyPatch.context() as monkeypatch:
        CRASHES[point](monkeypatch)
        with pytest.raises(Crash):
            run_job_file(file, dispatch, config)
    assert "finished" not in events(tmp_path / "rl.jsonl")
    run_job_file(file, dispatch, config)
    assert events(tmp_path / "rl.jsonl")[-1] == "finished"
    assert_same(tmp_path / "rl-model", uninterrupted)
    assert not (tmp_path / "rl-data").exists()


def test_a_job_that_is_done_trains_nothing_when_it_runs_again(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    file = write_job(tmp_path, "sft")
    run_job_file(file, dispatch, config)
    run_job_file(file, dispatch, config)
    assert events(tmp_path / "sft.jsonl") == ["started", "finished"]


def test_a_file_that_is_written_anew_is_a_new_job(dispatch: RankGroup, config: RunConfig, tmp_path: Path) -> None:
    run_job_file(write_job(tmp_path, "sft"), dispatch, config)
    first = weights(tmp_path / "sft-model")
    run_job_file(write_job(tmp_path, "sft", checkpoint="sft-model"), dispatch, config)
    assert events(tmp_path / "sft.jsonl") == ["started", *["step"] * STEPS, "finished"]
    assert any((tensor != first[name]).any() for name, tensor in weights(tmp_path / "sft-model").items())
    assert {path.name for path in (tmp_path / "sft-state").iterdir()} == {"OWNER", "ancestry", "sft-6", "sft-8"}


def test_a_job_goes_on_with_the_moments_of_the_one_before_and_with_its_own_schedule(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_critic = config.model_copy(update={"loss": config.loss.model_copy(update={"advantage_estimator": "gae"})})
    seen: list[tuple[set[float], list[dict[str, int]]]] = []
    inherited = JobState.inherit

    def look(state: JobState) -> None:
        inherited(state)
        (taken,) = dispatch.run_on_ranks("policy", moments_taken)
        seen.append((taken, [dispatch.run_on_ranks(name, progress_of)[0] for name in ("policy", "critic")]))

    monkeypatch.setattr(JobState, "inherit", look)
    run_job_file(write_job(tmp_path, "rl", "first"), dispatch, with_critic)
    run_job_file(write_job(tmp_path, "rl", "second", checkpoint="first-model"), dispatch, with_critic)
    begun = [{"taken": 0, "skipped": 0}] * 2
    assert seen == [({0.0}, begun), ({float(STEPS)}, begun)]


def test_a_job_that_takes_over_moments_has_its_own_betas_epsilon_and_weight_decay(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_critic = config.model_copy(update={"loss": config.loss.model_copy(update={"advantage_estimator": "gae"})})
    run_job_file(write_job(tmp_path, "rl", "first"), dispatch, with_critic)
    seen: list[list[tuple[Any, ...]]] = []
    inherited = JobState.inherit

    def look(state: JobState) -> None:
        inherited(state)
        seen.extend(dispatch.run_on_ranks(name, settings_seen)[0] for name in ("policy", "critic"))

    monkeypatch.setattr(JobState, "inherit", look)
    optim = {"lr": 1e-3, "beta1": 0.5, "beta2": 0.75, "eps": 1e-4, "weight_decay": 0.25}
    schedule = {"steps": 1, "prompts": 3, "optim": optim}
    run_job_file(write_job(tmp_path, "rl", "second", schedule=schedule), dispatch, with_critic)
    assert seen == [[((0.5, 0.75), 1e-4, 0.25), ((0.5, 0.75), 1e-4, 0.0)]] * 2


@pytest.mark.parametrize(("moment_type", "shown"), [("bfloat16", "bfloat16"), ("float8", "float8_e4m3fn")])
def test_moments_of_another_type_are_refused_with_the_key_that_sets_it(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, moment_type: str, shown: str
) -> None:
    run_job_file(write_job(tmp_path, "rl", "first"), dispatch, config)
    halved = {"steps": 1, "prompts": 3, "optim": {"state_dtype": moment_type}}
    with pytest.raises(TrainingError, match=rf"exp_avg is {shown} .* and float32 .*; use .*optim\.state_dtype"):
        run_job_file(write_job(tmp_path, "rl", "second", schedule=halved), dispatch, config)


def settings_seen(worker: ModelWorker) -> list[tuple[Any, ...]]:
    """Of matrices, and of vectors."""
    assert worker.optimizer is not None
    return [(tuple(each["betas"]), each["eps"], each["weight_decay"]) for each in worker.optimizer.adamw.param_groups]


def progress_of(worker: ModelWorker) -> dict[str, int]:
    assert worker.optimizer is not None
    return worker.optimizer.progress()


def test_the_policy_of_a_job_is_its_checkpoint_whatever_its_state_holds(
    dispatch: RankGroup, config: RunConfig, model: Path, tmp_path: Path
) -> None:
    run_job_file(write_job(tmp_path, "rl", "first"), dispatch, config)
    still = {"steps": STEPS, "prompts": 3, "optim": {"lr": 1e-30}}
    run_job_file(write_job(tmp_path, "rl", "second", schedule=still), dispatch, config)
    assert_same(tmp_path / "second-model", model)


def test_the_states_of_sft_and_rl_are_not_mixed(dispatch: RankGroup, config: RunConfig, tmp_path: Path) -> None:
    run_job_file(write_job(tmp_path, "sft"), dispatch, config)
    with pytest.raises(CheckpointError, match="is the state of sft jobs; give this rl job another optimizer_state"):
        run_job_file(write_job(tmp_path, "rl", optimizer_state="sft-state"), dispatch, config)
    assert (tmp_path / "rl-data").exists()


def test_the_checkpoints_of_a_run_are_no_state_of_a_job(dispatch: RankGroup, config: RunConfig, tmp_path: Path) -> None:
    save(str(tmp_path / "run"), "1-0", TrainerState(job="sft", step=3), {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="holds the checkpoints of a run; give this job another optimizer_state"):
        run_job_file(write_job(tmp_path, "sft", optimizer_state="run"), dispatch, config)


def test_of_two_executions_of_a_job_the_earlier_one_may_write_no_more(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, commit = write_job(tmp_path, "sft"), JobState.save_checkpoint

    def overtaken(state: JobState, done: int) -> None:
        JobState(read_job(file), "another execution", dispatch).claim()
        commit(state, done)

    monkeypatch.setattr(JobState, "save_checkpoint", overtaken)
    with pytest.raises(CheckpointError, match="must write nothing more"):
        run_job_file(file, dispatch, config)
    assert (tmp_path / "sft-data").exists()
    assert not (tmp_path / "sft-model").exists()


def test_adapters_are_made_and_gone_on_from(dispatch: RankGroup, model: Path, tmp_path: Path) -> None:
    config = config_of(model, lora=2)
    run_job_file(write_job(tmp_path, "sft"), dispatch, config)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (tmp_path / "sft-model").iterdir()}
    run_job_file(write_job(tmp_path, "rl", checkpoint="sft-model"), dispatch, config)
    first, second = weights(tmp_path / "sft-model"), weights(tmp_path / "rl-model")
    assert first.keys() == second.keys()
    assert all(0 < abs(second[name] - first[name]).max() < 0.02 for name in first)


def test_a_queue_goes_on_after_a_failure_and_says_so_at_its_end(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    files = [
        write_job(tmp_path, "rl", "1", checkpoint="gone"),
        write_job(tmp_path, "sft", "2"),
        write_job(tmp_path, "sft", "3", checkpoint="1-model", optimizer_state="other-state"),
    ]
    for age, file in enumerate(files):
        os.utime(file, (1e9 + age, 1e9 + age))
    with pytest.raises(TrainingError, match=r"failed: 1\.json .*; 3\.json waits for .*1-model"):
        run_job_files(tmp_path, dispatch, config)
    assert (tmp_path / "failed" / "1.json").exists()
    assert "gone" in (tmp_path / "failed" / "1.error").read_text()
    assert (tmp_path / "1-data").exists()
    assert (tmp_path / "done" / "2.json").exists()
    assert (tmp_path / "3.json").exists()


@pytest.mark.trial
def test_two_ranks_are_killed_and_one_ends_the_job(model: Path, uninterrupted: Path, tmp_path: Path) -> None:
    file = write_job(tmp_path, "rl")
    ranks = start_ranks(2, execute_on_rank, file, model, True)
    try:
        wait_for("the ranks to be at the step", (tmp_path / KILLED_AT).exists, WAIT_SECONDS)
        for rank in ranks:
            assert rank.pid is not None
            os.kill(rank.pid, signal.SIGKILL)
    finally:
        end_ranks(ranks)
    assert events(tmp_path / "rl.jsonl")[-1] == "step"
    assert (tmp_path / "rl-data").exists()
    run_ranks(1, execute_on_rank, file, model)
    assert events(tmp_path / "rl.jsonl") == ["started", "step", "finished"]
    assert_same(tmp_path / "rl-model", uninterrupted, tolerance=1e-6)
