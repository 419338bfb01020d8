"""Executing the jobs of files: from a file, or a folder of them, to the announcement that it is done.

Owns the order of an execution and of its end. Promises that nothing is trained before all that the job names is
there and checked; that an execution which is cut short anywhere before its announcement can be started again, and goes
on from its last commit; and that by the time a job is announced as finished

1. its model is at `output`, whole, and its state is committed,
2. nothing maps its packed files any more,
3. every rank has given its device memory back,
4. its data folder is removed, and its file has left the queue.

Of two executions of a job, the later owns all that the job names, its log and its file: the earlier one looks
before each of its writes, and ends with `SupersededError`.

A job that fails keeps its data; so does one that is told to end early, after a commit of the steps that are done. Rank
0 alone looks at folders and files; the others learn of a job by what they are told to do.
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
from pipeline.train.train_jobs import Job, PackedInput, RlJob, check_offline, read_job
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
    """Execute the job of a file, or those of a folder until none is left that can be executed.

    Raises what a single job raised. A job of a folder that fails is set aside and the next one goes on, as far as it
    needs nothing of the failed one; then `TrainingError` at the end says what failed, here or in an execution before,
    and what waits. A `pulse` that raises `Interrupted` ends everything: the job stays where it is. So does an
    `SupersededError`: the folder is another execution's by now.
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
            if dispatch.broken:
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
    """Do the job of a file and announce it; raises what it failed with, which its log then says too.

    `SupersededError`, of which the log says nothing, when another execution of the job began meanwhile and owns all.
    `put_away` is called with the file right before the announcement, `pulse` (by default `dispatch.idle`) before each
    step: if it raises `Interrupted`, the steps that are done are committed and the log says so.
    """
    job = read_job(file)
    identity = f"{job.digest}-{file.stat().st_mtime_ns}"  # a file that is written anew is another job
    check_offline(file, job, config)
    told = JobLog(Path(job.log))
    told.clear()
    told.write("started", job=str(file), kind=job.kind, steps=job.steps)
    log.info("%s: %s", file, job.kind)
    with _log_failures(dispatch, told):
        state = JobState(job, identity, dispatch)
        state.claim()
        with state.unless_overtaken():
            JobExecution(file, job, state, dispatch, config, told, pulse or dispatch.keepalive, observer).run()
            state.check()
            put_away(file)
    told.write("finished", job=str(file), output=job.output)
    log.info("%s: finished", file)


@contextmanager
def _log_failures(dispatch: RankGroup, told: JobLog) -> Iterator[None]:
    """Have the log say what ends the block early, and no model be left; `OSError` becomes `TrainingError`."""
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
            told.write("failed", error=first_line(error))
        except OSError as unwritable:
            log.error("%s does not say why its job failed: %s", told.path, unwritable)
        if isinstance(error, OSError):
            raise TrainingError(f"rank 0: {first_line(error)}") from error
        raise


class JobExecution:
    """One execution of one job, and its `train_loop.ProgressRecorder`.

    Attributes:
        done: the steps that it did or found committed.
        checkpoint_seconds: see `train_loop.ProgressRecorder`.
    """

    def __init__(
        self,
        file: Path,
        job: Job,
        state: JobState,
        dispatch: RankGroup,
        config: RunConfig,
        told: JobLog,
        pulse: Pulse,
        observer: Observer,
    ) -> None:
        self._file, self._observer = file, observer
        self._job, self._state, self._dispatch, self._told, self._pulse = job, state, dispatch, told, pulse
        self._output, self.done = Path(job.output), 0
        self.checkpoint_seconds = 0.0
        for folder in filter(None, (job.output, job.checkpoint)):
            atomic_dirs.repair(Path(folder))
        self._config = resolve_start(job, config)
        log.info("%s", describe_weights(self._config.model))

    def run(self) -> None:
        """Train what is left of the job, write its model, and give everything back."""
        try:
            self._run(self._job)
        except Interrupted:
            self._tell("interrupted", step=self.done, of=self._job.steps)
            raise

    def _run(self, job: Job) -> None:
        while True:
            try:
                self._train_rest(job)
                break
            except DamagedCheckpointError:  # what was to be gone on from; it is refused by now
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
        """Go on from the newest commit and train what is left; `DamagedCheckpointError` if it is not what was
        committed."""
        done = self.done = self._state.find()
        if job.checkpoint:
            wait_until_visible(self._dispatch, Path(job.checkpoint), self._config.cluster.lateness)
        models = models_of(self._config, job.kind, job.optim, job.steps)
        for name in models if done else ("policy",):  # the algorithm of a fresh job makes the others itself
            self._dispatch.init_model(name, models[name])
        expect_save(self._dispatch, self._dispatch.models)
        if done:
            self._state.restore()
        self._observer.began(self._file, job, done)
        if done < job.steps:
            self._train(done)

    def _train(self, done: int) -> None:
        """The steps that are left. When this returns, nothing maps the packed files."""
        job, training = self._job, self._config.training
        machine = machine_of(self._config, job, self._dispatch.models["policy"].flops_per_token)
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

    def _tell(self, event: str, **details: Any) -> None:
        """Write to the log, which is another execution's once that has claimed the job."""
        self._state.check()
        self._told.write(event, **details)

    @property
    def is_checkpointable(self) -> bool:
        """See `train_loop.ProgressRecorder`."""
        return not self._dispatch.broken

    @property
    def is_near_budget(self) -> bool:
        """See `train_loop.ProgressRecorder`; packed rows wait for no commit."""
        return False

    @property
    def is_saving(self) -> bool:
        """See `train_loop.ProgressRecorder`; every commit is durable when `commit` returns."""
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
        self._tell("step", step=step, of=job.steps, **metrics)
        self._observer.stepped(job, step, metrics)
        log.info("%s step %d of %d: loss %.4g", job.kind, step, job.steps, metrics.get("loss", float("nan")))


def resolve_start(job: Job, config: RunConfig) -> RunConfig:
    """The config whose model is what the job starts from; `CheckpointError` if the job's checkpoint is not there."""
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
    """Optimizer steps of this job that changed the model."""
    return worker.optimizer.taken if worker.optimizer else 0
