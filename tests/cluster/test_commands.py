"""What a real Slurm says, read by `SlurmCommands`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, SchedulerError
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import make_plan
from pipeline.utils.waiting import wait_for
from slurm.batch.site_checks import check_site, warnings
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import Nodes, Partition, QueuedJob
from slurm.scheduler.slurm.batch_file import batch_file
from slurm.scheduler.slurm.slurm_commands import SlurmCommands
from slurm.submission.compose_config import compose_config
from tests.cluster.slurm_cluster import SlurmCluster
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.cluster

HET = "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2 --gpus-per-node=2\nexec sleep 600"


@pytest.fixture(autouse=True)
def no_job_left(cluster: SlurmCluster) -> Iterator[None]:
    """A test that fails must not take the nodes of the next."""
    yield
    cluster.clear()


@pytest.fixture
def slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    """Slurm's commands, pointed at the test's cluster."""
    point_at(cluster, monkeypatch)
    return SlurmCommands()


def point_at(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])


def asked(slurm: SlurmCommands, job: str) -> QueuedJob:
    found = slurm.job(job)
    assert found is not None
    return found


def wait_until(slurm: SlurmCommands, job: str, state: str, seconds: float = 30) -> QueuedJob:
    wait_for(f"job {job} to be {state}", lambda: asked(slurm, job).state == state, seconds)
    return asked(slurm, job)


def check(slurm: SlurmCommands, folder: Path, *overrides: str) -> None:
    """Check the demo at this site with its real batch file."""
    config = compose_config(["experiment=demo", "cluster=slurm", "task.processes=1", f"output={folder}", *overrides])
    plan, run = make_plan(config), RunPaths(config.directory)
    text = batch_file(config, plan, run, run_id="demo-1", folder=run.submitit, python="python", command="true")
    check_site(config, plan, slurm, text)


def test_partitions_are_what_the_cluster_was_configured_with(slurm: SlurmCommands) -> None:
    nodes = (Nodes(4, {"": 2}),)
    assert slurm.partitions() == [
        Partition(name, name == "low", True, 4, "2×GPU", "infinite", nodes) for name in ("low", "grace", "high")
    ]


def test_a_partition_that_is_down_and_nodes_that_are_drained_show(cluster: SlurmCluster, slurm: SlurmCommands) -> None:
    cluster.run("scontrol", "update", "partition=grace", "state=down", "maxtime=12:00:00")
    cluster.run("scontrol", "update", "node=node[0-1]", "state=drain", "reason=test")
    try:
        low, grace, _ = slurm.partitions()
        assert (grace.up, grace.time_limit) == (False, "12:00:00")
        assert (low.up, low.nodes, sum(nodes.down for nodes in low.kinds)) == (True, 4, 2)
    finally:
        cluster.run("scontrol", "update", "node=node[0-1]", "state=resume")
        cluster.run("scontrol", "update", "partition=grace", "state=up", "maxtime=infinite")


def test_a_job_is_known_from_the_queue_to_its_end_and_after(
    cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    script = f"until [ -e {done} ]; do sleep 0.1; done"
    job = cluster.submit(script, "--job-name=demo", "--comment=rollcall demo-1f3a", "--hold")
    pending = asked(slurm, job)
    assert (pending.id, pending.name, pending.state, pending.reason) == (job, "demo", "PENDING", "JobHeldUser")
    assert (pending.comment, pending.restarts) == ("rollcall demo-1f3a", 0)
    assert pending.user == cluster.run("id", "--user", "--name")
    cluster.run("scontrol", "release", job)
    assert wait_until(slurm, job, "RUNNING").live
    done.touch()
    assert not wait_until(slurm, job, "COMPLETED").live
    assert slurm.job("99999999") is None


def test_a_job_that_failed_is_over(cluster: SlurmCluster, slurm: SlurmCommands) -> None:
    job = cluster.submit("exit 3")
    assert not wait_until(slurm, job, "FAILED").live


def test_a_requeued_job_pends_and_counts_and_cannot_be_requeued_twice(
    cluster: SlurmCluster, slurm: SlurmCommands
) -> None:
    job = cluster.submit("exec sleep 600", "--requeue")
    wait_until(slurm, job, "RUNNING")
    slurm.requeue(job)
    wait_for("the job to pend", lambda: asked(slurm, job).state == "PENDING", WAIT_SECONDS)
    with pytest.raises(SchedulerError, match=f"^scontrol requeue {job}: Job is pending execution for job {job}$"):
        slurm.requeue(job)
    assert wait_until(slurm, job, "RUNNING").restarts == 1
    slurm.cancel(job)
    assert not wait_until(slurm, job, "CANCELLED").live
    slurm.cancel(job)


def test_a_job_that_ends_slowly_is_completing_and_live_until_it_is_gone(
    cluster: SlurmCluster, slurm: SlurmCommands
) -> None:
    job = cluster.submit("trap : TERM; echo ready; for i in 1 2 3 4 5 6; do sleep 0.5; done", "--requeue")
    output = cluster.root / f"{job}.out"
    wait_for("the job to trap TERM", lambda: output.exists() and "ready" in output.read_text(), WAIT_SECONDS)
    slurm.cancel(job)
    assert (asked(slurm, job).state, asked(slurm, job).live) == ("COMPLETING", True)


def test_an_unknown_job_cannot_be_requeued(slurm: SlurmCommands) -> None:
    with pytest.raises(SchedulerError, match=r"^scontrol requeue 99999999: Invalid job id specified"):
        slurm.requeue("99999999")


def test_a_heterogeneous_job_is_its_leader(cluster: SlurmCluster, slurm: SlurmCommands) -> None:
    job = cluster.submit(HET, "--job-name=het", "--comment=rollcall het-1f3a")
    assert wait_until(slurm, job, "RUNNING").id == job
    assert [found.id for found in slurm.jobs_with("het-1f3a")] == [job]


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("--nodes=4 --gpus-per-node=2", ""),
        ("--nodes=9", "Requested node configuration is not available"),
        ("--partition=nope", "invalid partition specified: nope; Invalid partition name specified"),
        ("--constraint=foo", "Invalid feature specification"),
        ("--nodelist=node9", "Invalid node name specified"),
        ("--time=2h", "Invalid --time specification"),
    ],
)
def test_a_batch_file_is_tried_out_and_never_queued(
    line: str, refusal: str, cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path
) -> None:
    file = tmp_path / "job.sh"
    file.write_text(f"#!/bin/bash\n#SBATCH {line}\nsleep 60\n")
    assert slurm.test_only(file) == refusal
    assert cluster.run("squeue", "--noheader") == ""


def test_a_heterogeneous_batch_file_is_tried_out_too(slurm: SlurmCommands, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(f"#!/bin/bash\n{HET}\n")
    assert slurm.test_only(file) == ""
    file.write_text(f"#!/bin/bash\n{HET.replace('gpus-per-node=2', 'gpus-per-node=3')}\n")
    assert slurm.test_only(file) == "Requested node configuration is not available"


@pytest.mark.parametrize("hetjob", ["false", "true"])
def test_the_demo_with_gpus_passes_all_checks_and_is_not_queued(
    hetjob: str, cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path
) -> None:
    gpus = ["resources.trainer.gpus=1", "resources.inference.gpus=1"]
    check(slurm, tmp_path, f"resources.hetjob={hetjob}", "cluster.time=1-0", "cluster.account=any", *gpus)
    assert cluster.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.partition=hihg"], r"partition='hihg': .*\(grace, high, low\); did you mean high\?"),
        (["resources.inference.nodes=9"], "at most 4, the nodes of partition low"),
        (["resources.inference.gpus=3"], "at most 2 GPUs for each node"),
        (["resources.inference.gpus=1", "cluster.gpu_type=h100"], "GPUs of partition low have no type"),
        (["cluster.constraint=foo"], "Slurm accepts; its refusal: Invalid feature specification"),
        (["cluster.memory=900G"], "Slurm accepts; its refusal: Requested node configuration is not available"),
    ],
)
def test_what_this_site_does_not_have_is_refused_and_nothing_is_queued(
    overrides: list[str], said: str, cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(slurm, tmp_path, *overrides)
    assert cluster.run("squeue", "--noheader") == ""


def test_with_nodes_drained_a_job_that_will_fit_again_is_not_refused(
    cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path
) -> None:
    cluster.run("scontrol", "update", "node=node[0-3]", "state=drain", "reason=test")
    try:
        check(slurm, tmp_path)
        job = cluster.submit("true", "--nodes=4")
        assert asked(slurm, job).state == "PENDING", "the submission itself takes it"
        slurm.cancel(job)
    finally:
        cluster.run("scontrol", "update", "node=node[0-3]", "state=resume")


def test_limits_and_accounts_are_what_the_cluster_says(slurm: SlurmCommands) -> None:
    assert slurm.kill_wait() == 30
    assert slurm.accounts() is None
    config = compose_config(["experiment=demo", "cluster=slurm", "cluster.grace_seconds=25"])
    assert "kills a job 30 s after" in warnings(config, slurm)[0]


def test_a_run_is_kept_by_its_job_until_that_is_over(
    cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path
) -> None:
    config = compose_config(["experiment=demo", "cluster=slurm", f"output={tmp_path}"])
    with run_registry.claimed_run(config) as run:
        comment = f"rollcall {run_registry.identity(run).run_id}"
        job = cluster.submit("exec sleep 600", "--job-name=demo", f"--comment={comment}")
        run_registry.record_job(run, "slurm", job)
    running = wait_until(slurm, job, "RUNNING")
    assert run_registry.live_job(run, slurm) == running
    record = run.job.read_bytes()
    run.job.unlink()
    assert run_registry.live_job(run, slurm) == running, "its comment names the run"
    run.job.write_bytes(record)
    with pytest.raises(ConfigError, match=rf"Slurm job {job} of \w+ is RUNNING"):
        run_registry.examine(config)
    slurm.cancel(job)
    wait_until(slurm, job, "CANCELLED")
    assert run_registry.live_job(run, slurm) is None
    assert run_registry.examine(config) == run


def test_a_controller_that_is_down_is_said_and_takes_no_job_for_dead(
    cluster: SlurmCluster, slurm: SlurmCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, impatient = tmp_path / "job.sh", tmp_path / "slurm.conf"
    file.write_text("#!/bin/bash\n")
    impatient.write_text((cluster.root / "slurm.conf").read_text() + "MessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(impatient))
    cluster.stop_controller()
    try:
        with pytest.raises(SchedulerError, match=r"^scontrol .* show job 1: .*Unable to contact slurm controller"):
            slurm.job("1")
        with pytest.raises(SchedulerError, match=r"^sbatch --test-only .*: .*Unable to contact slurm controller"):
            slurm.test_only(file)
        with pytest.raises(ConfigError, match=r"a scheduler that answers; sinfo .*Unable to contact slurm controller"):
            check(slurm, tmp_path)
    finally:
        cluster.start_controller()
