"""The execution of job files: of one file, or of a folder of them.

Owns the order of an execution and of its end. Promises that training starts only after all inputs of the job exist and
are valid; and that an execution that is interrupted before the log has `finished` can be repeated, and continues from
its last checkpoint. When the log has `finished`,

1. the model at `output` is complete, and the last checkpoint is durable,
2. the packed files are no longer mapped,
3. every rank has released its device memory,
4. the data folder is removed, and the job file has left the queue.

If two executions of a job overlap, the later one owns the job's files, including its log. The earlier one checks the
ownership before each of its writes, and ends with `SupersededError`.

A job that fails keeps its data. So does a job that is stopped early, after a checkpoint of its completed steps. Rank 0
alone reads folders and job files; the other ranks receive operations.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import LoraConfig, ModelConfig, RunConfig
from pipeline.config.model_directory import describe_weights, model_directory
from pipeline.errors import (
    CheckpointError,
    DamagedCheckpointError,
    RollcallError,
    SupersededError,
    TrainingError,
    first_line,
)
from pipeline.train.controller.device_release import release_device
from pipeline.train.controller.model_saving import expect_save, forget_models
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted, Pulse
from pipeline.train.loop.train_loop import CheckpointCadence, TrainLoop
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.offline.job_log import JobLog
from pipeline.train.offline.job_observer import Observer
from pipeline.train.offline.job_queue import JobQueue
from pipeline.train.offline.job_resume import JobState
from pipeline.train.offline.offline_algorithms import build_algorithm
from pipeline.train.offline.packed_dataset import PackedRows, remove_packed
from pipeline.train.offline.shared_visibility import wait_until_visible
from pipeline.train.throughput import machine_of
from pipeline.train.train_jobs import Job, PackedInput, RlJob, check_offline, read_job, with_resolved_rate
from pipeline.train.worker_spec import models_of
from pipeline.utils import atomic_dirs, heartbeat

log = logging.getLogger(__name__)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


NO_OBSERVER = Observer()


def run_job_files(
    path: Path,
    dispatch: RankGroup,
    config: RunConfig,
    pulse: Pulse | None = None,
    observer: Observer = NO_OBSERVER,
) -> None:
    """Execute the job of a file, or the jobs of a folder until no executable one is left.

    For a single file, its error is raised. In a folder, a failed job is moved to `failed/`, and the jobs that do not
    depend on it are executed; `TrainingError` at the end lists the failed jobs, also of earlier executions, and those
    that wait for them. `Interrupted` from `pulse` ends everything and leaves the job in its place. So does
    `SupersededError`: another execution owns the folder.
    """
    if not path.is_dir():
        observer.before_claim()
        run_job_file(path, dispatch, config, pulse=pulse, observer=observer)
        return
    queue = JobQueue(path)
    while (file := queue.next()) is not None:
        observer.before_claim()
        try:
            run_job_file(file, dispatch, config, put_away=queue.done, pulse=pulse, observer=observer)
        except (Interrupted, SupersededError):
            raise
        except RollcallError as error:
            queue.failed(file, first_line(error))
            if dispatch.broken:  # without its ranks this process can execute no further job
                raise
    waits = [f"{file.name} waits for {needed}" for file, needed in queue.left.items()]
    if failures := queue.failures:
        waits.insert(0, f"failed: {', '.join(failures)} (see {path / 'failed'})")
    if waits:
        observer.exhausted()
        raise TrainingError("; ".join(waits))


def run_job_file(
    file: Path,
    dispatch: RankGroup,
    config: RunConfig,
    put_away: Callable[[Path], None] = lambda file: None,
    pulse: Pulse | None = None,
    observer: Observer = NO_OBSERVER,
) -> None:
    """Execute the job of a file; an error is also written to the job's log.

    `SupersededError`, without a line in the log, if another execution of the job began meanwhile and owns its files.
    `put_away` is called with the file right before the log's `finished`. `pulse` (by default `dispatch.keepalive`) is
    called before each step: if it raises `Interrupted`, the completed steps are saved and logged as `interrupted`.
    """
    job = read_job(file)
    identity = f"{job.digest}-{file.stat().st_mtime_ns}"  # a rewritten file with equal content is a new job
    check_offline(file, job, config)
    job = with_resolved_rate(job, config.model)
    job_log = JobLog(Path(job.log))
    job_log.clear()
    job_log.write("started", job=str(file), kind=job.kind, steps=job.steps)
    log.info("%s: %s", file, job.kind)
    with _log_failures(dispatch, job_log):
        state = JobState(job, identity, dispatch)
        state.claim()
        with state.unless_overtaken():
            JobExecution(file, job, state, dispatch, config, job_log, pulse or dispatch.keepalive, observer).run()
            state.check()
            put_away(file)
    job_log.write("finished", job=str(file), output=job.output)
    log.info("%s: finished", file)


@contextmanager
def _log_failures(dispatch: RankGroup, job_log: JobLog) -> Iterator[None]:
    """A block whose errors are written to the job's log, and leave no model; `OSError` becomes `TrainingError`."""
    try:
        yield
    except Interrupted:
        raise
    except SupersededError:
        forget_models(dispatch)
        raise
    except Exception as error:
        forget_models(dispatch)
        try:
            job_log.write("failed", error=first_line(error))
        except OSError as unwritable:
            log.error("the failure of the job cannot be written to %s: %s", job_log.path, unwritable)
        if isinstance(error, OSError):
            raise TrainingError(f"rank 0: {first_line(error)}") from error
        raise


class JobExecution:
    """One execution of one job, and its `train_loop.ProgressRecorder`.

    Attributes:
        done: number of completed steps, including those of earlier executions.
        checkpoint_seconds: see `train_loop.ProgressRecorder`.
    """

    def __init__(
        self,
        file: Path,
        job: Job,
        state: JobState,
        dispatch: RankGroup,
        config: RunConfig,
        job_log: JobLog,
        pulse: Pulse,
        observer: Observer,
    ) -> None:
        self._file, self._observer = file, observer
        self._job, self._state, self._dispatch, self._log, self._pulse = job, state, dispatch, job_log, pulse
        self._output, self.done = Path(job.output), 0
        self.checkpoint_seconds = 0.0
        for folder in filter(None, (job.output, job.checkpoint)):
            atomic_dirs.repair(Path(folder))
        self._config = resolve_start(job, config)
        log.info("%s", describe_weights(self._config.model))

    def run(self) -> None:
        """Train the remaining steps, write the model, and release the devices and the data."""
        try:
            self._run(self._job)
        except Interrupted:
            self._write_log("interrupted", step=self.done, of=self._job.steps)
            raise

    def _run(self, job: Job) -> None:
        while True:
            try:
                self._train_rest(job)
                break
            except DamagedCheckpointError:
                # `JobState` has excluded the damaged checkpoint, so each repetition starts from an older one: it ends.
                forget_models(self._dispatch)
        if not self._dispatch.run_on_ranks("policy", steps_taken)[0]:
            hint = "look for what is not finite in the model and its rows, or lower schedule.optim.lr"
            raise TrainingError(f"no optimizer step was taken, so there is no new model; {hint}")
        self._export()
        release_device(self._dispatch)
        if isinstance(job.inputs, PackedInput):
            self._state.check()
            remove_packed(Path(job.inputs.folder))

    def _train_rest(self, job: Job) -> None:
        """Load the newest checkpoint and train the remaining steps; `DamagedCheckpointError` if its content differs
        from what was saved."""
        done = self.done = self._state.find()
        if job.checkpoint:
            wait_until_visible(self._dispatch, Path(job.checkpoint), self._config.cluster.lateness)
        models = models_of(self._config, job.kind, job.optim, job.steps)
        for name in models if done else ("policy",):  # in a new job the algorithm creates the other models
            self._dispatch.init_model(name, models[name])
        expect_save(self._dispatch, self._dispatch.models)
        if done:
            self._state.restore()
        self._observer.began(self._file, job, done)
        if done < job.steps:
            self._train(done)

    def _train(self, done: int) -> None:
        """Train the remaining steps. On return the packed files are not mapped any more."""
        job, training = self._job, self._config.training
        machine = machine_of(self._config)
        runner = TrainLoop(self, CheckpointCadence.of(self._config), machine)
        patience = self._dispatch.patience.checkpoint
        if not isinstance(job.inputs, PackedInput):
            with heartbeat.busy_with("making the task", patience):
                algorithm = build_algorithm(job, self._config, self._dispatch, self._state, None, self._pulse)
            runner.run(algorithm, done)
            return
        folder = Path(job.inputs.folder)
        with ExitStack() as opened:
            with heartbeat.busy_with(f"checking {folder.name}", patience):
                packed = opened.enter_context(PackedRows(folder))
                longest = min(self._config.model.max_length, training.micro_batch_budget)
                packed.check(self._dispatch.models["policy"].vocabulary, longest, sampled=isinstance(job, RlJob))
            runner.run(build_algorithm(job, self._config, self._dispatch, self._state, packed, self._pulse), done)

    def _export(self) -> None:
        self._state.check()
        part = atomic_dirs.unfinished(self._output, self._state.attempt)
        part.parent.mkdir(parents=True, exist_ok=True)
        self._dispatch.save_hf_model("policy", part)
        atomic_dirs.replace(self._output, part, self._state.check)

    def _write_log(self, event: str, **details: Any) -> None:
        """Write to the job's log; `SupersededError` if another execution has claimed the job and so the log."""
        self._state.check()
        self._log.write(event, **details)

    @property
    def is_checkpointable(self) -> bool:
        """See `train_loop.ProgressRecorder`."""
        return not self._dispatch.broken

    @property
    def is_near_budget(self) -> bool:
        """See `train_loop.ProgressRecorder`; no stream entries wait for a checkpoint."""
        return False

    @property
    def is_saving(self) -> bool:
        """See `train_loop.ProgressRecorder`; every checkpoint is durable when `save_checkpoint` returns."""
        return False

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        """See `train_loop.ProgressRecorder`; always durable."""
        self._observer.checkpoint_begins()
        began = time.monotonic()
        self._state.save_checkpoint(done)
        self.checkpoint_seconds = time.monotonic() - began
        self._observer.checkpoint_completed()

    def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """See `train_loop.ProgressRecorder`."""
        self.done = step
        self._write_log("step", step=step, of=job.steps, **metrics)
        self._observer.stepped(job, step, metrics)
        log.info("%s step %d of %d: loss %.4g", job.kind, step, job.steps, metrics.get("loss", float("nan")))


def resolve_start(job: Job, config: RunConfig) -> RunConfig:
    """The config with the job's initial model; `CheckpointError` if the job's `checkpoint` does not exist."""
    model = config.model
    if job.checkpoint:
        model = _from_adapter(job, model) if model.lora.rank else _from_model(job, model)
    model = model.model_copy(update={"path": str(model_directory(model))})
    return config.model_copy(update={"model": model})


def _from_adapter(job: Job, model: ModelConfig) -> ModelConfig:
    _require_files(job, ADAPTER_FILES, "an adapter, which model.lora.rank asks for")
    lora: LoraConfig = model.lora.model_copy(update={"adapter": job.checkpoint})
    return model.model_copy(update={"lora": lora})


def _from_model(job: Job, model: ModelConfig) -> ModelConfig:
    _require_files(job, ("config.json", "*.safetensors"), "a model; for an adapter set model.lora.rank")
    return model.model_copy(update={"path": job.checkpoint, "init": "pretrained"})


def _require_files(job: Job, patterns: tuple[str, ...], what: str) -> None:
    folder = Path(job.checkpoint)
    missing = [pattern for pattern in patterns if not list(folder.glob(pattern))]
    if missing:
        raise CheckpointError(f"checkpoint {folder} has no {', '.join(missing)}: expected {what}")


def steps_taken(worker: ModelWorker) -> int:
    """Number of optimizer steps of this job that changed the model."""
    return worker.optimizer.taken if worker.optimizer else 0
