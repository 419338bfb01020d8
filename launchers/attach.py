"""Add servers to a running run: `python launchers/attach.py run=<name or directory> servers=2 [cluster.partition=…]`.

They run in a separate job, in the queue or below this command, and leave when the run ends. `nodes=1` places them
on one node; `--dry-run` shows the job. `launchers/detach.py` removes them.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.attach_servers"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("attach"))
