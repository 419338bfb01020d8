"""What a trainer is asked to do.

Owns the form of a job, as a file and as a value, and which jobs a run's config asks for, in order. A job says what is
done: kind, inputs, what it starts from, where its results go, its log, its schedule. How it is done (model, loss,
budgets, device) the config says. Promises that a file which is no job of this version is one `ConfigError` that names
the file, and that the jobs of a run and those that stand alone are of one form. Must not know torch, ranks or losses.

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

from pipeline.config import OptimConfig, RunConfig, closest_match
from pipeline.config.cross_checks import check_address, check_mini_batches
from pipeline.config.value_types import Positive, Section
from pipeline.errors import ConfigError
from pipeline.run.paths import CHECKPOINTS, METRICS, MODEL, RunPaths
from pipeline.utils import shared_files

JOB_VERSION: Literal[1] = 1


class DemonstrationsInput(Section):
    """What the task of the config demonstrates."""

    kind: Literal["demonstrations"] = "demonstrations"


class DatasetInput(Section):
    """The conversations of `data.*` in the config."""

    kind: Literal["dataset"] = "dataset"


class StreamInput(Section):
    """The prepared groups of a run, as its actor and preprocessor make them: only a run has them."""

    kind: Literal["stream"] = "stream"


class PackedInput(Section):
    """A folder of `pipeline.train.offline.packed_dataset`; it is removed when the job is done with it."""

    kind: Literal["packed"] = "packed"
    folder: str


class SftSchedule(Section):
    """`steps` optimizer steps, each of `batch` rows."""

    steps: Positive
    batch: Positive
    optim: OptimConfig = OptimConfig()


class RlSchedule(Section):
    """`steps` steps, each of `prompts` prompts with all their samples."""

    steps: Positive
    prompts: Positive
    optim: OptimConfig = OptimConfig()


class _Job(Section):
    """What both kinds of job say.

    Attributes:
        checkpoint: directory to start from: of a model, or of an adapter where `model.lora.rank` > 0. Empty: in a run,
            the weights that the job before it left; for a job that stands alone, the config's model.
        optimizer_state: folder or URL of the optimizer's state. Jobs of this kind share it: it is read if it is there,
            and committed with the model's own state.
        output: directory that becomes the trained model, or adapter.
        log: file of `pipeline.train.offline.job_log`.
    """

    version: Literal[1] = JOB_VERSION
    checkpoint: str = ""
    optimizer_state: str = ""
    output: str = ""
    log: str = ""

    @property
    def digest(self) -> str:
        """Tells jobs apart that ask for different things."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class SftJob(_Job):
    """Supervised fine-tuning: minimises the cross-entropy of the counted tokens."""

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


class RlJob(_Job):
    """Reinforcement learning from groups of samples: minimises the config's policy loss."""

    kind: Literal["rl"] = "rl"
    inputs: Annotated[StreamInput | PackedInput, Field(discriminator="kind")]
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


Job = SftJob | RlJob
KINDS = ("sft", "rl")
_TAGS = (*KINDS, "demonstrations", "dataset", "stream", "packed")
_PATHS = ("checkpoint", "optimizer_state", "output", "log")
_form: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Field(discriminator="kind")])


def jobs_of(config: RunConfig, rows: int = 0) -> tuple[Job, ...]:
    """The jobs of a run, in order: SFT if it has steps, then RL if it has steps. The output of the last one is the
    run's model. Paths are relative to `RunPaths.jobs`.

    `rows` are those of the dataset, which epochs are counted in; who goes on with RL need not know them.
    """
    jobs: list[Job] = []
    if config.has_sft:
        jobs.append(_sft_phase(config, rows))
    if config.has_rollouts:
        schedule = RlSchedule(steps=config.training.steps, prompts=config.training.prompts_per_step, optim=config.optim)
        jobs.append(RlJob(inputs=StreamInput(), schedule=schedule))
    places = {"optimizer_state": config.training.checkpoints or f"../{CHECKPOINTS}", "log": f"../{METRICS}"}
    outputs = [*("" for _ in jobs[1:]), f"../{MODEL}"]
    return tuple(job.model_copy(update={**places, "output": output}) for job, output in zip(jobs, outputs, strict=True))


def _sft_phase(config: RunConfig, rows: int) -> SftJob:
    """Before RL, whose schedule `optim.*` is, its learning rate is constant; alone it has that schedule itself."""
    start, optim = config.training.sft, config.optim.model_copy(update={"lr": config.training.sft.lr})
    if config.has_rollouts:
        optim = optim.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    steps = start.steps or max(1, ceil(rows_to_train(config, rows) / start.batch))
    schedule = SftSchedule(steps=steps, batch=start.batch, optim=optim)
    return SftJob(inputs=DatasetInput() if config.data.path else DemonstrationsInput(), schedule=schedule)


def rows_to_train(config: RunConfig, rows: int) -> int:
    """How many rows the epochs of a dataset of so many rows are, in all."""
    return round(config.training.sft.epochs * rows)


def steps_of_sft(run: RunPaths, config: RunConfig) -> int:
    """Steps of the run's fine-tuning; of epochs 0 until the trainer has counted the rows, and written its job."""
    if not config.training.sft.epochs:
        return config.training.sft.steps
    file = run.training_job("sft")
    return read_job(file).steps if file.exists() else 0


def located_job(job: Job, folder: Path) -> Job:
    """The same job with every path absolute, those that were relative below `folder`; URLs stay."""

    def whole(path: str) -> str:
        return path if not path or "://" in path else str((folder / path).resolve())

    update: dict[str, Any] = {name: whole(getattr(job, name)) for name in _PATHS}
    if isinstance(job.inputs, PackedInput):
        update["inputs"] = PackedInput(folder=whole(job.inputs.folder))
    return job.model_copy(update=update)


def write_job(path: Path, job: Job) -> None:
    """Write the job's file; a reader sees the whole of it or none."""
    shared_files.write_atomic(path, job.model_dump_json(indent=2).encode() + b"\n")


def read_job(path: Path, folder: Path | None = None) -> Job:
    """The job in a file, with absolute paths; `ConfigError` if it is none of this version.

    `folder` is what its paths are relative to, where that is no longer the file's own.
    """
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(str(path), None, "a readable file", error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(str(path), None, "a job in JSON", str(error)) from None
    _check_header(path, tree)
    try:
        return located_job(_form.validate_python(tree), folder or path.parent)
    except ValidationError as error:
        raise _error(path, error.errors()[0]) from None


def _check_header(path: Path, tree: object) -> None:
    """Kind and version before all else: of another one, nothing else is known."""
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
    place = [str(part) for part in details["loc"] if part not in _TAGS]
    key = f"{path}: {'.'.join(place)}"
    if details["type"] == "extra_forbidden":
        return ConfigError(key, details["input"], "a known key", closest_match(place[-1], list(_keys())))
    if details["type"] == "missing":
        return ConfigError(key, None, "a value", "see docs/jobs.md for what a job says")
    if details["type"] == "union_tag_invalid":
        expected = details["ctx"]["expected_tags"]
        return ConfigError(f"{key}.kind", details["ctx"]["tag"], f"one of {expected}, which this kind of job takes")
    if details["type"] == "union_tag_not_found":
        return ConfigError(key, details["input"], "an object with a kind", "see docs/jobs.md")
    return ConfigError(key, details["input"], details["msg"].removeprefix("Input should be "))


def _keys() -> Iterator[str]:
    for section in (SftJob, RlJob, SftSchedule, RlSchedule, OptimConfig, PackedInput):
        yield from section.model_fields


def check_offline(file: Path, job: Job, config: RunConfig) -> None:
    """`ConfigError` unless a job can stand alone, its batches are such as `config` can cut, and it can be done without
    removing anything but what it replaces, whatever links lead there."""
    for name in ("optimizer_state", "output", "log"):
        if not getattr(job, name):
            raise ConfigError(f"{file}: {name}", "", "a path", "a job that stands alone says where it goes")
    if isinstance(job.inputs, StreamInput | DatasetInput):
        hint = "pack the rows, or have a run make them: python launchers/submit.py"
        raise ConfigError(f"{file}: inputs.kind", job.inputs.kind, "packed, in a job that stands alone", hint)
    if isinstance(job, RlJob):
        check_mini_batches(config, job.prompts, f"schedule.prompts of {file}")
    check_address(f"{file}: optimizer_state", job.optimizer_state, "see docs/checkpoints.md")
    file, log, output = file.resolve(), Path(job.log), Path(job.output)
    if log.is_dir() or log == file:
        raise ConfigError(f"{file}: log", job.log, "a file of its own")
    places = {"the job": file, "its log": log, "its optimizer_state": _place(job.optimizer_state)}
    if isinstance(job.inputs, PackedInput):
        places["its inputs"] = Path(job.inputs.folder)
    for name, place in places.items():
        if output in (place, *place.parents) or place in output.parents:
            raise ConfigError(f"{file}: output", job.output, f"a folder apart from {name}, {place}")
    if output.exists() and not _is_replaceable(output):
        raise ConfigError(f"{file}: output", job.output, "a new folder, or one with a model or adapter to replace")


def _place(address: str) -> Path:
    """The folder of a path or of a URL of this file system; of any other URL, one that is nowhere."""
    protocol, is_url, path = address.partition("://")
    return Path(path).resolve() if is_url and protocol in ("file", "local") else Path(address)


def _is_replaceable(path: Path) -> bool:
    known = ("config.json", "adapter_config.json")
    return path.is_dir() and (not any(path.iterdir()) or any((path / name).is_file() for name in known))
