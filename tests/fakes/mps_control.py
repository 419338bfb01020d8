#!/usr/bin/env python3
"""A stand-in for nvidia-cuda-mps-control, which needs a GPU: `-f` runs until `quit`, which arrives on another process's
standard input, with a server process in a session of its own. With MPS_FAILS it prints this text and exits with code 1;
with MPS_HANGS it answers nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    if "MPS_FAILS" in os.environ:
        sys.exit(os.environ["MPS_FAILS"])
    (pipes / "visible").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (pipes / "control").touch()
    while (pipes / "control").exists():
        time.sleep(0.01)
    server.kill()
    server.wait()
    sys.exit(0)
for line in sys.stdin:
    if "MPS_HANGS" in os.environ or not (pipes / "control").exists():
        sys.exit("Cannot find MPS control daemon process")
    if line.strip() == "quit":
        (pipes / "control").unlink()
