"""Watch a run: `python launchers/watch.py run=<name or directory>`, or a sweep: `sweep=<name or directory>`.

`web [run=<name or directory>]` starts Trackio's dashboard of the run, or of all runs, on http://127.0.0.1:7860/
(`host=…`, `port=…`), for runs with `tracking=trackio`.

Ctrl-C ends the display and does not affect the runs.
"""

import sys
from pathlib import Path

MODULE = "slurm.monitor.live_view"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("watch"))
