"""The goodput of the demo on a real Slurm of four nodes on this machine: `launchers/goodput.py` with its arguments.

    python -m tests.cluster.goodput_trial --kill-wait 30 output=/tmp/runs faults=requeue every=120s training.steps=300

`--kill-wait` has the seconds between TERM and KILL at the end of a job: the grace of a preemption. The small run of
`tests.support.runs` with one server and one trainer is its configuration; further arguments override it.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import ON_SLURM
from tests.support.runs.launched import ROOT

ONE_OF_EACH = ("resources.inference.nodes=1", "resources.trainer.gpus=1", "resources.inference.gpus=2")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.goodput_trial", description=__doc__)
    parser.add_argument("--kill-wait", type=int, default=30)
    options, overrides = parser.parse_known_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="rollcall-trial-") as folder,
        SlurmCluster(Path(folder) / "slurm", kill_wait=options.kill_wait) as slurm,
    ):
        command = [sys.executable, str(ROOT / "launchers" / "goodput.py"), *ON_SLURM, *ONE_OF_EACH, *overrides]
        return subprocess.run(slurm.wrap(command), cwd=ROOT, env=slurm.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
