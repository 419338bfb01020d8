"""Training jobs: the orders of a trainer, from a run's config or from a file.

Owns the record of a job, its file format, and the derivation of a run's jobs from its config. A job has its kind,
inputs, initial weights, output, log and schedule; the config has the model, loss, budgets and device. Promises that an
invalid file, or one of another version, is one `ConfigError` with the file's name, and that jobs of runs and jobs from
files have one format. Must not know torch, ranks or losses.

    {
      "kind": "rl",
      "version": 1,
      "inputs": {"kind": "packed", "folder": "data-7"},
      "checkpoint": "adapter-6",
      "optimizer_state": "rl-state",
      "output": "adapter-7",
      "log": "step-7.jsonl",
      "schedule": {"steps": 4, "prompts": 32, "optim": {"lr": 2e-5}}
    }

Paths in a file are relative to the file's folder.
"""

import hashlib
import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipeline.config import ModelConfig, OptimConfig, RunConfig, closest_match
from pipeline.config.cross_checks import check_address, check_mini_batches
from pipeline.config.learning_rates import with_learning_rate
from pipeline.config.optimizer_checks import moments_can_shrink
from pipeline.config.value_types import FrozenModel, Positive
from pipeline.errors import ConfigError
from pipeline.run.paths import CHECKPOINTS, METRICS, MODEL, RunPaths
from pipeline.utils import shared_files
from pipeline.utils.user_commands import user_command

JOB_VERSION: Literal[1] = 1


class DemonstrationsInput(FrozenModel):
    """The demonstrations of the config's task."""

    kind: Literal["demonstrations"] = "demonstrations"


class DatasetInput(FrozenModel):
    """The conversations of `data.*` in the config."""

    kind: Literal["dataset"] = "dataset"


class StreamInput(FrozenModel):
    """The prepared groups of a run, from its actor and preprocessor; not for jobs from files."""

    kind: Literal["stream"] = "stream"


class RecordedInput(FrozenModel):
    """The recorded samples of another run (`replay`); not for jobs from files."""

    kind: Literal["recorded"] = "recorded"
    run: str


class PackedInput(FrozenModel):
    """A folder of `pipeline.train.offline.packed_dataset`; the job removes it at its end."""

    kind: Literal["packed"] = "packed"
    folder: str


class SftSchedule(FrozenModel):
    """`steps` optimizer steps, each of `batch` rows."""

    steps: Positive
    batch: Positive
    optim: OptimConfig = OptimConfig()


class RlSchedule(FrozenModel):
    """`steps` steps, each of `prompts` prompts with all their samples."""

    steps: Positive
    prompts: Positive
    optim: OptimConfig = OptimConfig()


class _Job(FrozenModel):
    """The keys of both kinds of job.

    Attributes:
        checkpoint: directory of the initial model, or of an adapter with `model.lora.rank` > 0. Empty: in a run, the
            weights of the job before it; for a job from a file, the config's model.
        optimizer_state: folder or URL of the checkpoints with the optimizer's state, which jobs of one kind share. The
            job continues from a checkpoint that exists.
        output: directory for the trained model or adapter.
        log: file of `pipeline.train.offline.job_log`.
    """

    version: Literal[1] = JOB_VERSION
    checkpoint: str = ""
    optimizer_state: str = ""
    output: str = ""
    log: str = ""

    @property
    def digest(self) -> str:
        """A hash of the job's keys, different for different jobs."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class SftJob(_Job):
    """Supervised fine-tuning: minimizes the cross-entropy of the counted tokens."""

    kind: Literal["sft"] = "sft"
    inputs: Annotated[DemonstrationsInput | DatasetInput | PackedInput, Field(discriminator="kind")]
    schedule: SftSchedule

    @property
    def name(self) -> Literal["sft"]:
        return self.kind

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def batch(self) -> int:
        return self.schedule.batch

    @property
    def optim(self) -> OptimConfig:
        return self.schedule.optim


class PreferenceJob(_Job):
    """Training from preference pairs: minimizes the config's loss of pairs. A step has `batch` pairs."""

    kind: Literal["preference"] = "preference"
    inputs: DatasetInput = DatasetInput()
    schedule: SftSchedule

    @property
    def name(self) -> Literal["preference"]:
        return self.kind

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def batch(self) -> int:
        return self.schedule.batch

    @property
    def optim(self) -> OptimConfig:
        return self.schedule.optim


class RlJob(_Job):
    """Reinforcement learning from groups of samples: minimizes the config's policy loss."""

    kind: Literal["rl"] = "rl"
    inputs: Annotated[StreamInput | RecordedInput | PackedInput, Field(discriminator="kind")]
    schedule: RlSchedule

    @property
    def name(self) -> Literal["rl"]:
        return self.kind

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def prompts(self) -> int:
        return self.schedule.prompts

    @property
    def optim(self) -> OptimConfig:
        return self.schedule.optim


Job = SftJob | PreferenceJob | RlJob
KINDS = ("sft", "preference", "rl")
_TAGS = (*KINDS, "demonstrations", "dataset", "stream", "recorded", "packed")
_PATHS = ("checkpoint", "optimizer_state", "output", "log")
_adapter: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Field(discriminator="kind")])


def jobs_of(config: RunConfig, rows: int = 0) -> tuple[Job, ...]:
    """The jobs of a run, in order: SFT if it has steps, then RL if it has steps; or preference training alone. The
    output of the last one is the run's model. Paths are relative to `RunPaths.jobs`.

    `rows` is the number of examples of the dataset, for a job whose length is given in epochs; RL does not need it.
    """
    jobs: list[Job] = []
    if config.has_sft:
        jobs.append(_sft_phase(config, rows))
    if config.has_preference:
        jobs.append(_preference_phase(config, rows))
    if config.has_rl:
        optim = with_learning_rate(config.optim, config.model)
        schedule = RlSchedule(steps=config.training.steps, prompts=config.training.prompts_per_step, optim=optim)
        inputs = RecordedInput(run=config.replay) if config.replay else StreamInput()
        jobs.append(RlJob(inputs=inputs, schedule=schedule))
    paths = {"optimizer_state": config.training.checkpoints or f"../{CHECKPOINTS}", "log": f"../{METRICS}"}
    outputs = [*("" for _ in jobs[1:]), f"../{MODEL}"]
    return tuple(job.model_copy(update={**paths, "output": output}) for job, output in zip(jobs, outputs, strict=True))


def _sft_phase(config: RunConfig, rows: int) -> SftJob:
    """The SFT job. Its learning rate is constant before RL, which has the schedule of `optim.*`; alone, SFT has it."""
    start, optim = config.training.sft, config.optim.model_copy(update={"lr": config.training.sft.lr})
    if config.has_rl:
        optim = optim.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    steps = start.steps or max(1, ceil(rows_to_train(config, rows) / start.batch))
    schedule = SftSchedule(steps=steps, batch=start.batch, optim=optim)
    return SftJob(inputs=DatasetInput() if config.data.path else DemonstrationsInput(), schedule=schedule)


def _preference_phase(config: RunConfig, pairs: int) -> PreferenceJob:
    preference = config.preference
    steps = preference.steps or max(1, ceil(rows_to_train(config, pairs) / preference.batch))
    optim = config.optim.model_copy(update={"lr": preference.lr})
    return PreferenceJob(schedule=SftSchedule(steps=steps, batch=preference.batch, optim=optim))


def rows_to_train(config: RunConfig, rows: int) -> int:
    """The number of trained examples: the epochs × the examples of the dataset."""
    return round((config.preference.epochs or config.training.sft.epochs) * rows)


def steps_without_rl(run: RunPaths, config: RunConfig) -> int:
    """Steps of the run's SFT or preference training; 0 with epochs until the trainer has counted the rows and written
    the job."""
    phase = config.preference if config.has_preference else config.training.sft
    if not phase.epochs:
        return phase.steps
    file = run.training_job("preference" if config.has_preference else "sft")
    return read_job(file).steps if file.exists() else 0


def located_job(job: Job, folder: Path) -> Job:
    """The same job with absolute paths: relative ones are resolved against `folder`; URLs stay."""

    def absolute(path: str) -> str:
        return path if not path or "://" in path else str((folder / path).resolve())

    update: dict[str, Any] = {name: absolute(getattr(job, name)) for name in _PATHS}
    if isinstance(job.inputs, PackedInput):
        update["inputs"] = PackedInput(folder=absolute(job.inputs.folder))
    return job.model_copy(update=update)


def write_job(path: Path, job: Job) -> None:
    """Write the job's file atomically."""
    shared_files.write_atomic(path, job.model_dump_json(indent=2).encode() + b"\n")


def read_job(path: Path, folder: Path | None = None) -> Job:
    """The job in a file, with absolute paths; `ConfigError` if the file is invalid or of another version.

    `folder` is the base of relative paths; None: the file's folder.
    """
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(str(path), None, "a readable file", error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(str(path), None, "a job in JSON", str(error)) from None
    _check_header(path, tree)
    try:
        return located_job(_adapter.validate_python(tree), folder or path.parent)
    except ValidationError as error:
        raise _error(path, error.errors()[0]) from None


def _check_header(path: Path, tree: object) -> None:
    """Check kind and version first: the keys of another kind or version are unknown."""
    if not isinstance(tree, dict):
        raise ConfigError(str(path), tree, "a JSON object with the keys of a job", "see docs/jobs.md")
    if tree.get("kind") not in KINDS:
        hint = closest_match(str(tree.get("kind")), list(KINDS))
        raise ConfigError(f"{path}: kind", tree.get("kind"), f"one of {', '.join(KINDS)}", hint)
    if tree.get("version") != JOB_VERSION:
        later = "write the file with the version of Rollcall that reads it"
        hint = later if "version" in tree else f'add "version": {JOB_VERSION}'
        raise ConfigError(f"{path}: version", tree.get("version"), f"{JOB_VERSION}, which this code reads", hint)


def _error(path: Path, details: ErrorDetails) -> ConfigError:
    keys = [str(part) for part in details["loc"] if part not in _TAGS]
    key = f"{path}: {'.'.join(keys)}"
    if details["type"] == "extra_forbidden":
        return ConfigError(key, details["input"], "a known key", closest_match(keys[-1], list(_keys())))
    if details["type"] == "missing":
        return ConfigError(key, None, "a value", "see docs/jobs.md for the keys of a job")
    if details["type"] == "union_tag_invalid":
        expected = details["ctx"]["expected_tags"]
        return ConfigError(f"{key}.kind", details["ctx"]["tag"], f"one of {expected}, which this kind of job takes")
    if details["type"] == "union_tag_not_found":
        return ConfigError(key, details["input"], "an object with a kind", "see docs/jobs.md")
    return ConfigError(key, details["input"], details["msg"].removeprefix("Input should be "))


def _keys() -> Iterator[str]:
    for section in (SftJob, RlJob, SftSchedule, RlSchedule, OptimConfig, PackedInput):
        yield from section.model_fields


def with_resolved_rate(job: Job, model: ModelConfig) -> Job:
    """The job with the learning rate that fits the policy `model`, unless its file has one."""
    optim = with_learning_rate(job.schedule.optim, model)
    return job.model_copy(update={"schedule": job.schedule.model_copy(update={"optim": optim})})


def check_offline(file: Path, job: Job, config: RunConfig) -> None:
    """`ConfigError` for a job from a file that is incomplete, whose batches `config` cannot split, or whose output
    would replace anything but a model, also through links.
    """
    for name in ("optimizer_state", "output", "log"):
        if not getattr(job, name):
            raise ConfigError(f"{file}: {name}", "", "a path", "a job from a file must have it")
    moments_can_shrink(job.schedule.optim)
    if isinstance(job.inputs, StreamInput | RecordedInput | DatasetInput):
        hint = f"pack the rows, or have a run make them: {user_command('submit')}"
        raise ConfigError(f"{file}: inputs.kind", job.inputs.kind, "packed, in a job from a file", hint)
    if isinstance(job, RlJob):
        check_mini_batches(config, job.prompts, f"schedule.prompts of {file}")
    check_address(f"{file}: optimizer_state", job.optimizer_state, "see docs/checkpoints.md")
    file, log, output = file.resolve(), Path(job.log), Path(job.output)
    if log.is_dir() or log == file:
        raise ConfigError(f"{file}: log", job.log, "a file that is neither the job nor a folder")
    others = {"the job": file, "its log": log, "its optimizer_state": _folder_of(job.optimizer_state)}
    if isinstance(job.inputs, PackedInput):
        others["its inputs"] = Path(job.inputs.folder)
    for name, other in others.items():
        if output in (other, *other.parents) or other in output.parents:
            raise ConfigError(f"{file}: output", job.output, f"a folder apart from {name}, {other}")
    if output.exists() and not _is_replaceable(output):
        raise ConfigError(f"{file}: output", job.output, "a new folder, or one with a model or adapter to replace")


def _folder_of(address: str) -> Path:
    """The folder of a path or of a URL of this file system; for any other URL, a path that does not exist."""
    protocol, is_url, path = address.partition("://")
    return Path(path).resolve() if is_url and protocol in ("file", "local") else Path(address)


def _is_replaceable(path: Path) -> bool:
    known = ("config.json", "adapter_config.json")
    return path.is_dir() and (not any(path.iterdir()) or any((path / name).is_file() for name in known))
