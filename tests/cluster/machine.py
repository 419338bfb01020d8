"""One machine of the test cluster, as its processes.

Owns how a daemon is started below a keeper, and how all that it started ends. Knows no Slurm.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.utils.waiting import wait_for
from tests.cluster import keeper

END_SECONDS = 30.0


class Machine:
    """One daemon and everything that it starts, held together by a keeper."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        holder = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid())]
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [*holder, *argv], stdout=output, stderr=output, env=dict(env), start_new_session=True
            )

    def processes(self) -> list[int]:
        """The pids of all that runs on it, daemon first."""
        return keeper.descendants(self._keeper.pid)

    def shut_down(self) -> None:
        """Ask the daemon to end in order; returns when nothing of it is left."""
        os.kill(self.processes()[0], signal.SIGTERM)
        wait_for("a daemon to end", lambda: self._keeper.poll() is not None, END_SECONDS)

    def power_off(self) -> None:
        """End all of it at one moment; nothing if it is off."""
        if self._keeper.poll() is None:
            self._keeper.terminate()
        self._keeper.wait(timeout=END_SECONDS)
