"""Attaching and detaching, up to the start of the job: what is refused, and what the job would be."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from slurm.registry import attached_jobs, run_registry
from slurm.scheduler.scheduler_protocol import RUNNING
from slurm.submission import attach_servers, detach_servers
from slurm.submission.attach_servers import Request, attach, attached_config, read_request
from slurm.submission.cancel_runs import cancel
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.fakes.scheduler import FakeScheduler, make_partition

QUEUED = {"scheduler": "slurm", "partition": "main", "fs_visibility_seconds": 0}


def make_run(root: Path, **sections: object) -> FakeRun:
    run = FakeRun(root / "demo", make_config(**{"name": "demo", "cluster": QUEUED, **sections}))
    entrance = run.paths.code / "slurm" / "agent" / "attached_agent.py"
    entrance.parent.mkdir(parents=True)
    entrance.touch()
    return run


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return make_run(tmp_path)


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(make_partition("main", default=True), make_partition("spot"))


def queued(run: FakeRun, scheduler: FakeScheduler) -> str:
    job = scheduler.submit("demo", comment=f"rollcall {run.identity.run_id}", state=RUNNING)
    run_registry.record_job(run.paths, "slurm", job)
    return job


def a_request(run: FakeRun, servers: int = 2, nodes: int = 0, *overrides: str, dry_run: bool = True) -> Request:
    return Request(run.paths, servers, nodes, overrides, dry_run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["servers=2"], "run='': expected the name or directory of a running run; run=demo"),
        (["run=nowhere", "servers=2"], "expected a run directory"),
        (["run={run}"], "servers='': expected a number from 1 to 1024; servers=2"),
        (["run={run}", "servers=0"], "servers='0': expected a number from 1 to 1024"),
        (["run={run}", "servers=5000"], "servers='5000': expected a number from 1 to 1024"),
        (["run={run}", "servers=two"], "servers='two': expected a whole number"),
        (["run={run}", "servers=2", "model.path=other"], "all else is that of the run, whose weights the servers get"),
        (
            ["run={run}", "servers=2", "cluster.scheduler=local"],
            "expected run=, servers=, nodes= or a key of the job",
        ),
        (["run={run}", "servers=2", "--detach"], "option='--detach': expected --dry-run"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    arguments: list[str], said: str, run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attach_servers.main([text.format(run=run.root) for text in arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert said in error
    assert not run.paths.attached.exists()


def test_only_a_live_run_with_rollouts_gets_servers(run: FakeRun, tmp_path: Path, scheduler: FakeScheduler) -> None:
    with pytest.raises(ConfigError, match="expected a run whose job is queued or runs; submit it first"):
        attach(a_request(run), lambda _: scheduler)
    queued(run, scheduler)
    run.finish(1)
    with pytest.raises(ConfigError, match="expected a run that is not finished"):
        attach(a_request(run), lambda _: scheduler)
    (tmp_path / "sft").mkdir()
    alone = make_run(tmp_path / "sft", training={"steps": 0, "prompts_per_step": 1, "sft": {"steps": 3}})
    with pytest.raises(ConfigError, match="expected a run that trains by RL"):
        attach(a_request(alone), lambda _: scheduler)


def test_a_run_whose_code_is_older_is_refused(run: FakeRun, scheduler: FakeScheduler) -> None:
    queued(run, scheduler)
    (run.paths.code / "slurm" / "agent" / "attached_agent.py").unlink()
    with pytest.raises(ConfigError, match="its code is older than attached servers"):
        attach(a_request(run), lambda _: scheduler)


def test_an_unknown_partition_is_refused_before_anything_is_written(run: FakeRun, scheduler: FakeScheduler) -> None:
    queued(run, scheduler)
    with pytest.raises(ConfigError, match=r"cluster.partition='sopt'"):
        attach(a_request(run, 2, 0, "cluster.partition=sopt"), lambda _: scheduler)
    assert not run.paths.attached.exists()


def test_a_dry_run_shows_a_job_of_servers_alone(
    run: FakeRun, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    queued(run, scheduler)
    assert attach(a_request(run, 2, 1, "cluster.partition=spot"), lambda _: scheduler) == 0
    said = capsys.readouterr().out
    assert "demo: attached job 1\n  rank 0: inference.1, inference.2\n" in said
    assert "#SBATCH --job-name=demo-attached-1\n" in said
    assert "#SBATCH --partition=spot\n" in said
    assert "#SBATCH --nodes=1\n" in said
    assert not run.paths.attached.exists()


@pytest.mark.parametrize(
    ("servers", "nodes", "shape"), [(1, 0, (1, 1)), (2, 0, (1, 2)), (4, 0, (2, 2)), (4, 1, (1, 4)), (4, 4, (4, 1))]
)
def test_servers_are_spread_as_those_of_the_run_unless_nodes_are_named(
    servers: int, nodes: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    run = make_run(tmp_path, resources={"inference": {"nodes": 3, "servers": 2}, "spare_nodes": 1})
    resources = attached_config(run.config, 1, a_request(run, servers, nodes)).resources
    assert (resources.inference.nodes, resources.inference.servers) == shape
    assert resources.spare_nodes == 0


def test_a_partition_is_refused_on_one_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path, cluster={"scheduler": "local"})
    with pytest.raises(ConfigError, match="expected nothing, on one machine"):
        attached_config(run.config, 1, a_request(run, 2, 1, "cluster.partition=spot"))


def test_a_number_of_servers_that_nodes_cannot_share_evenly_is_refused(run: FakeRun) -> None:
    with pytest.raises(ConfigError, match="expected a multiple of 2, the number of nodes"):
        attached_config(run.config, 1, a_request(run, 3, 2))


def test_detaching_ends_the_attached_jobs_and_cancelling_the_run_ends_all(
    run: FakeRun, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, jobs = queued(run, scheduler), []
    for number in (1, 2, 3):
        attached = attached_jobs.create_attached(run.paths, number, run.config)
        comment = f"rollcall {run_registry.identity(attached).run_id}"
        jobs.append(scheduler.submit("demo-attached", comment=comment, state=RUNNING))
        run_registry.record_job(attached, "slurm", jobs[-1])
    monkeypatch.setattr(detach_servers, "connect_scheduler", lambda _: scheduler)
    assert detach_servers.main([f"run={run.root}", "job=7"]) == 2
    assert "there are: 1, 2, 3" in capsys.readouterr().err
    assert detach_servers.main([f"run={run.root}", "job=2"]) == 0
    assert scheduler.cancelled == [jobs[1]]
    assert capsys.readouterr().out.splitlines()[-1] == "demo, attached job 2: over"
    assert cancel([run.paths], lambda _: scheduler) == 0
    assert scheduler.cancelled == [jobs[1], own, jobs[0], jobs[2]]
    assert detach_servers.main([f"run={run.root}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to detach: no attached job of demo is live"


def test_a_killed_job_is_nothing_to_detach(
    run: FakeRun, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has recorded no end, and the scheduler has no live job for it."""
    run_registry.record_job(attached_jobs.create_attached(run.paths, 1, run.config), "slurm", "99")
    monkeypatch.setattr(detach_servers, "connect_scheduler", lambda _: scheduler)
    assert detach_servers.main([f"run={run.root}"]) == 0
    assert capsys.readouterr().out == "nothing to detach: no attached job of demo is live\n"


def test_a_request_reads_every_argument(run: FakeRun) -> None:
    arguments = [f"run={run.root}", "servers=4", "nodes=2", "--dry-run", "cluster.qos=low"]
    assert read_request(arguments) == a_request(run, 4, 2, "cluster.qos=low")
