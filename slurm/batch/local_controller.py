"""The controller of a local job, which does on this machine what a scheduler does on its nodes.

Owns the agents of the virtual nodes: starts them through submitit's controller, forwards TERM, and, as a scheduler
does, asks the others to stop when one fails. Ends when its launcher ends, but not when a disk fails; agents that are
shutting down get their time. `slurm.batch.executors` starts it as `python -m slurm.batch.local_controller FOLDER RUN
ATTEMPT`.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from submitit.local.local import Controller

from pipeline.errors import DeadlineError
from pipeline.roles.role_context import read_config
from pipeline.run.events import LAUNCHER, Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import FIRST_FAILURE, RunPaths, down_mark
from pipeline.utils.fork_server import VARIABLE
from pipeline.utils.fs_retry import DeferredWrites
from pipeline.utils.shared_dir import FileSharedDir
from pipeline.utils.subprocesses import adopt_orphans, describe_exit, end_descendants
from pipeline.utils.waiting import CLOCK, wait_for
from slurm.agent.agent import END_SIGNALS
from slurm.agent.agent_heartbeat import agent_name
from slurm.agent.liveness import STOPPED_SECONDS, StoppedProcesses
from slurm.agent.node_forks import node_forks, roles_of
from slurm.agent.node_takeover import replace_lost_node
from slurm.agent.supervisor import max_shutdown_seconds
from slurm.registry import attached_jobs, run_registry
from slurm.scheduler.local.local_environment import launcher_process

_PAUSE = 0.1
_FINAL_SECONDS = 10.0
"""Seconds of retries for pending writes once all agents are down; the launcher waits little longer."""


class LocalController(Controller):
    """Waits for all agents, with a bounded time after the first failure, the launcher's end, or a signal."""

    def __init__(self, folder: Path, run: RunPaths, attempt: str, launcher: psutil.Process | None) -> None:
        super().__init__(folder)
        self._stopping_since: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):  # the second is what `Job.cancel` sends
            signal.signal(number, lambda *_: self._request_stop())
        self._config = read_config(run)
        self._paths = run.attempt(run_registry.identity(run).run_id, attempt)
        self._patience = max_shutdown_seconds(self._config.cluster) + 5.0
        self._launcher = launcher
        self._failed: set[int] = set()
        self._replaced: set[int] = set()
        self._stopped = StoppedProcesses(CLOCK)
        self._outbox = DeferredWrites()

    def start_tasks(self) -> None:
        """Start the agents with `END_SIGNALS` blocked, until each agent has installed its handlers."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            super().start_tasks()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._stopping_since is not None:  # a signal came before there were agents to forward it to
            self._forward_signal(signal.SIGTERM)

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """Wait for the agents. Returns their exit codes, None for those that must be killed."""
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
                    self._handle_failure(rank, describe_exit(code), code)
            codes = [0 if rank in self._replaced else code for rank, code in enumerate(codes)]
            if all(code is not None for code in codes):
                return codes
            if any(codes):
                self._request_stop()
            elif not self._is_launcher_alive():
                self._record_launcher_exit()
                self._request_stop()
            if self._stopping_since is not None and time.monotonic() - self._stopping_since > self._patience:
                return codes
            time.sleep(_PAUSE)

    def _end_stopped(self) -> None:
        """Kill agents that were stopped (SIGSTOP) for too long: they neither monitor their roles nor read events."""
        stopped = self._stopped.look([task.pid for task in self.tasks])
        for rank, task in enumerate(self.tasks):
            if stopped.get(task.pid, 0.0) > STOPPED_SECONDS and rank not in self._failed:
                self.tasks[rank].kill()
                self._handle_failure(rank, f"stopped (SIGSTOP) for {STOPPED_SECONDS:g} s, and killed for it", None)

    def _request_stop(self) -> None:
        """Ask all agents, once, to shut down."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self._forward_signal(signal.SIGTERM)

    def _record_launcher_exit(self) -> None:
        """Publish the launcher's end before the agents publish the TERM that follows from it."""
        if self._stopping_since is None:
            events = Events(self._paths, FileSharedDir(self._paths.root))
            self._outbox.submit(lambda: events.publish("draining", LAUNCHER, "the launcher was killed"))

    def _handle_failure(self, rank: int, cause: str, code: int | None) -> None:
        """Replace a lost virtual node by a spare one, or record the failure that ends the attempt."""
        self._failed.add(rank)
        with suppress(OSError):
            # A signal takes an agent with its node's roles; another exit code is that of a reported failure.
            killed = code is None or code < 0
            replaced, why = (
                replace_lost_node(self._paths, self._config, rank, cause, "the local controller")
                if killed and self._stopping_since is None
                else (False, "")
            )
            if replaced:
                self._replaced.add(rank)
                return
            cause = f"{cause}; {why}" if why else cause
        self._record_failure(rank, cause, code)

    def _record_failure(self, rank: int, cause: str, code: int | None) -> None:
        """Record a killed agent's failure and its exit marker, which it could not write itself."""
        attempt, name = FileSharedDir(self._paths.root), agent_name(rank)
        failure = FirstFailure(role=name, rank=rank, cause=cause, exit_code=code, time=time.time(), log="")
        self._outbox.submit(lambda: attempt.replace(down_mark(name), "left"))
        self._outbox.submit(lambda: attempt.create(FIRST_FAILURE, failure))
        self._outbox.submit(lambda: Events(self._paths, attempt).publish("failed", name, failure.one_line()))

    def _is_launcher_alive(self) -> bool:
        try:
            return self._launcher is not None and self._launcher.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def main() -> int:
    adopt_orphans()
    folder, run, attempt = Path(sys.argv[1]), attached_jobs.paths_at(Path(sys.argv[2])), sys.argv[3]
    config = read_config(run)
    plan = attached_jobs.plan_of(run, config)
    with run_registry.held_by_job(run), node_forks(config, roles_of(plan, range(plan.ranks))) as forks:
        os.environ[VARIABLE] = forks  # all virtual nodes share one server
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
