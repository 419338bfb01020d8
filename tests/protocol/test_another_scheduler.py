"""A scheduler that is a new folder of `slurm/scheduler`, and nothing else but a file of settings.

The packages are copied, the folder is added to the copy, and the launchers of the copy submit, list and cancel.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Outcome
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for

ROOT = Path(__file__).parents[2]
SPOOL = ROOT / "tests" / "support" / "spool"
SETTINGS = "scheduler: spool\nfs_visibility_seconds: 0\nmax_jobs: 1\n"
SFT = ("training.steps=0", "training.sft.steps=1000000", "training.sft.batch=8", "resources.spare_nodes=1")
SECONDS = 60.0


@dataclass(frozen=True)
class Checkout:
    """A copy of the packages with the folder of one more scheduler."""

    root: Path
    spool: Path
    output: Path

    def run(self, launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"PYTHONPATH": str(self.root), "SPOOL_HOME": str(self.spool)}
        command = [sys.executable, str(self.root / "launchers" / launcher), *arguments]
        return subprocess.run(command, cwd=self.root, env=variables, capture_output=True, text=True, timeout=SECONDS)

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        shape = ("experiment=demo", "cluster=spool", "name=lr", f"output={self.output}", *SFT)
        return self.run("submit.py", *shape, *arguments)

    def states(self) -> dict[str, str]:
        """The scheduler's state of each point, as the table of runs shows it."""
        shown = self.run("runs.py", f"output={self.output}", "--json")
        assert shown.returncode == 0, shown.stderr
        return {line["name"]: line["scheduler"] for line in json.loads(shown.stdout)["runs"]}


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    root, spool = tmp_path / "checkout", tmp_path / "spool"
    for name in ("pipeline", "slurm", "conf", "launchers"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SPOOL, root / "slurm" / "scheduler" / "spool")
    (root / "conf" / "cluster" / "spool.yaml").write_text(SETTINGS)
    spool.mkdir()
    yield Checkout(root, spool, tmp_path / "runs")
    for job in spool.iterdir():
        groups = [int((job / "keeper").read_text()), int(json.loads((job / "job").read_text()).get("group", 0))]
        for group in filter(None, groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def attempts(run: RunPaths) -> list[str]:
    """The attempts whose ranks have met."""
    return sorted(file.parent.name for file in run.root.glob("rendezvous/*/*/world.json"))


def test_a_new_folder_is_all_that_another_scheduler_needs(checkout: Checkout) -> None:
    submitted = checkout.submit("-m", "seed=1,2", "--detach")
    assert submitted.returncode == 0, submitted.stderr + submitted.stdout
    points = sorted(folder for folder in (checkout.output / "lr").iterdir() if folder.is_dir())
    run = RunPaths(points[0])
    wait_for("both ranks of the first job to meet", lambda: attempts(run) == ["1-0"], SECONDS)
    assert list(checkout.states().values()) == ["RUNNING", "PENDING"], "cluster.max_jobs=1: one waits for the other"

    again = checkout.submit("-m", "seed=1,2", "--dry-run")
    assert "2 points, 2 live, 0 to submit" in again.stdout, again.stderr

    os.killpg(int(json.loads((checkout.spool / "1" / "job").read_text())["group"]), signal.SIGUSR2)
    wait_for("the next attempt of the first job", lambda: attempts(run) == ["1-0", "1-1"], SECONDS)
    outcome = shared_files.read_document(run.attempt("", "1-0").outcome, Outcome)
    assert outcome is not None
    assert outcome.decision == "requeued"

    cancelled = checkout.run("cancel.py", f"sweep={checkout.output / 'lr'}")
    assert cancelled.returncode == 0, cancelled.stderr
    assert "job 1 (RUNNING) was cancelled and will not be queued again" in cancelled.stdout
    wait_for("both to end", lambda: set(checkout.states().values()) == {"CANCELLED"}, SECONDS)
