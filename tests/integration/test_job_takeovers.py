"""Two executions of one job, as when a node that was cut off works on: the later one owns everything."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import SupersededError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.offline import job_execution as execution
from pipeline.train.offline.job_execution import run_job_files
from pipeline.train.offline.job_resume import JobState
from pipeline.train.train_jobs import read_job
from pipeline.utils import atomic_dirs
from tests.support.models.jobs import STEPS, events, write_job

pytestmark = pytest.mark.integration
SHORT = {"steps": 1, "batch": 2, "optim": {"lr": 1e-3}}


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those of parts, which belong to one execution each."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if ".part-" not in name}


@pytest.mark.parametrize(
    ("owner", "act", "after"),
    [
        (JobState, "save_checkpoint", False),
        (RankGroup, "save_hf_model", True),
        (execution, "release_device", True),
        (execution, "remove_packed", True),
    ],
)
def test_an_execution_that_is_overtaken_leaves_log_model_data_and_queue_alone(
    owner: Any,
    act: str,
    after: bool,
    dispatch: RankGroup,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, before, original = (
        read_job(write_job(tmp_path, "sft", schedule=SHORT)),
        dict[str, bytes](),
        getattr(owner, act),
    )

    def overtake() -> None:
        JobState(job, "the later execution", dispatch).claim()
        before.update(contents(tmp_path))

    def overtaken(*args: Any) -> Any:
        if not after and not before:
            overtake()
        result = original(*args)
        if after and not before:
            overtake()
        return result

    monkeypatch.setattr(owner, act, overtaken)
    with pytest.raises(SupersededError, match="must write nothing more"):
        run_job_files(tmp_path, dispatch, config)
    assert contents(tmp_path) == before
    assert not dispatch.models


def test_an_execution_that_fails_by_what_a_later_one_did_is_no_failure_of_the_job(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path
) -> None:
    write_job(tmp_path, "sft")
    pulses = iter(range(STEPS))

    def pulse() -> None:
        if next(pulses) == 2:
            for name in list(dispatch.models):
                dispatch.remove_model(name)  # the world has one process: the later execution is in this one too
            run_job_files(tmp_path, dispatch, config)

    with pytest.raises(SupersededError):
        run_job_files(tmp_path, dispatch, config, pulse)
    assert events(tmp_path / "sft.jsonl") == ["started", *["step"] * (STEPS - 2), "finished"]
    assert (tmp_path / "done" / "sft.json").exists()
    assert not (tmp_path / "failed").exists()
    assert not (tmp_path / "sft-data").exists()


def test_an_execution_takes_the_right_to_write_before_it_mends_a_model(
    dispatch: RankGroup, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, "sft")

    def hint(path: Path) -> None:
        assert (tmp_path / "sft-state" / "OWNER").exists()
        raise Interrupted("that is all there is to see")

    monkeypatch.setattr(atomic_dirs, "repair", hint)
    with pytest.raises(Interrupted):
        run_job_files(tmp_path, dispatch, config)
