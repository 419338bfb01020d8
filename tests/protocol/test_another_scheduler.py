"""A scheduler that is a new folder of `slurm/scheduler`, and nothing else but a file of settings.

The packages are copied, the folder is added to the copy, and the launchers of the copy submit, list and cancel.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Outcome
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from tests.support.copied_checkout import ROOT, SECONDS, CopiedCheckout

SPOOL = ROOT / "tests" / "support" / "spool"
SETTINGS = "scheduler: spool\nfs_visibility_seconds: 0\nmax_jobs: 1\n"
SFT = ("training.steps=0", "training.sft.steps=1000000", "training.sft.batch=8", "resources.spare_nodes=1")


@dataclass(frozen=True)
class Site:
    """A copy of the packages with the folder of one more scheduler, whose jobs are in `spool`."""

    checkout: CopiedCheckout
    spool: Path
    output: Path

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        shape = ("experiment=demo", "cluster=spool", "name=lr", f"output={self.output}", *SFT)
        return self.checkout.launch("submit.py", *shape, *arguments)

    def states(self) -> dict[str, str]:
        """The scheduler's state of each point, as the table of runs shows it."""
        shown = self.checkout.launch("runs.py", f"output={self.output}", "--json")
        assert shown.returncode == 0, shown.stderr
        return {line["name"]: line["scheduler"] for line in json.loads(shown.stdout)["runs"]}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    spool = tmp_path / "spool"
    spool.mkdir()
    copy = CopiedCheckout.make(tmp_path / "checkout", SPOOL_HOME=str(spool))
    shutil.copytree(SPOOL, copy.root / "slurm" / "scheduler" / "spool")
    (copy.root / "conf" / "cluster" / "spool.yaml").write_text(SETTINGS)
    yield Site(copy, spool, tmp_path / "runs")
    for job in spool.iterdir():
        groups = [int((job / "keeper").read_text()), int(json.loads((job / "job").read_text()).get("group", 0))]
        for group in filter(None, groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def attempts(run: RunPaths) -> list[str]:
    """The attempts whose ranks have met."""
    return sorted(file.parent.name for file in run.root.glob("rendezvous/*/*/world.json"))


def test_a_new_folder_is_all_that_another_scheduler_needs(site: Site) -> None:
    submitted = site.submit("-m", "seed=1,2", "--detach")
    assert submitted.returncode == 0, submitted.stderr + submitted.stdout
    points = sorted(folder for folder in (site.output / "lr").iterdir() if folder.is_dir())
    run = RunPaths(points[0])
    wait_for("both ranks of the first job to meet", lambda: attempts(run) == ["1-0"], SECONDS)
    assert list(site.states().values()) == ["RUNNING", "PENDING"], "cluster.max_jobs=1: one waits for the other"

    again = site.submit("-m", "seed=1,2", "--dry-run")
    assert "2 points, 2 live, 0 to submit" in again.stdout, again.stderr

    os.killpg(int(json.loads((site.spool / "1" / "job").read_text())["group"]), signal.SIGUSR2)
    wait_for("the next attempt of the first job", lambda: attempts(run) == ["1-0", "1-1"], SECONDS)
    outcome = shared_files.read_document(run.attempt("", "1-0").outcome, Outcome)
    assert outcome is not None
    assert outcome.decision == "requeued"

    cancelled = site.checkout.launch("cancel.py", f"sweep={site.output / 'lr'}")
    assert cancelled.returncode == 0, cancelled.stderr
    assert "job 1 (RUNNING) was cancelled and will not be queued again" in cancelled.stdout
    wait_for("both to end", lambda: set(site.states().values()) == {"CANCELLED"}, SECONDS)
