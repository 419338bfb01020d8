"""Execute training jobs that stand alone: `python launchers/train.py <job file or folder> [key=value …]`.

Here, or with `cluster=slurm` on a node of the cluster; `resources.trainer.processes=2` for two processes. See
docs/jobs.md for the form of a job.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    return run("slurm.launch.train", usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())
