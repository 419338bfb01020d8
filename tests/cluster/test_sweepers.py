"""An Optuna study on a real Slurm: six points, two at a time; a job is cancelled, and the driving command is killed.

    python -m pytest -m "cluster and trial" tests/cluster/test_sweepers.py

trains six small models, and prints what the command said in the end.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.utils.waiting import wait_for
from slurm.registry.sweep_manifest import Trial, load_manifest
from slurm.submission.sweeps.sweep_metric import SweepMetric
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import ON_SLURM, SlurmRun, launch
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import ROOT, STEPS

OBJECTIVE = SweepMetric(("reward/mean",), window=6)
STUDY = (
    "-m",
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_trials=6",
    "hydra.sweeper.n_jobs=2",
    "hydra.sweeper.direction=maximize",
    "hydra.sweeper.sampler.seed=5",
    "hydra.launcher.objective=reward/mean",
    "hydra.launcher.window=6",
    "optim.lr=tag(log,interval(1e-5,1e-2))",
    "training.sft.steps=60",
    "training.sft.batch=64",
    "cluster.exclusive=true",
    "resources.services.nodes=0",
    "resources.inference.nodes=1",
)
"""Two nodes a point: of the four, two points fill all."""
DRIVEN_SECONDS = 1800.0


def drive(cluster: SlurmCluster, output: Path) -> subprocess.Popen[str]:
    """The command that drives the study, from where this cluster's users log in."""
    own = [*ON_SLURM, f"output={output}", "name=tune"]
    command = cluster.wrap([sys.executable, str(ROOT / "launchers" / "submit.py"), *own, *STUDY])
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=cluster.env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def points(sweep: SweepPaths) -> list[Trial]:
    kept = load_manifest(sweep)
    return list(kept.points) if kept else []


@pytest.mark.cluster
@pytest.mark.trial
@pytest.mark.timeout(2400)
def test_a_study_outlives_a_killed_job_and_its_own_command(cluster: SlurmCluster, tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path / "tune")
    first = drive(cluster, tmp_path)
    try:
        wait_for(
            "the third and fourth job",
            lambda: [point.job for point in points(sweep)[2:] if point.job][1:] or first.poll() is not None,
            DRIVEN_SECONDS / 2,
        )
        assert first.poll() is None, first.communicate(timeout=WAIT_SECONDS)[0]
        killed, left = (SlurmRun(cluster, sweep.point(point.name)) for point in points(sweep)[2:4])
        killed.wait_for_step(6)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=WAIT_SECONDS)
    cluster.run("scancel", killed.job)
    assert killed.wait_for_end()["JobState"] == "CANCELLED"

    again = drive(cluster, tmp_path)
    said = again.communicate(timeout=DRIVEN_SECONDS)[0]
    print(said)
    assert again.returncode == 0, said

    found = points(sweep)
    assert len(found) == 6
    resumed = SlurmRun(cluster, killed.run)
    assert resumed.job != killed.job
    assert SlurmRun(cluster, left.run).job == left.job
    for point in found:
        rows = SlurmRun(cluster, sweep.point(point.name)).rows()
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), said
    attempts = [len(SlurmRun(cluster, sweep.point(point.name)).attempts) for point in found]
    assert attempts == [1, 1, 2, 1, 1, 1]
    assert {row["attempt"] for row in resumed.rows()} == {f"{killed.job}-0", f"{resumed.job}-0"}

    best = max(found, key=lambda point: OBJECTIVE.of(RunPaths(sweep.root / point.name)))
    assert re.search(rf"^  \S+ +{re.escape(str(best))}  best$", said, re.MULTILINE)
    told = launch(cluster, tmp_path, "", f"sweep={sweep.root}", "--json", script="runs.py")
    assert [line["state"] for line in json.loads(told.stdout)["runs"]] == ["finished"] * 6
