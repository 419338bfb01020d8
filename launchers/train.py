"""Train the jobs of one file, or of a folder of files: `python launchers/train.py <file or folder> [key=value …]`.

A run with trainers only, on this machine or with `cluster=slurm`; all else is as for launchers/submit.py. docs/jobs.md
describes the format of a job.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.train_files"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("train"))
