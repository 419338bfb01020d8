"""The cluster that the tests start is a real one: what the other cluster tests rely on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.utils.waiting import wait_for
from tests.cluster import keeper
from tests.cluster.slurm_cluster import SlurmCluster
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def no_job_left(cluster: SlurmCluster) -> Iterator[None]:
    """A test that fails must not take the nodes of the next."""
    yield
    cluster.clear()


def test_a_step_runs_on_four_nodes_and_sees_the_gpus_that_it_was_given(cluster):
    shown = cluster.run("srun", "-N4", "--gpus-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES")
    assert sorted(shown.splitlines()) == [f"node{node} 0,1" for node in range(4)]


def test_a_job_with_one_gpu_does_not_get_the_one_that_another_holds(cluster):
    options = ("--nodelist=node0", "--gpus-per-node=1")
    jobs = [cluster.submit("echo $CUDA_VISIBLE_DEVICES; exec sleep 600", *options) for _ in range(2)]
    files = [cluster.root / f"{job}.out" for job in jobs]
    wait_for("both jobs to speak", lambda: all(file.exists() and file.read_text() for file in files), WAIT_SECONDS)
    assert sorted(file.read_text().strip() for file in files) == ["0", "1"]


def test_a_requeued_job_keeps_its_id_and_counts_its_restarts(cluster):
    job = cluster.submit("echo life ${SLURM_RESTART_COUNT:-0}; exec sleep 600", "--requeue")
    cluster.wait_for_state(job, "RUNNING", WAIT_SECONDS)
    output = cluster.root / f"{job}.out"
    wait_for("the first life to speak", lambda: output.exists() and "life 0" in output.read_text(), WAIT_SECONDS)
    cluster.run("scontrol", "requeue", job)
    wait_for("the second life to speak", lambda: "life 1" in output.read_text(), WAIT_SECONDS)
    assert cluster.wait_for_restart(job, 1, 1)["Restarts"] == "1"


def test_a_job_in_the_high_partition_takes_the_nodes_of_one_in_the_low_partition(cluster):
    low = cluster.submit("exec sleep 600", "--partition=low", "--nodes=4", "--exclusive", "--requeue")
    cluster.wait_for_state(low, "RUNNING", WAIT_SECONDS)
    high = cluster.submit("sleep 1", "--partition=high", "--nodes=4", "--exclusive")
    cluster.wait_for_state(high, "COMPLETED", WAIT_SECONDS)
    assert cluster.wait_for_state(low, "RUNNING", WAIT_SECONDS)["Restarts"] == "1"


def test_waiting_for_a_state_ends_when_the_job_ended_otherwise(cluster):
    job = cluster.submit("exit 3")
    with pytest.raises(AssertionError, match=f"job {job} became FAILED"):
        cluster.wait_for_state(job, "COMPLETED", WAIT_SECONDS)


def test_a_refused_command_is_an_error_that_tells_why(cluster):
    with pytest.raises(AssertionError, match="invalid partition specified: nowhere"):
        cluster.submit("true", "--partition=nowhere")


def test_jobs_outlive_a_controller_that_goes_and_comes_back(cluster):
    job = cluster.submit("exec sleep 600")
    cluster.wait_for_state(job, "RUNNING", WAIT_SECONDS)
    cluster.stop_controller()
    with pytest.raises(AssertionError, match="Unable to contact slurm controller"):
        cluster.run("squeue")
    cluster.start_controller()
    wait_for("the controller to answer", lambda: "UP" in _ping(cluster), WAIT_SECONDS)
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_node_that_loses_power_takes_its_processes_along_and_its_job_starts_elsewhere(cluster):
    # The connection of srun is reset with the node: what it makes of that must not end the job before Slurm does.
    job = cluster.submit("srun --input=none sleep 120 || exec sleep 120", "--nodes=2", "--requeue")
    lost = cluster.nodes_of(cluster.wait_for_state(job, "RUNNING", WAIT_SECONDS))[-1]
    running = wait_for("the step to run there", lambda: _with_name(cluster.processes(lost), "sleep"), WAIT_SECONDS)
    cluster.lose_node(lost)
    assert not any(map(_exists, running))
    cluster.wait_for_restart(job, 1, 90)
    assert lost not in cluster.nodes_of(cluster.wait_for_state(job, "RUNNING", WAIT_SECONDS))
    cluster.start_node(lost)


def test_a_daemon_of_a_node_that_crashes_is_started_again_and_its_job_goes_on(cluster):
    job = cluster.submit("exec sleep 600")
    node = cluster.nodes_of(cluster.wait_for_state(job, "RUNNING", WAIT_SECONDS))[0]
    crashed = cluster.processes(node)[0]
    os.kill(crashed, signal.SIGABRT)

    def daemons():
        return [
            line for line in cluster.commands(f"node{node}") if "slurmd" in line and not line.startswith(f"{crashed} ")
        ]

    wait_for("another slurmd", daemons, WAIT_SECONDS)
    cluster.run("scancel", job)
    cluster.wait_until_idle()  # only a node whose slurmd answers ends a job
    assert cluster.job(job)["Restarts"] == "0"
    described = cluster.describe()
    assert "keeper: slurmd crashed (SIGABRT) and is started again" in described
    assert f"node{node} idle none" in described


def test_nothing_is_left_of_a_closed_cluster_not_even_what_left_its_session(requires_slurm, tmp_path):
    with SlurmCluster(tmp_path / "slurm", nodes=1) as cluster:
        cluster.submit("setsid sleep 100 & trap '' TERM; srun setsid sleep 100")
        stray = wait_for("both to sleep", lambda: _two(_with_name(cluster.processes(0), "sleep")), WAIT_SECONDS)
        assert len(cluster.processes_left()) >= len(stray)
    assert not any(map(_exists, stray))
    assert cluster.processes_left() == []


def test_a_cluster_ends_with_the_process_that_started_it(requires_slurm, tmp_path):
    program = f"""
import pathlib, signal
from tests.cluster.slurm_cluster import SlurmCluster
cluster = SlurmCluster(pathlib.Path({str(tmp_path / "slurm")!r}), nodes=1).__enter__()
cluster.wait_for_state(cluster.submit("exec sleep 100"), "RUNNING", 120)
print("up", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "up\n"
        below = keeper.descendants(starter.pid)
        assert len(below) > 3
        starter.kill()
    wait_for("everything to end", lambda: not any(map(_exists, below)), WAIT_SECONDS)


def _ping(cluster):
    try:
        return cluster.run("scontrol", "ping")
    except AssertionError:
        return ""


def _exists(pid):
    return Path(f"/proc/{pid}").exists()


def _with_name(pids, name):
    def command(pid):
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return ""

    return [pid for pid in pids if command(pid) == name]


def _two(found):
    return found if len(found) == 2 else None
