"""Submitit's executors for one job of several agents.

Owns the request for an allocation with one task per node, and one agent per task. `LocalNodesExecutor` is submitit's
local executor with one task per virtual node; `BatchExecutor` submits a batch file to a scheduler. Their jobs have
submitit's folder and handle.
"""

import secrets
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from submitit.core.core import Job, PicklingExecutor
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError, SchedulerError
from pipeline.run.completion import is_finished
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from pipeline.utils.subprocesses import KILL_SECONDS
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.agent.tmpdir import remove_scratch
from slurm.scheduler.local.local_environment import local_job_environment
from slurm.scheduler.scheduler_protocol import BatchScheduler, JobQueue, SchedulerSilent

LOST_SECONDS = 60.0
"""Seconds of polling the queue for a job whose submission got no answer."""

_SELF_ENDING_SECONDS = 2.0
"""Time for processes that the kernel ends with the one that started them."""
_ASK_SECONDS, _ASK_SECONDS_AT_END = 5.0, 0.5
_SILENCE_SECONDS = 600.0


class LocalNodesExecutor(LocalExecutor):
    """Submitit's local executor for several virtual nodes on this machine.

    Differs from its base in its controller (`slurm.batch.local_controller`), which runs in its own session, so that
    Ctrl-C reaches only the launcher, and which ends with its launcher. `Job.cancel` makes the agents shut down in
    order.
    """

    def __init__(self, run: RunPaths, ranks: int) -> None:
        self.job_name = f"local{time.strftime('%Y%m%d%H%M%S', time.gmtime())}{secrets.token_hex(2)}"
        self._run = run
        self._controller: subprocess.Popen[bytes] | None = None
        super().__init__(run.submitit / self.job_name)
        self.update_parameters(tasks_per_node=ranks)

    @property
    def attempt(self) -> str:
        """The name of the attempt that this executor's job executes."""
        return f"{self.job_name}-0"

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks = self.parameters["tasks_per_node"]
        controller = self._controller = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "slurm.batch.local_controller",
                str(self.folder),
                str(self._run.root),
                self.attempt,
            ],
            env=local_job_environment(self.job_name, command, ranks, self._run.code),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return LocalJob(self.folder, str(controller.pid), tasks=list(range(ranks)), process=controller)

    @property
    def code(self) -> int | None:
        """The exit code of the controller; None while it runs."""
        return self._controller.poll() if self._controller is not None else None

    def kill(self) -> None:
        """Kill the job at once, and remove what its agents cannot remove any more.

        The kernel ends the agents with the controller, and every role with its agent; what a role started may be left.
        """
        if self._controller is None:
            return
        processes = []
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self._controller.pid).children(recursive=True)
        self._controller.kill()
        self._controller.wait()
        for process in _running_after(processes, _SELF_ENDING_SECONDS):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _running_after(processes, KILL_SECONDS)
        remove_scratch(self.attempt)


def _running_after(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run when all have ended or the time is over. One that nobody has reaped does not run."""

    def running() -> list[psutil.Process]:
        return [process for process in processes if _is_running(process)]

    with suppress(DeadlineError):
        wait_for("killed processes to end", lambda: not running(), seconds)
    return running()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class RunJob(Job[Any]):
    """Submitit's handle of a run's job in a queue, with the scheduler's state.

    Result files do not count, since an earlier attempt may have left them. A temporary lack of answers does not end the
    job; after `_SILENCE_SECONDS` it is a `SchedulerError`.
    """

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        *,
        run: RunPaths,
        queue: JobQueue,
        clock: Clock = CLOCK,
    ) -> None:
        self.run, self._queue, self._clock = run, queue, clock
        self._state, self._over = "UNKNOWN", False
        self._asked, self._answered = float("-inf"), clock.now()
        super().__init__(folder, job_id, (0,))
        self._tasks = tuple(tasks)
        if len(tasks) > 1:
            self._sub_jobs = [_RankJob(self, task) for task in tasks]

    def _register_in_watcher(self) -> None:
        """Do nothing: submitit's watcher would ask a scheduler of its own."""

    @property
    def state(self) -> str:
        """The scheduler's state of the job; UNKNOWN before the first answer, or once the job is dropped."""
        self._ask()
        return self._state

    def done(self, force_check: bool = False) -> bool:
        """Whether the job is over and will not run again."""
        self._ask(force=force_check)
        return self._over

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; its agents save a checkpoint and shut down before the scheduler kills them."""
        del check
        self._queue.cancel(self.job_id)

    def _ask(self, *, force: bool = False) -> None:
        """Update the state from the scheduler, at a limited rate: all users of the cluster share it."""
        now = self._clock.now()
        pause = _ASK_SECONDS_AT_END if self._is_finished() else _ASK_SECONDS
        if self._over or (not force and now - self._asked < pause):
            return
        self._asked = now
        try:
            queued = self._queue.job(self.job_id)
        except SchedulerError:
            if now - self._answered > _SILENCE_SECONDS:
                raise
            return
        self._answered = now
        self._state, self._over = (queued.state, not queued.live) if queued else ("UNKNOWN", True)

    def _is_finished(self) -> bool:
        """Whether the run's files show its end; False while the disk fails, on which only the rate of polls depends."""
        try:
            return is_finished(self.run)
        except OSError:
            return False


class _RankJob(Job[Any]):
    """Submitit's handle of one rank of a `RunJob`, which is over when the whole job is."""

    def __init__(self, whole: RunJob, rank: int) -> None:
        self._whole = whole
        super().__init__(whole.paths.folder, whole.job_id, (rank,))

    def _register_in_watcher(self) -> None:
        """Do nothing: the whole job asks the scheduler."""

    @property
    def state(self) -> str:
        return self._whole.state

    def done(self, force_check: bool = False) -> bool:
        return self._whole.done(force_check)


class BatchExecutor(PicklingExecutor):
    """Submitit's executor for one run: one job of a scheduler, one task per node.

    The scheduler writes and submits the batch file. Submitit must not requeue the job (`max_num_timeout`).
    """

    job_class = RunJob

    def __init__(
        self,
        run: RunPaths,
        config: RunConfig,
        plan: Plan,
        *,
        run_id: str,
        scheduler: BatchScheduler,
        queue: JobQueue,
        clock: Clock = CLOCK,
    ) -> None:
        super().__init__(run.submitit / config.cluster.scheduler, max_num_timeout=-1)
        self._run, self._config, self._plan, self._run_id = run, config, plan, run_id
        self._scheduler, self._queue, self._clock = scheduler, queue, clock
        self._queued = ""

    def batch_file(self) -> str:
        """The exact text that `submit` passes to the scheduler."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    @property
    def _submitit_command_str(self) -> str:
        return f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        del uid
        return self._scheduler.batch_file(
            self._config,
            self._plan,
            self._run,
            run_id=self._run_id,
            folder=self.folder,
            python=sys.executable,
            command=command,
        )

    def _num_tasks(self) -> int:
        return self._plan.ranks

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        """Submit as the base class does. If this raises, the job is cancelled if it was queued already, and its pickled
        function is removed."""
        before, self._queued = set(self.folder.glob("*.pkl")), ""
        try:
            return super()._internal_process_submissions(delayed_submissions)
        except BaseException as error:
            if self._queued:  # the disk refused the job's files: it would start without its function
                try:
                    self._queue.cancel(self._queued)
                except SchedulerError as refusal:
                    raise SchedulerError(f"job {self._queued} is queued and useless: cancel it ({refusal})") from error
            with suppress(OSError):
                for file in set(self.folder.glob("*.pkl")) - before:
                    file.unlink()
            raise

    def _submit_command(self, command: str) -> RunJob:
        """Submit the file; `SchedulerError` with the scheduler's message if it refuses.

        Without an answer, the queued job with our run_id counts as the submitted one. `SchedulerSilent` if there is
        none.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f".{uuid.uuid4().hex}_submission.sh"
        file.write_text(self._make_submission_file_text(command, ""))
        try:
            job_id = self._submit_file(file)
        except BaseException:
            file.unlink()
            raise
        self._queued = job_id
        JobPaths(self.folder, job_id=job_id).move_temporary_file(file, "submission_file")
        return RunJob(self.folder, job_id, range(self._plan.ranks), run=self._run, queue=self._queue)

    def _submit_file(self, file: Path) -> str:
        try:
            return self._scheduler.submit(file)
        except SchedulerSilent as error:
            lost, trouble = str(error), ""

        def look() -> str | None:
            nonlocal trouble
            try:
                jobs = self._queue.jobs_with(self._run_id)
            except SchedulerError as error:
                trouble = f" ({error})"
                return None
            trouble = ""
            return jobs[0].id if jobs else None

        try:
            return wait_for("the job", look, LOST_SECONDS, pause=1.0, longest_pause=10.0, clock=self._clock)
        except DeadlineError:
            comment = f"rollcall {self._run_id}"
            hint = f"the same command submits it, unless the scheduler shows a job with the comment '{comment}'"
            raise SchedulerSilent(f"{lost}, and the queue shows no such job{trouble}; {hint}") from None

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError("the scheduler submits the file")

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError("the scheduler returns the id")
