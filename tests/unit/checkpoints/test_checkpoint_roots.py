"""Where a run keeps its checkpoints: one rule for whoever writes them and whoever looks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from pipeline.checkpoints import Fence, TrainerState, log_newest, newest_checkpoint, recorded_root, root_of
from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.config import RunConfig
from pipeline.config.cross_checks import check_config
from pipeline.errors import CheckpointError, ConfigError
from pipeline.observability.report_page import page
from pipeline.observability.run_history import read_history
from pipeline.topology.plan import World
from slurm.agent.agent import _finish
from slurm.batch.attempt_summary import summarize_attempt
from slurm.submission.cancel_runs import _over
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

URL = "memory://bucket/ours/"


def config_with(url: str) -> RunConfig:
    training = {"steps": 1, "prompts_per_step": 1, "checkpoints": url}
    return make_config(model={"path": "tiny_qwen3", "init": "random"}, training=training)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    """A run with its checkpoints elsewhere."""
    yield FakeRun(tmp_path / "run", config_with(URL))
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def save(root: str, step: int, attempt: str) -> None:
    complete_checkpoint(Storage(root), TrainerState(job="rl", step=step), attempt, {}, 1)


def test_without_a_url_they_are_in_the_run_directory(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    assert recorded_root(run.paths) == root_of(run.config, run.paths, "run-1") == f"{tmp_path}/run/checkpoints"


def test_below_a_url_each_run_has_a_folder_of_its_own(run: FakeRun, tmp_path: Path) -> None:
    assert recorded_root(run.paths) == f"memory://bucket/ours/{run.identity.run_id}"
    assert recorded_root(run.paths) == root_of(run.config, run.paths, run.identity.run_id)
    other = FakeRun(tmp_path / "other", run.config)
    assert recorded_root(other.paths) != recorded_root(run.paths)


def test_a_run_that_does_not_say_who_it_is_has_no_folder_there(run: FakeRun) -> None:
    run.paths.run.unlink()
    with pytest.raises(CheckpointError, match=r"run.json cannot be read"):
        recorded_root(run.paths)


def test_the_requeue_and_people_and_the_fence_look_at_the_url(run: FakeRun) -> None:
    root, paths = recorded_root(run.paths), run.attempt("12-0").paths
    assert _over(run.paths) == "run: over; it had no checkpoint yet"
    Fence(root, "12-0").claim()
    save(root, 3, "12-0")
    facts = summarize_attempt(run.paths, paths, restart=0, ranks=1, code=1, late=0.0)
    assert (facts.advanced, facts.trained) == (True, True)
    assert _over(run.paths) == f"run: over; it can be resumed from {Storage(root).url('rl-3/12-0')}"
    assert f"checkpoints in {root}" in page(read_history(run.paths.root, alive=False))
    Fence(root, "12-1").claim()
    world = World(run_id="r", attempt="12-0", epoch=1, leader=0, secret="s", placements=())
    with pytest.raises(CheckpointError, match="attempt 12-1 has taken over memory://"):
        _finish(run.paths, paths, run.config, world)
    assert not run.paths.checkpoints.exists()


def test_a_place_that_cannot_be_reached_is_told_and_is_no_error(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", config_with("nowhere://x"))
    assert log_newest(run.paths, "resumes from {}", "starts over").startswith(
        "its checkpoints cannot be seen from here"
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nowhere://x", "Protocol not known: nowhere"),
        ("checkpoints", "or an absolute path, that all nodes see alike"),
        ("memory://x", "or an absolute path, that all nodes see alike"),
    ],
)
def test_an_address_that_cannot_work_is_refused_before_the_run_is_submitted(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_config(config_with(url))
    assert refused.value.key == "training.checkpoints"


def test_a_missing_driver_is_named_before_the_run_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="gcsfs"):
        check_config(config_with("gs://bucket/folder"))


@pytest.mark.parametrize("url", ["", "/scratch/checkpoints", "file:///scratch/checkpoints", "s3://bucket/folder"])
def test_addresses_that_can_work_are_taken(url: str) -> None:
    check_config(config_with(url))


def test_nothing_is_found_in_the_folder_of_another_run(run: FakeRun, tmp_path: Path) -> None:
    save(recorded_root(run.paths), 3, "12-0")
    other = FakeRun(tmp_path / "other", run.config)
    assert newest_checkpoint(recorded_root(run.paths)) is not None
    assert newest_checkpoint(recorded_root(other.paths)) is None
