"""Jobs that stand alone, on a node of a real Slurm.

python -m pytest -m "cluster and trial" tests/cluster/test_train.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import SlurmCluster
from tests.integration.job_cases import STEPS, events, write_job, write_model
from tests.integration.launched import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.trial, pytest.mark.timeout(240)]


def train(slurm: SlurmCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launchers" / "train.py"), *arguments, "cluster=slurm"]
    env = os.environ | {"SLURM_CONF": slurm.env["SLURM_CONF"], "SLURM_NTASKS": "17", "SBATCH_PARTITION": "no-such"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


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
