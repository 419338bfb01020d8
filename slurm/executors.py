"""Submitit's executors, as one job of several agents.

Owns how an allocation is asked for: one task per node, each an agent. `VirtualNodes` is submitit's local executor with
one task per virtual node; its job has the same folder, handle and states as a cluster's.
"""

import secrets
import subprocess
import sys
import time
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from pipeline.paths import RunPaths
from slurm.environment import local_job_environment


class VirtualNodes(LocalExecutor):
    """Submitit's local executor for several virtual nodes on this machine.

    Differs from its base in its controller (`slurm.controller`), which runs in its own session, so that Ctrl-C reaches
    the launcher alone, and which ends with its launcher. `Job.cancel` lets the agents come down in order.
    """

    def __init__(self, run: RunPaths, ranks: int) -> None:
        self.job_name = f"local{time.strftime('%Y%m%d%H%M%S', time.gmtime())}{secrets.token_hex(2)}"
        self._run = run
        self._controller: subprocess.Popen[bytes] | None = None
        super().__init__(run.submitit / self.job_name)
        self.update_parameters(tasks_per_node=ranks)

    @property
    def attempt(self) -> str:
        """The attempt that this executor's job will be."""
        return f"{self.job_name}-0"

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks = self.parameters["tasks_per_node"]
        controller = self._controller = subprocess.Popen(
            [sys.executable, "-P", "-m", "slurm.controller", str(self.folder), str(self._run.root), self.attempt],
            env=local_job_environment(self.job_name, command, ranks, self._run.code),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return LocalJob(self.folder, str(controller.pid), tasks=list(range(ranks)), process=controller)

    def kill(self) -> None:
        """End the job at once: its agents die with the controller, and every role with its agent."""
        if self._controller is not None:
            self._controller.kill()
            self._controller.wait()
