"""The directories of attached jobs: numbers, identities, indices."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RunStateError
from pipeline.run.paths import AttachedPaths, RunPaths
from pipeline.utils import shared_files
from slurm.registry import attached_jobs, run_registry
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo")


def test_jobs_are_numbered_and_their_servers_follow_those_before(run: FakeRun) -> None:
    config = make_config(resources={"inference": {"nodes": 2, "servers": 3}})
    own = run.config.resources.inference.nodes * run.config.resources.inference.servers
    for number in (1, 2):
        assert attached_jobs.next_number(run.paths) == number
        assert attached_jobs.first_index(run.paths, number) == own + 6 * (number - 1)
        attached_jobs.create_attached(run.paths, number, config)
    assert [job.number for job in attached_jobs.attached_jobs(run.paths)] == [1, 2]
    with pytest.raises(RunStateError, match="no other command that attaches job 2"):
        attached_jobs.create_attached(run.paths, 2, config)


def test_the_config_has_only_the_keys_that_the_run_s_own_code_knows(run: FakeRun) -> None:
    older = run.config.model_dump(mode="json")
    del older["cluster"]["max_jobs"]
    shared_files.write_document(run.paths.config, older)
    job = attached_jobs.create_attached(run.paths, 1, make_config(cluster={"scheduler": "slurm", "qos": "low"}))
    tree = shared_files.read_document(job.config, dict[str, Any])
    assert tree is not None
    assert "max_jobs" not in tree["cluster"]
    assert tree["cluster"]["qos"] == "low"
    assert tree.keys() == older.keys()


def test_a_directory_is_that_of_an_attached_job_only_below_a_run(run: FakeRun, tmp_path: Path) -> None:
    job = attached_jobs.create_attached(run.paths, 1, run.config)
    assert attached_jobs.paths_at(job.root) == job
    assert job.code == run.paths.code
    assert attached_jobs.paths_at(run.root) == run.paths
    assert not isinstance(attached_jobs.paths_at(tmp_path / "attached" / "1"), AttachedPaths)
    assert attached_jobs.title(job) == "demo, attached job 1"


def test_a_scheduler_s_attached_job_is_never_taken_for_the_run_s_own(run: FakeRun) -> None:
    scheduler = FakeScheduler()
    job = attached_jobs.create_attached(run.paths, 1, run.config)
    queued = scheduler.submit(comment=f"rollcall {run_registry.identity(job).run_id}")
    run_registry.record_job(job, "slurm", queued)
    live = run_registry.live_job(job, scheduler)
    assert live is not None
    assert live.id == queued
    assert run_registry.live_job(RunPaths(run.root), scheduler) is None


def test_a_job_that_is_recorded_as_ended_is_asked_for_no_more(run: FakeRun) -> None:
    jobs = [attached_jobs.create_attached(run.paths, number, run.config) for number in (1, 2)]
    attached_jobs.mark_ended(jobs[0])
    attached_jobs.mark_ended(jobs[0])
    assert attached_jobs.unfinished_jobs(run.paths) == [jobs[1]]
