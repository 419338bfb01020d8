"""The end of a local job at once: nothing that its processes started or wrote is left."""

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from pipeline.run.paths import RunPaths
from slurm.agent.tmpdir import scratch_folder
from slurm.batch.executors import LocalNodesExecutor

AGENT = """
import subprocess, sys, time
from slurm.agent.tmpdir import scratch_folder

# A process that neither its parent's death nor its group's end reaches, as the servers of a GPU service.
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with scratch_folder(sys.argv[1], {}) as variables:
    print(variables["TMPDIR"], helper.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_job_leaves_neither_processes_nor_folders(tmp_path: Path) -> None:
    executor = LocalNodesExecutor(RunPaths(tmp_path), ranks=1)
    controller = subprocess.Popen([sys.executable, "-c", AGENT, executor.attempt], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    folder, helper = controller.stdout.readline().split()
    executor._controller = controller  # type: ignore[assignment]
    with scratch_folder("another-0", {}) as other:
        executor.kill()
        assert Path(other["TMPDIR"]).exists()
    assert Path(folder).parent == Path(tempfile.gettempdir())
    assert not Path(folder).exists()
    assert not psutil.pid_exists(int(helper)) or psutil.Process(int(helper)).status() == psutil.STATUS_ZOMBIE
    controller.stdout.close()
