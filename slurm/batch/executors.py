"""Submitit's executors for one job of several agents.

Owns the request for an allocation with one task per node, and one agent per task. `LocalNodesExecutor` is submitit's
local executor with one task per virtual node, `SlurmHetExecutor` its Slurm executor with our batch file. Their jobs
have submitit's folder and handle.
"""

import re
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from pipeline.config import RunConfig
from pipeline.errors import DeadlineError, SchedulerError
from pipeline.run.completion import is_finished
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Plan
from pipeline.utils.waiting import CLOCK, Clock, wait_for
from slurm.scheduler.scheduler_protocol import Scheduler
from slurm.scheduler.slurm import batch_file as allocation
from slurm.scheduler.slurm.slurm_commands import NO_ANSWER
from slurm.scheduler.slurm.slurm_environment import local_job_environment, submission_environment

SUBMIT_SECONDS = 300.0
"""Deadline of sbatch, which retries by itself while the controller is busy."""
LOST_SECONDS = 60.0
"""Seconds of polling the queue for a job whose id sbatch did not print."""

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

    def kill(self) -> None:
        """Kill the job at once: the kernel ends its agents with the controller, and every role with its agent."""
        if self._controller is not None:
            self._controller.kill()
            self._controller.wait()


class SchedulerSilent(SchedulerError):
    """Whether the job is queued is unknown, since the scheduler did not answer."""


class RunJob(SlurmJob[Any]):
    """Submitit's handle of a run's Slurm job, with the scheduler's state.

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
        scheduler: Scheduler,
        clock: Clock = CLOCK,
    ) -> None:
        self.run, self._scheduler, self._clock = run, scheduler, clock
        self._state, self._over = "UNKNOWN", False
        self._asked, self._answered = float("-inf"), clock.now()
        super().__init__(folder, job_id, (0,))
        self._tasks = tuple(tasks)
        if len(tasks) > 1:
            self._sub_jobs = [SlurmJob(folder, job_id, (task,)) for task in tasks]

    def _register_in_watcher(self) -> None:
        """Do nothing: submitit's watcher calls sacct, which a site may not have."""

    @property
    def state(self) -> str:
        """Slurm's state of the job; UNKNOWN before the first answer, or once Slurm has dropped the job."""
        self._ask()
        return self._state

    def done(self, force_check: bool = False) -> bool:
        """Whether the job is over and will not run again."""
        self._ask(force=force_check)
        return self._over

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; its agents save a checkpoint and shut down within Slurm's KillWait."""
        del check
        self._scheduler.cancel(self.job_id)

    def _ask(self, *, force: bool = False) -> None:
        """Update the state from the scheduler, at a limited rate: all users of the cluster share it."""
        now = self._clock.now()
        pause = _ASK_SECONDS_AT_END if is_finished(self.run) else _ASK_SECONDS
        if self._over or (not force and now - self._asked < pause):
            return
        self._asked = now
        try:
            queued = self._scheduler.job(self.job_id)
        except SchedulerError:
            if now - self._answered > _SILENCE_SECONDS:
                raise
            return
        self._answered = now
        self._state, self._over = (queued.state, not queued.live) if queued else ("UNKNOWN", True)


class SlurmHetExecutor(SlurmExecutor):
    """Submitit's Slurm executor for one run: one job, one task per node.

    Differs from its base in the batch file (`slurm.scheduler.slurm.batch_file`), in the environment of sbatch, which
    has no variables of an enclosing job, and in its handle. Submitit must neither requeue (`max_num_timeout`) nor map
    arrays.
    """

    def __init__(
        self,
        run: RunPaths,
        config: RunConfig,
        plan: Plan,
        *,
        run_id: str,
        scheduler: Scheduler,
        clock: Clock = CLOCK,
    ) -> None:
        super().__init__(run.submitit / "slurm", max_num_timeout=-1)
        self._run, self._config, self._plan, self._run_id = run, config, plan, run_id
        self._scheduler, self._clock = scheduler, clock

    @classmethod
    def affinity(cls) -> int:
        return 2

    def batch_file(self) -> str:
        """The exact text that `submit` passes to sbatch."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        del uid
        return allocation.batch_file(
            self._config,
            self._plan,
            self._run,
            run_id=self._run_id,
            folder=self.folder,
            python=sys.executable,
            command=command,
        )

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        """Submit as the base class does, and remove the pickled function of a job that was not queued."""
        before = set(self.folder.glob("*.pkl"))
        try:
            return super()._internal_process_submissions(delayed_submissions)
        except BaseException:
            for file in set(self.folder.glob("*.pkl")) - before:
                file.unlink()
            raise

    def _submit_command(self, command: str) -> RunJob:
        """Submit the file with sbatch; `SchedulerError` with its message if it refuses.

        If sbatch got no answer, the queued job with our run_id counts as the submitted one. `SchedulerSilent` if there
        is none.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f".{uuid.uuid4().hex}_submission.sh"
        file.write_text(self._make_submission_file_text(command, ""))
        try:
            job_id = self._queue(file)
        except BaseException:
            file.unlink()
            raise
        JobPaths(self.folder, job_id=job_id).move_temporary_file(file, "submission_file")
        ranks = list(range(self._plan.ranks))
        return RunJob(self.folder, job_id, ranks, run=self._run, scheduler=self._scheduler)

    def _queue(self, file: Path) -> str:
        try:
            return self._get_job_id_from_submission_command(_sbatch(file))
        except SchedulerSilent as error:
            lost, trouble = str(error), ""

        def look() -> str | None:
            nonlocal trouble
            try:
                jobs = self._scheduler.jobs_with(self._run_id)
            except SchedulerError as error:
                trouble = f" ({error})"
                return None
            trouble = ""
            return jobs[0].id if jobs else None

        try:
            return wait_for("the job", look, LOST_SECONDS, pause=1.0, longest_pause=10.0, clock=self._clock)
        except DeadlineError:
            hint = f"the same command submits it, unless squeue shows a job with the comment 'rollcall {self._run_id}'"
            raise SchedulerSilent(f"{lost}, and the queue shows no such job{trouble}; {hint}") from None

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        output = string.decode() if isinstance(string, bytes) else string
        match = re.search(r"Submitted batch job (\d+)", output)
        if match is None:
            raise SchedulerSilent(f"sbatch named no job: {_one_line(output)}")
        return match.group(1)


def _sbatch(file: Path) -> str:
    """Run sbatch. Returns its output; `SchedulerError` if it refused the file, `SchedulerSilent` without an answer."""
    try:
        done = subprocess.run(
            ["sbatch", str(file)],
            env=submission_environment(),
            capture_output=True,
            text=True,
            timeout=SUBMIT_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C must not reach it between queueing and answering
        )
    except FileNotFoundError as error:
        raise SchedulerError("sbatch is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerSilent(f"sbatch gave no answer in {SUBMIT_SECONDS:g} s") from error
    if done.returncode and NO_ANSWER.search(done.stderr):
        raise SchedulerSilent(f"sbatch got no answer: {_one_line(done.stderr)}")
    if done.returncode:
        raise SchedulerError(f"sbatch refused the job: {_one_line(done.stderr)}")
    return done.stdout


def _one_line(output: str) -> str:
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in output.strip().splitlines())
