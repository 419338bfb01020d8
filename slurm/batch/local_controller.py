"""The controller of a local job: what slurmctld and srun are to a cluster's.

Owns the agents of the virtual nodes: starts them through submitit's own controller, passes TERM on, and, like `srun
--kill-on-bad-exit`, asks the others to stop when one ends badly. Ends when its launcher ends, but not because a disk
fails; agents that are coming down get their time. Started by `slurm.batch.executors` as `python -m
slurm.batch.local_controller FOLDER RUN ATTEMPT`.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from submitit.local.local import Controller

from pipeline.errors import DeadlineError
from pipeline.roles.role_context import read_config
from pipeline.run.events import LAUNCHER, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import FIRST_FAILURE, RunPaths, down_mark
from pipeline.utils.fs_retry import DeferredWrites
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.subprocesses import adopt_orphans, describe_exit, end_descendants
from pipeline.utils.waiting import CLOCK, wait_for
from slurm.agent.agent import END_SIGNALS
from slurm.agent.agent_heartbeat import agent_name
from slurm.agent.liveness import STOPPED_SECONDS, StallTimer
from slurm.agent.os_processes import is_stopped
from slurm.agent.supervisor import max_shutdown_seconds
from slurm.registry import run_registry
from slurm.scheduler.slurm.slurm_environment import launcher_process

_PAUSE = 0.1
_FINAL_SECONDS = 10.0
"""How long, once all agents are down, to retry what is left to write: the launcher waits hardly longer."""


class LocalController(Controller):
    """Waits for all agents; after the first bad end, the launcher's end, or a signal, they have a bounded time left."""

    def __init__(self, folder: Path, run: RunPaths, attempt: str, launcher: psutil.Process | None) -> None:
        super().__init__(folder)
        self._asked_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):  # the second is what `Job.cancel` sends
            signal.signal(number, lambda *_: self._ask())
        self._paths = run.attempt(run_registry.identity(run).run_id, attempt)
        self._patience = max_shutdown_seconds(read_config(run).cluster) + 5.0
        self._launcher = launcher
        self._failed: set[int] = set()
        self._stopped: dict[int, StallTimer] = {}
        self._outbox = DeferredWrites()

    def start_tasks(self) -> None:
        """Start the agents, deaf to the signals that mean "end soon" until they can hear them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            super().start_tasks()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._asked_at is not None:  # before there was anybody to tell
            self._forward_signal(signal.SIGTERM)

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """Exit codes of all agents, None for those that had to be killed."""
        codes = self._wait()
        try:
            wait_for("the disk to take the events", self._outbox.flush, _FINAL_SECONDS)
        except DeadlineError as late:
            print(late, flush=True)
        return codes

    def _wait(self) -> Sequence[int | None]:
        while True:
            self._outbox.flush()
            self._end_stopped()
            codes = [task.poll() for task in self.tasks]
            for rank, code in enumerate(codes):
                if code and rank not in self._failed:
                    self._failed.add(rank)
                    self._tell_failure(rank, describe_exit(code), code)
            if all(code is not None for code in codes):
                return codes
            if any(codes):
                self._ask()
            elif not self._launcher_lives():
                self._say_launcher_is_gone()
                self._ask()
            if self._asked_at is not None and time.monotonic() - self._asked_at > self._patience:
                return codes
            time.sleep(_PAUSE)

    def _end_stopped(self) -> None:
        """End the agents that have been stopped (SIGSTOP) for too long: they watch their roles no more, nor hear of the
        end of the attempt."""
        stopped = [rank for rank, task in enumerate(self.tasks) if is_stopped(task.pid)]
        self._stopped = {rank: self._stopped.get(rank) or StallTimer(CLOCK) for rank in stopped}
        for rank, silence in self._stopped.items():
            if silence.look(True) > STOPPED_SECONDS and rank not in self._failed:
                self._failed.add(rank)
                self.tasks[rank].kill()
                self._tell_failure(rank, f"stopped (SIGSTOP) for {STOPPED_SECONDS:g} s, and ended for it", None)

    def _ask(self) -> None:
        """Ask all agents, once, to come down."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._forward_signal(signal.SIGTERM)

    def _say_launcher_is_gone(self) -> None:
        """Say so before the agents, which hear TERM, say only that."""
        if self._asked_at is None:
            events = Events(self._paths, FileSharedDir(self._paths.root))
            self._outbox.submit(lambda: events.publish("draining", LAUNCHER, "the launcher was killed"))

    def _tell_failure(self, rank: int, cause: str, code: int | None) -> None:
        """What an agent that was killed could not say: that it failed, and that its roles are down with it."""
        attempt, name = FileSharedDir(self._paths.root), agent_name(rank)
        failure = FirstFailure(role=name, rank=rank, cause=cause, exit_code=code, time=time.time(), log="")
        self._outbox.submit(lambda: attempt.replace(down_mark(name), "left"))
        self._outbox.submit(lambda: attempt.create(FIRST_FAILURE, failure))
        self._outbox.submit(lambda: Events(self._paths, attempt).publish("failed", name, failure.one_line()))

    def _launcher_lives(self) -> bool:
        try:
            return self._launcher is not None and self._launcher.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def main() -> int:
    adopt_orphans()
    folder, run, attempt = Path(sys.argv[1]), RunPaths(Path(sys.argv[2])), sys.argv[3]
    with run_registry.held_by_job(run):
        controller = LocalController(folder, run, attempt, launcher_process())
        try:
            controller.start_tasks()
            codes = controller.wait()
        finally:
            controller.kill_tasks()
            end_descendants()
    return 0 if all(code == 0 for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
