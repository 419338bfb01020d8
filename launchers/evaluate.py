"""Evaluate a model: `python launchers/evaluate.py run=<name> [checkpoint=rl-50] [key=value …]`, or `model=<directory>`.

One job of servers and an actor, on this machine or with `cluster=slurm`; prints a table and writes `evaluation.json`.
docs/evaluation.md describes the prompts and their settings. All else is as for launchers/submit.py.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.evaluate_model"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("evaluate"))
