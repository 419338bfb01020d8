"""Measure a configuration under faults: `python launchers/goodput.py experiment=demo faults=kill:trainer every=120s`.

Runs it twice, undisturbed and with the fault at each period, and prints useful steps per hour, the seconds that each
fault cost by cause, and prompts lost or trained twice (none). `faults=requeue` preempts the whole job. docs/goodput.md
describes the numbers. All else is as for launchers/submit.py.
"""

import sys
from pathlib import Path

MODULE = "slurm.submission.measure_goodput"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("goodput"))
