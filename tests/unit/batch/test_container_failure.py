"""The reason why a container did not start: the lines of the runtimes, and the decision that follows."""

from pathlib import Path

import pytest

from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from slurm.batch.attempt_summary import AttemptSummary
from slurm.batch.container_failure import reason_in, with_container_failure
from tests.fakes.configs import make_config
from tests.fakes.requeued_job import Cluster, fail

LINES = {
    "rollcall: container: node n1: apptainer is not on PATH; exclude the node": "node n1: apptainer is not on PATH; "
    "exclude the node",
    "FATAL:   could not open image /x.sif: no such file": "FATAL: could not open image /x.sif: no such file",
    "[ERROR] No such file or directory: /x.sqsh": "[ERROR] No such file or directory: /x.sqsh",
    "slurmstepd-n1: error: pyxis:     [ERROR] Invalid image": "slurmstepd-n1: error: pyxis: [ERROR] Invalid image",
    "slurmstepd-n1: error: pyxis: couldn't start container": "slurmstepd-n1: error: pyxis: couldn't start container",
}


@pytest.mark.parametrize("line", LINES)
def test_each_runtime_names_its_reason_in_a_line(line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"INFO: starting\n{line}\nslurmstepd: error: pyxis: child failed\nsrun: error: task 0: Exited\n")
    assert reason_in(log) == LINES[line]


def test_an_earlier_attempts_reason_and_other_lines_are_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert reason_in(log) == ""
    log.write_text("FATAL:   old\nrollcall: attempt 7-0: requeued: FATAL: old\nsubmitit INFO - Job completed\n")
    assert reason_in(log) == ""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A job whose agents run in containers of apptainer."""
    begun = Cluster(tmp_path)
    tree = shared_files.read_document(begun.run.paths.config, dict)
    assert tree is not None
    tree["cluster"]["container"] = {"kind": "apptainer", "image": "x.sif"}
    shared_files.write_document(begun.run.paths.config, tree)
    return begun


def write_log(run: RunPaths, job: str, rank: int, text: str) -> None:
    folder = run.submitit / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job}_{rank}_log.out").write_text(text)


def test_an_image_that_starts_on_no_node_ends_the_job_with_its_reason(cluster: Cluster) -> None:
    paths = cluster.attempt()
    write_log(cluster.run.paths, cluster.job, 2, "FATAL:   could not open image x.sif\n")
    outcome = cluster.end(255)
    assert outcome.decision == "stopped"
    assert outcome.reason.startswith(
        "agent.2 on rank 2: its container did not start: FATAL: could not open image x.sif"
    )
    failure = shared_files.read_document(paths.first_failure, FirstFailure)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (2, 255)
    assert failure.log == str(cluster.run.paths.submitit / "slurm" / f"{cluster.job}_2_log.out")
    assert not cluster.scheduler.requeued


def test_a_node_without_a_container_beside_others_that_have_one_is_tried_again(cluster: Cluster) -> None:
    paths = cluster.attempt()
    paths.alive.mkdir(parents=True)
    for rank in (0, 1, 3):
        paths.sign_of_life(rank).touch()
    write_log(cluster.run.paths, cluster.job, 2, "rollcall: container: node n2: no /x.sif\n")
    outcome = cluster.end(127)
    assert (outcome.decision, outcome.failures) == ("requeued", 1)
    assert outcome.reason.startswith("agent.2 on rank 2: its container did not start: node n2: no /x.sif")


def test_the_record_of_an_agent_and_a_log_without_a_reason_count_as_before(cluster: Cluster) -> None:
    paths = cluster.attempt()
    fail(paths)
    write_log(cluster.run.paths, cluster.job, 0, "FATAL:   other\n")
    cluster.leave(paths)
    assert "trainer.0 on rank 1: exited with code 1" in cluster.end(1).reason


def test_an_agents_record_that_is_visible_late_stays(cluster: Cluster) -> None:
    paths, run = cluster.attempt(), cluster.run.paths
    write_log(run, cluster.job, 0, "FATAL:   other\n")
    container = {"kind": "apptainer", "image": "docker://x"}
    config = make_config(cluster={"scheduler": "slurm", "container": container})
    late = AttemptSummary(restart=0, code=1)
    fail(paths)
    assert with_container_failure(late, run, paths, config, 4) == late
    failure = shared_files.read_document(paths.first_failure, FirstFailure)
    assert failure is not None
    assert failure.role == "trainer.0"


def test_a_job_without_containers_reads_no_logs(tmp_path: Path) -> None:
    plain = Cluster(tmp_path)
    paths = plain.attempt()
    write_log(plain.run.paths, plain.job, 0, "FATAL:   other\n")
    assert "without an exit marker" in plain.end(255).reason
    assert not paths.first_failure.exists()
