"""Write the post-mortem of a run: `python launchers/postmortem.py run=<name or directory> [attempt=<attempt>]`.

Prints the verdict and the path of one archive for a bug report: first failure, last signs of life, stacks, ends of
logs, config, versions, and the state of the nodes, without secrets. A failed run writes it by itself.
"""

import sys
from pathlib import Path

MODULE = "pipeline.observability.postmortem_command"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("postmortem"))
