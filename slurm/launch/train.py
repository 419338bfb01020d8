"""Jobs that stand alone, sent to a machine: this one, or a node of the cluster.

Owns the two backends, which do the same: `Trainer`, a torchrun over the processes of one node. Promises that nothing
is started unless every job can be read and the config allows it; that the launcher tells what the logs of the jobs say,
under the paths that the jobs name; and that Ctrl-C ends what was started here, while a job of Slurm goes on.
"""

import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import Checkpointable
from submitit.slurm.slurm import SlurmJob, _make_sbatch_string

from pipeline.config import RunConfig
from pipeline.config.models import longest_sequence
from pipeline.config.rules import check_config
from pipeline.errors import (
    ConfigError,
    DeadlineError,
    PlanError,
    RollcallError,
    SchedulerError,
    TrainingError,
    one_line,
)
from pipeline.rundir.paths import RunPaths
from pipeline.system import process
from pipeline.system.outages import OUTAGE_SECONDS, is_passing
from pipeline.system.waiting import CLOCK, Clock, Deadline, wait_for
from pipeline.training.jobs import check_alone, read_job
from pipeline.training.standalone.log import JobLog, Line
from pipeline.training.standalone.queue import waiting
from pipeline.training.standalone.stop import Stop
from pipeline.world.plan import Seat, Slot
from slurm.batch.allocation import Component, directives
from slurm.batch.executors import RunJob
from slurm.launch.compose import compose_config
from slurm.launch.hearing import NOTICE, heard
from slurm.launch.saying import say
from slurm.node.claims import Claimant, claim_visible
from slurm.scheduler.commands import find_slurm
from slurm.scheduler.environment import batch_attempt, child_environment, gpus_of_user, submission_environment

_PAUSE = 0.2
_LONG_MINUTES = 1 << 20
"""Submitit gives up a job that Slurm ends near its limit; ours goes on with what is left, however often."""
_OF_LOGS = re.compile("#SBATCH --(output|error|open-mode)=")
_SHOWN = ("loss", "reward/mean", "grad_norm", "tokens_per_second")


def main(argv: Sequence[str]) -> int:
    """The exit code of `train.py <job file or folder> [key=value …]`."""
    try:
        if not argv or ("=" in argv[0] and not Path(argv[0]).exists()):
            raise ConfigError(
                "jobs", None, "a job file, or a folder of them, as the first argument", "see docs/jobs.md"
            )
        path = Path(argv[0]).resolve()
        config = checked(path, compose_config([f"name='{name_of(path)}'", *argv[1:]]))
        local = config.cluster.kind == "local"
        return run_here(Trainer(path, config)) if local else submit(QueuedTrainer(path, config))
    except RollcallError as error:
        say(f"error: {error}", sys.stderr)
        return error.exit_code


def name_of(path: Path) -> str:
    """What the jobs of a path are called in the config: its stem, as far as a name may have its letters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:63] or "jobs"


def checked(path: Path, config: RunConfig) -> RunConfig:
    """The config, if every job that waits can be read and one node can execute it; else `ConfigError`."""
    if not waiting_at(path):
        raise ConfigError("jobs", str(path), "a job file, or a folder with at least one *.json", "see docs/jobs.md")
    for file in waiting_at(path):
        check_alone(file, read_job(file), config)
    check_config(config, longest_sequence(config.model))
    if config.resources.trainer.nodes > 1:
        mend = "a job that stands alone has one node; what needs more is a run: python launchers/submit.py"
        raise ConfigError("resources.trainer.nodes", config.resources.trainer.nodes, "1", mend)
    return config


def waiting_at(path: Path) -> list[Path]:
    """The job files that a trainer of this path will execute, as far as they are there by now."""
    return waiting(path) if path.is_dir() else [path] if path.is_file() else []


def logs_of(files: Iterable[Path]) -> dict[Path, JobLog]:
    """The logs of jobs, without those that are gone since they were listed, or for the trainer to refuse."""
    logs: dict[Path, JobLog] = {}
    for file in files:
        with suppress(ConfigError):
            logs[file] = JobLog(Path(read_job(file).log))
    return logs


def forget_earlier(path: Path) -> None:
    """Have logs say nothing of an earlier attempt, before anybody follows them."""
    for log in logs_of(waiting_at(path)).values():
        log.clear()


@dataclass(frozen=True)
class Trainer(Checkpointable):
    """The function that every backend calls on the node. It returns when all jobs are done; told to end, it commits
    what is done and returns. Called again, it does the rest."""

    path: Path
    config: RunConfig

    @property
    def output(self) -> Path:
        """Standard output and error of all processes."""
        return self.path / "trainer.out" if self.path.is_dir() else self.path.with_suffix(".out")

    def __call__(self) -> int:
        """Exit code 0, or 128 + the signal that interrupted it; raises what `_train` raises."""
        interruption = self._train()
        if interruption is None:
            return 0
        say(f"ended by {interruption.by.name}; the same command goes on from here", sys.stderr)
        return 128 + interruption.by

    def _command(self, stop: Stop) -> list[str]:
        """Torchrun over the processes, in the private folder of `stop`.

        Its own `--standalone` unpickles what anybody who reaches its port sends it: here it meets in a file.
        """
        private = stop.path.parent
        return [
            *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "1", "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-id", private.name, "--rdzv-endpoint", str(private / "rendezvous")),
            *("--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1"),
            *("--nproc-per-node", str(self.config.resources.trainer.processes)),
            *("-m", "pipeline.training.standalone.execute"),
            *(str(self.path), self.config.model_dump_json(), str(stop.path), str(private / "secret")),
        ]

    def _train(self) -> "Interruption | None":
        """Have the processes do what is left; what interrupted them, if they committed what they did for it.

        `TrainingError` if they ended otherwise, with what failed in which job, or with the last lines of the output if
        no log says it.
        """
        with TemporaryDirectory(prefix="rollcall-") as folder:
            stop = Stop(Path(folder) / "stop")
            (Path(folder) / "secret").write_text(secrets.token_hex(16))
            with heard(stop.ask) as told:
                seen, code = self._follow_child(stop)
            stop_answered = stop.answered
            if told.by and stop_answered:
                if code:
                    say(f"after the last commit the trainer {process.describe_exit(code)}", sys.stderr)
                return Interruption(told.by, seen.steps)
        if code and seen.failures:
            raise TrainingError("; ".join(seen.failures))
        if seen.unread and (code or stop_answered):
            done = "what was done is committed" if stop_answered else f"the trainer {process.describe_exit(code)}"
            raise TrainingError(f"{seen.unread}; {done}; the same command goes on from the last commit")
        if seen.unread:
            say(f"warning: {seen.unread}; all jobs are done", sys.stderr)
        if code:
            said = "\n".join(process.tail(self.output))
            raise TrainingError(f"the trainer {process.describe_exit(code)}; {self.output}:\n{said}")
        return None

    def _follow_child(self, stop: Stop) -> "tuple[Seen, int]":
        """What the logs said until the processes ended, and their exit code."""
        threads = str(self.config.resources.trainer.threads)
        with self._gpus() as visible:
            env = child_environment({"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **visible})
            forget_earlier(self.path)
            child = process.Child(self._command(stop), self.output, env)
            try:
                seen = follow_logs(self.path, lambda: child.poll() is not None)
                if seen.unread:
                    self._have_committed(child, stop)
            finally:
                code = child.stop(self.config.cluster.stop_seconds)
        return seen, code

    @contextmanager
    def _gpus(self) -> Iterator[dict[str, str]]:
        """Variables that name GPUs which are claimed within the block; none for a job without GPUs.

        `PlanError` if too few are free.
        """
        claimant = Claimant(run_id=self.config.name, attempt=secrets.token_hex(8))
        with ExitStack() as held:
            want = sum(seat.gpus for seat in node_of(self.config).seats)
            claimed = claim_visible(gpus_of_user(), [want], claimant, held)
            if claimed.problem:
                raise PlanError("cluster", "local", "a machine with enough free GPUs", claimed.problem)
            indices = ",".join(str(gpu.index) for gpu in claimed.gpus)
            yield {"CUDA_VISIBLE_DEVICES": indices} if indices else {}

    def _have_committed(self, child: process.Child, stop: Stop) -> None:
        """Ask for an end after the step under way, and give the trainer the time for it."""
        stop.ask()
        with suppress(DeadlineError):  # that it did not answer is told by whoever looks for the answer
            wait_for("the trainer to commit", lambda: child.poll() is not None, self.config.cluster.grace_seconds)


@dataclass(frozen=True)
class QueuedTrainer(Trainer):
    """A trainer that is a job of Slurm, and queued again when it is interrupted."""

    def __call__(self) -> int:
        """Exit code 0; an interruption ends this process, which leaves no result. `TrainingError` as `queue_again`."""
        interruption = self._train()
        if interruption is None:
            return 0
        say(f"ended by {interruption.by.name}: {self.queue_again(interruption)}", sys.stderr)
        sys.exit(128 + interruption.by)

    @contextmanager
    def _gpus(self) -> Iterator[dict[str, str]]:
        yield {}  # Slurm has set them

    def queue_again(self, interruption: "Interruption") -> str:
        """Queue the job again, if it is not the scheduler's by now; what was done, for people.

        `TrainingError` if another attempt would be in vain: after `cluster.max_restarts`, and when the time limit did
        not suffice for a single step.
        """
        from slurm.batch import requeue  # draws reports, which takes a second to import

        job, restart = batch_attempt()
        if restart >= self.config.cluster.max_restarts:
            by = interruption.by.name
            raise TrainingError(f"{by}: the job was requeued cluster.max_restarts={restart} times already")
        if interruption.by == NOTICE and not interruption.steps:
            raise TrainingError(
                "the time limit came before the first step was done, and would again: raise cluster.time"
            )
        return requeue.queue_again(find_slurm(), job, restart)


def run_here(trainer: Trainer) -> int:
    """Call the trainer on this machine; its exit code."""
    try:
        return trainer()
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from the last commit", sys.stderr)
        return 130


def submit(trainer: Trainer) -> int:
    """Queue one job of Slurm that calls the trainer, and follow it; its exit code."""
    forget_earlier(trainer.path)
    try:
        job = executor_of(trainer).submit(trainer)
    except (FailedJobError, FailedSubmissionError) as error:
        raise SchedulerError(f"sbatch refused the job: {' '.join(str(error).split())}") from None
    say(f"submitted job {job.job_id}; its output: {trainer.output}")
    try:
        seen = follow_logs(trainer.path, lambda: bool(job.done()))
    except KeyboardInterrupt:
        say(f"job {job.job_id} goes on; end it with scancel {job.job_id}", sys.stderr)
        return 130
    if seen.unread and not job.done():
        raise TrainingError(f"{seen.unread}; job {job.job_id} goes on; end it with scancel {job.job_id}")
    failure = job.exception()
    if failure is not None:
        raise TrainingError(f"job {job.job_id}: {failure}")
    return 0


class OneNode(SlurmExecutor):
    """Submitit's Slurm executor for one node.

    Differs from its base in the options of sbatch, which are those of a run (`slurm.batch.allocation`), in an sbatch
    that hears nothing of a job around this process, and in a handle that asks Slurm itself whether the job is over.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        super().__init__(folder, max_num_timeout=config.cluster.max_restarts)
        self._options = directives(config, node_of(config))
        handle = partial(RunJob, run=RunPaths(folder), scheduler=find_slurm())
        self.job_class = cast(type[SlurmJob[Any]], handle)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = _make_sbatch_string(command=command, folder=self.folder, **self.parameters)
        kept = [line for line in text.splitlines() if not line.startswith("#SBATCH") or _OF_LOGS.match(line)]
        return "\n".join([kept[0], *self._options, *kept[1:]]) + "\n"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unwanted = os.environ.keys() - submission_environment().keys()
        return ["env", *(f"--unset={name}" for name in sorted(unwanted)), "sbatch", str(submission_file_path)]


def executor_of(trainer: Trainer) -> OneNode:
    """What asks Slurm for the node, as `cluster.*` and `resources.trainer.*` say."""
    cluster, node = trainer.config.cluster, node_of(trainer.config)
    executor = OneNode(trainer.output.with_suffix(".submitit"), trainer.config)
    executor.update_parameters(
        time=_LONG_MINUTES,
        setup=list(cluster.setup),
        srun_args=[f"--cpus-per-task={node.cpus}", *cluster.srun_args],  # srun takes it from sbatch before 22.05 only
    )
    return executor


def node_of(config: RunConfig) -> Component:
    """What the job asks for: one node with what the trainer's processes need."""
    cluster, trainer = config.cluster, config.resources.trainer
    return Component(
        nodes=1,
        seats=(Seat(slots=(Slot(role="trainer", gpus=trainer.processes * trainer.gpus),)),),
        partition=cluster.partition,
        constraint=cluster.constraint,
        memory=cluster.memory,
        cpus=cluster.cpus or trainer.processes * trainer.threads,
        nodelist=cluster.nodelist,
        gpu_type=cluster.gpu_type,
    )


@dataclass(frozen=True)
class Interruption:
    """The signal that ended an attempt after a commit, and how many steps the attempt did."""

    by: signal.Signals
    steps: int


@dataclass
class Seen:
    """What logs said: what failed, a line for each job, and how many steps were done.

    `unread`: why the logs were not read to their end; empty if they were.
    """

    failures: list[str] = field(default_factory=list)
    steps: int = 0
    unread: str = ""


def follow_logs(path: Path, over: Callable[[], bool], clock: Clock = CLOCK) -> Seen:
    """Print what the logs of the jobs say until the trainer is over, or its disk has failed for too long."""
    logs: dict[Path, JobLog] = {}
    seen, patience = Seen(), Deadline("the logs", OUTAGE_SECONDS, clock)
    while True:
        gone = over()  # asked before reading: what was written until then is read
        try:
            _say_new_lines(path, logs, seen)
        except OSError as error:
            if not is_passing(error) or patience.passed:
                seen.unread = f"the logs of {path} cannot be read: {one_line(error)}"
                return seen
        else:
            patience = Deadline("the logs", OUTAGE_SECONDS, clock)
            if gone:
                return seen
        clock.sleep(_PAUSE)


def _say_new_lines(path: Path, logs: dict[Path, JobLog], seen: Seen) -> None:
    logs |= logs_of(file for file in waiting_at(path) if file not in logs)
    for file, log in logs.items():
        for line in log.new_lines():
            say(f"{file.stem}: {describe_line(line)}")
            seen.steps += line["event"] == "step"
            if line["event"] == "failed":
                seen.failures.append(f"{file.stem}: {line['error']}")


def describe_line(line: Line) -> str:
    """A line of a job's log, for people."""
    if line["event"] == "step":
        numbers = " ".join(f"{name} {line[name]:.4g}" for name in _SHOWN if line.get(name) is not None)
        return f"step {line['step']} of {line['of']}  {numbers}"
    if line["event"] == "interrupted":
        return f"interrupted, {line['step']} of {line['of']} steps are committed"
    return " ".join(filter(None, [line["event"], line.get("error") or line.get("output")]))
