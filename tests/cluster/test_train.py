"""Jobs that stand alone, on a node of a real Slurm.

python -m pytest -m "cluster and trial" tests/cluster/test_train.py trains real models there, and waits for requeues.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.system.waiting import wait_for
from slurm.launch.train import submit
from tests.cluster.one_rank import OneRank
from tests.cluster.slurm_cluster import SlurmCluster
from tests.fakes.configs import make_config
from tests.integration.job_cases import STEPS, events, write_job, write_model
from tests.integration.launched import ROOT
from tests.patience import WAIT_SECONDS

pytestmark = [pytest.mark.cluster]


def train(slurm: SlurmCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launchers" / "train.py"), *arguments, "cluster=slurm"]
    env = os.environ | {"SLURM_CONF": slurm.env["SLURM_CONF"], "SLURM_NTASKS": "17", "SBATCH_PARTITION": "no-such"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.trial
def test_a_job_is_executed_on_a_node_and_told_here(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    (tmp_path / "jobs").mkdir()
    write_job(tmp_path / "jobs", "sft")
    settings = (f"model.path={tmp_path / 'base'}", "model.init=pretrained", "model.max_length=48")
    ended = train(cluster, str(tmp_path / "jobs"), *settings)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stdout.startswith("submitted job ")
    assert f"sft: step {STEPS} of {STEPS}" in ended.stdout
    assert events(tmp_path / "jobs" / "sft.jsonl")[-1] == "finished"
    assert (tmp_path / "jobs" / "done" / "sft.json").exists()


@pytest.mark.trial
def test_a_job_that_fails_on_its_node_fails_here_with_its_reason(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    file = write_job(tmp_path, "rl", checkpoint="gone")
    ended = train(cluster, str(file), f"model.path={tmp_path / 'base'}", "model.init=pretrained", "model.max_length=48")
    assert ended.returncode == 1
    assert "rl: failed CheckpointError: checkpoint" in ended.stdout
    assert (tmp_path / "rl-data").exists()


def test_what_slurm_refuses_is_said(cluster: SlurmCluster, tmp_path: Path) -> None:
    file = write_job(tmp_path, "sft")
    ended = train(cluster, str(file), "cluster.partition=no-such-partition")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: sbatch refused the job: ")


@pytest.fixture
def here(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process submits to the cluster, from the project's folder."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    monkeypatch.chdir(ROOT)


def test_a_job_that_ends_on_its_node_is_followed_to_its_end(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job(tmp_path, "sft")
    file.with_suffix(".begun").touch()
    assert submit(OneRank(file, make_config(cluster={"kind": "slurm"}))) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["sft: finished the second attempt"]


@pytest.mark.trial
@pytest.mark.parametrize("by", ["USR2", "TERM", "low", "grace"])
def test_a_job_that_is_told_to_end_is_queued_again_and_followed_to_its_end(
    by: str, cluster: SlurmCluster, here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job(tmp_path, "sft")
    preempted = by in ("low", "grace")
    config = make_config(name=f"told-{by}", cluster={"kind": "slurm", "partition": by if preempted else ""})

    def tell() -> None:
        wait_for("the job to be at work", file.with_suffix(".begun").exists, WAIT_SECONDS)
        if preempted:
            cluster.submit("sleep 1", "--partition=high", f"--nodes={cluster.nodes}", "--exclusive")
        else:
            cluster.run("scancel", f"--name={config.name}", f"--signal={by}")

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        assert submit(OneRank(file, config)) == 0
    finally:
        teller.join(60)
    submitted, *lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "sft: step 1 of 2  ",
        "sft: interrupted, 1 of 2 steps are committed",
        "sft: finished the second attempt",
    ]
    assert cluster.job(submitted.split()[2].rstrip(";"))["Restarts"] == "1"
