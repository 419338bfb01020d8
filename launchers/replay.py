"""Train a run's recorded samples again: `python launchers/replay.py run=<name> [training.steps=20] [key=value …]`.

The replay is a run of the trainer alone, with the same batches in the same order; docs/replay.md. All else is as for
launchers/submit.py.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.replay_run"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("replay"))
