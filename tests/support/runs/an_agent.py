"""An agent with one role, for tests that kill it: `python -m tests.support.runs.an_agent LOG COMMAND …`."""

import os
import sys
import time
from pathlib import Path

from pipeline.utils.subprocesses import Child

if __name__ == "__main__":
    Child(sys.argv[2:], Path(sys.argv[1]), dict(os.environ))
    time.sleep(600)
