"""Evaluation of a run's checkpoint or a model directory, as a run that has servers and an actor but no trainer.

Owns the additions of `launchers/evaluate.py` to a submission: the choice of the model, the config of the evaluating
run, and the final table. Promises that the evaluated run is only read, with one exception: a checkpoint is exported as
a model below `exports/`, atomically, and never for `--dry-run` or `--cfg`. The same command resumes an interrupted
evaluation.

    python launchers/evaluate.py run=demo                              the finished model, or the newest checkpoint
    python launchers/evaluate.py run=demo checkpoint=rl-50 evaluation.sets.p.samples=8 …
    python launchers/evaluate.py model=models/mine task=countdown
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pipeline.checkpoints import PhaseName
from pipeline.checkpoints.checkpoint_store import checkpoint_name, parse_checkpoint_name
from pipeline.config import ModelConfig, RunConfig, load_config
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.run_history import find_run
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished
from pipeline.train.loop.checkpoint_export import export_command, find_checkpoint
from pipeline.utils import atomic_dirs, shared_files, subprocesses, terminal
from pipeline.utils.waiting import wait_for
from slurm.scheduler.scheduler_registry import child_environment
from slurm.submission import submit_run
from slurm.submission.compose_config import compose_config, compose_over, merge_trees
from slurm.submission.train_files import next_name, sibling_output

EXPORT_SECONDS = 3600.0
KEYS = ("run", "checkpoint", "model")
"""The launcher's own arguments; all other arguments are keys of the config."""
EVALUATION_ONLY: Mapping[str, Any] = {
    "evaluation": {"only": True},
    "replay": "",
    "preference": {"steps": 0, "epochs": 0},
    "training": {"steps": 0, "jobs": "", "sft": {"steps": 0, "epochs": 0}, "routing_replay": "none"},
    "data": {"path": "", "eval_path": "", "eval_split": "", "eval_rows": 0},
    "serve": {"enabled": False},
    "faults": [],
    "debug": {"profile_steps": [], "memory_steps": []},
    "tracking": {"trackers": []},
    "resources": {"nodes": 0, "spare_nodes": 0, "colocate": False, "hetjob": False, "services": {"nodes": 0}},
}
"""Settings of an evaluation-only run, which replace those that its model was trained with."""
_CHANGEABLE = ("resources", "tracking", "faults")
"""Sections and keys of `EVALUATION_ONLY` that the user may override."""
_LAID_LAST = rf"\+*({'|'.join(_CHANGEABLE)})\."


@dataclass(frozen=True)
class Export:
    """A checkpoint that must be exported as a model before servers can load it.

    Attributes:
        run: the run that saved the checkpoint.
        name: `<job>-<step>`.
        trained: the model that the run trains, which has the same architecture and tokenizer.
    """

    run: RunPaths
    name: str
    trained: ModelConfig

    @property
    def target(self) -> Path:
        return self.run.exports / self.name

    def write(self) -> None:
        """Write the model to `target`; `ConfigError` if that fails. A failed export leaves only its log."""
        print(f"writing {self.name} as a model: {self.target}", flush=True)
        log = self.target.with_name(f"{self.name}.log")
        command = export_command(self.run, self.name, self.target)
        child = subprocesses.Child(command, log, child_environment({"CUDA_VISIBLE_DEVICES": ""}))
        try:
            code = wait_for(f"{self.name} to be written", child.poll, EXPORT_SECONDS, longest_pause=1.0)
        except KeyboardInterrupt:
            log.unlink()
            raise
        finally:
            child.kill()
            atomic_dirs.discard(self.target, str(child.pid))
        if code:
            why = " ".join(subprocesses.tail(log, 1)) or subprocesses.describe_exit(code)
            raise ConfigError(
                "checkpoint", self.name, "a checkpoint that can be exported as a model", f"{why} (see {log})"
            )
        log.unlink()


def main(argv: Sequence[str]) -> int:
    """The exit code of `evaluate.py run=… [checkpoint=…] [options] [key=value …]`, or `model=…`."""
    composed: list[RunConfig] = []

    def compose(overrides: Sequence[str]) -> RunConfig:
        config, export = compose_evaluation(overrides)
        if export is not None and "--dry-run" in argv:
            print(f"{export.name} would be written as a model: {export.target}", flush=True)
            # The export does not exist: the checks read the trained model, whose architecture is the same.
            source = {key: getattr(export.trained, key) for key in ("path", "init", "lora")}
            config = config.model_copy(update={"model": config.model.model_copy(update=source)})
        elif export is not None and "--cfg" not in argv:
            export.write()
        composed.append(config)
        return config

    code = submit_run.main(argv, compose)
    evaluation = RunPaths(composed[-1].directory).evaluation if composed else None
    if code == 0 and evaluation is not None and evaluation.exists():
        show(evaluation)
    return code


def compose_evaluation(overrides: Sequence[str]) -> tuple[RunConfig, Export | None]:
    """The config of the evaluating run, and the export that must precede it, if any; `ConfigError` as for every run."""
    ours, rest = _split(overrides)
    if ("run" in ours) == ("model" in ours):
        hint = "run=<name or directory>, with checkpoint=rl-50 for one of its checkpoints, or model=<directory>"
        raise ConfigError("run", ours.get("run"), "a run or a model directory to evaluate", hint)
    if "model" in ours and "checkpoint" in ours:
        raise ConfigError(
            "checkpoint", ours["checkpoint"], "no checkpoint= together with model=…", "name the run instead: run=…"
        )
    if "model" in ours:
        config, export = _of_directory(ours["model"], rest), None
    else:
        config, export = _of_run(RunPaths(find_run([ours["run"]])), ours.get("checkpoint", ""), rest)
    if not any(text.lstrip("+").startswith("name=") for text in rest):
        config = config.model_copy(update={"name": next_name(config.output, config.name)})
    return config, export


def _split(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The launcher's own arguments by key, and all others; `ConfigError` for an own argument that occurs twice."""
    ours, rest = dict[str, str](), list[str]()
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in KEYS:
            rest.append(text)
        elif key in ours:
            raise ConfigError(key, value, "one value", f"{key}={ours[key]} is set too; leave one of them out")
        else:
            ours[key] = value
    return ours, rest


def _of_directory(model: str, overrides: Sequence[str]) -> RunConfig:
    directory = Path(model)
    if (directory / "adapter_config.json").is_file():
        hint = "evaluate the run that trained it (run=…), or merge it into its base"
        raise ConfigError("model", model, "a whole model; this directory holds an adapter", hint)
    if RunPaths(directory).run.is_file():
        raise ConfigError("model", model, "a model; this directory is a run", f"evaluate the run: run={model}")
    if not (directory / "config.json").is_file():
        raise ConfigError("model", model, "a directory with a Hugging Face model", "fix the path")
    own = _asks_builtin("model", model, overrides)
    named = f"eval-{_as_name(directory.resolve().name)}"
    base = compose_config([f"name={named}", *overrides]).model_dump(mode="json")
    begun = merge_trees(base, own, EVALUATION_ONLY, {"model": {"path": str(directory.resolve()), "init": "pretrained"}})
    return load_config(compose_over(begun, [text for text in overrides if re.match(_LAID_LAST, text)]))


def _asks_builtin(key: str, value: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The evaluation settings for a model without a training task; `ConfigError` unless a task or a set is named."""
    if any(re.match(r"\+*(task|experiment)\b", text) for text in overrides):
        return {}
    if any(re.match(r"\+*evaluation\.sets\b", text) for text in overrides):
        return {"evaluation": {"builtin_set": False}}
    hint = "name it: task=countdown, say, with its options, or evaluation.sets.<name>.task.name=…"
    raise ConfigError(key, value, "a task as well, whose prompts the model gets", hint)


def _of_run(run: RunPaths, checkpoint: str, overrides: Sequence[str]) -> tuple[RunConfig, Export | None]:
    trained = read_frozen_config(run)
    if trained is None:
        raise ConfigError("run", run.root.name, "a run with a readable config.json", f"see {run.config}")
    chosen, step, model = find_model(run, trained, checkpoint)
    lora = trained.model.lora.travels_alone
    whole = {"path": str(model), "init": "pretrained", "lora": {"adapter": ""}}  # a merged one has its adapter in it
    placed = {"lora": {"adapter": str(model)}} if lora else whole
    step_of = {"evaluation": {"step": step}, "name": f"{run.root.name[:50]}-eval-{chosen}"}
    own = {} if trained.has_rl or trained.evaluation.sets else _asks_builtin("run", run.root.name, overrides)
    begun = merge_trees(
        trained.model_dump(mode="json"), own, {"output": str(sibling_output(run, trained))}, EVALUATION_ONLY, step_of
    )
    config = load_config(merge_trees(compose_over(begun, overrides), {"model": placed}, _fixed(EVALUATION_ONLY)))
    missing = model.parent == run.exports and not _is_model(model)
    return config, Export(run, chosen, trained.model) if missing else None


def find_model(run: RunPaths, config: RunConfig, checkpoint: str) -> tuple[str, int, Path]:
    """The name, the step and the directory that `checkpoint` denotes. The directory of a checkpoint may not exist yet.

    `checkpoint` is `model`, `best`, `latest` or a checkpoint's name. If empty, it denotes the model of a finished run,
    else the newest checkpoint.
    """
    finished = shared_files.read_document(run.finished, Finished)
    checkpoint = checkpoint or ("model" if finished is not None and run.model.is_dir() else "latest")
    if checkpoint in ("model", "best"):
        directory = run.model if checkpoint == "model" else run.best
        if not directory.is_dir():
            hint = "name a checkpoint, such as checkpoint=latest"
            raise ConfigError("checkpoint", checkpoint, f"a run that has one; there is no {directory}", hint)
        return checkpoint, finished.steps if finished is not None else config.training.steps, directory
    job, step = _find_commit(run, checkpoint)
    name = checkpoint_name(job, step)
    return name, 0 if config.has_rl and job != "rl" else step, run.exports / name


def _find_commit(run: RunPaths, checkpoint: str) -> tuple[PhaseName, int]:
    """The training job and step of a checkpoint. An exported one may have been pruned since."""
    named = parse_checkpoint_name(checkpoint)
    if named is not None and _is_model(run.exports / checkpoint):
        return named
    try:
        manifest = find_checkpoint(run, checkpoint).manifest
    except RollcallError as error:
        raise ConfigError("checkpoint", checkpoint, "a checkpoint of the run", str(error)) from None
    return manifest.job, manifest.step


def _is_model(directory: Path) -> bool:
    """Whether the directory holds a whole model or an adapter."""
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def show(evaluation: Path) -> None:
    """Print the results of an evaluation file as a table."""
    result = msgspec.json.decode(evaluation.read_bytes())
    console = terminal.console(highlight=False)
    console.print(f"\n[bold]{result['model']}[/]  step {result['step']}", soft_wrap=True)
    console.print(table_of(result["sets"]))
    output = RunPaths(evaluation.parent).benchmark
    if output.is_dir():
        print(f"  benchmark   {output}", flush=True)


def table_of(sets: Mapping[str, Mapping[str, float | None]]) -> Table:
    """A table with one line for each set, and a column for each k of pass@k and each metric of the tasks."""
    shown = ("accuracy", "stderr", "prompts", "samples", "failed", "timed_out", "seconds", "version_min", "version_max")
    more = sorted({name for numbers in sets.values() for name in numbers if name not in shown}, key=_natural)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for column in ("set", "prompts", "samples", "accuracy", *more, "failed", "seconds"):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, numbers in sets.items():
        counts = [f"{numbers.get(key) or default:.0f}" for key, default in (("prompts", 0), ("samples", 1))]
        others = [f"{value:.4f}" if (value := numbers.get(key)) is not None else "—" for key in more]
        ends = [f"{numbers.get('failed') or 0:.0f}", f"{numbers.get('seconds') or 0:.1f}"]
        table.add_row(name, *counts, _accuracy(numbers), *others, *ends)
    return table


def _accuracy(numbers: Mapping[str, float | None]) -> str:
    """The accuracy with its standard error; a dash where an evaluation has none."""
    accuracy, error = numbers.get("accuracy"), numbers.get("stderr")
    if accuracy is None:
        return "—"
    return f"{accuracy:.4f}" if error is None else f"{accuracy:.4f} ± {error:.4f}"


def _natural(name: str) -> tuple[str, int]:
    """The sort key that puts pass@8 before pass@16."""
    head, _, number = name.partition("@")
    return (head, int(number)) if number.isdecimal() else (name, 0)


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:50].lstrip("._-") or "model"


def _fixed(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that no override may change."""
    return {key: value for key, value in tree.items() if key not in _CHANGEABLE}
