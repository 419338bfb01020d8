"""The content of a run directory before its job starts.

Owns the run's identity, its frozen config, the snapshot of the code, and the start from scratch.
`pipeline.checkpoints.run_progress` owns the rule which files a resumed run needs. Promises that a run directory belongs
to one config only; that a damaged or missing file is restored from its copy, or refused with a hint; and that a start
from scratch deletes nothing. The caller holds the run's lock.
"""

import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import pipeline
from pipeline.checkpoints import Fence, newest_checkpoint, root_of
from pipeline.checkpoints.run_progress import has_begun, known_config, known_identity, new_aside_folder, refuse_restart
from pipeline.config import InferenceConfig, RewardConfig, RunConfig, TaskConfig, load_config
from pipeline.config.data_keys import located_data, located_options, located_path
from pipeline.config.frozen_config import in_older_form, read_frozen_config
from pipeline.config.model_directory import draft_directory, located_model
from pipeline.config.run_identity import differences, identity_digest
from pipeline.config.task_keys import MixedTaskConfig
from pipeline.errors import CheckpointError, ConfigError, RunStateError
from pipeline.run.completion import is_finished
from pipeline.run.paths import RunPaths, SweepPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files
from slurm.registry import code_snapshot

ENTRANCES = ("slurm/agent/agent.py", "slurm/batch/requeue.py", "slurm/batch/local_controller.py")
"""The modules of a run's snapshot that the job starts, as a launcher of a possibly newer version expects."""

_WITH_FILES = ("agent", "dataset", "harbor", "openenv")
"""Tasks whose options `path`, `eval_path` and `command` name files. Those of a custom task may have another meaning."""


def refuse_contents(run: RunPaths, config: RunConfig) -> RunIdentity | None:
    """Raise `RunStateError` unless the directory is empty, or has this run, unfinished and resumable.

    Returns the run's identity, or None for a new run. With `resume=scratch` the content is moved aside, so only a
    sweep's directory is refused.
    """
    if SweepPaths(run.root).manifest.exists():
        raise RunStateError("name", config.name, "a name that no sweep has", f"add -m, or name={config.name}-2")
    if config.resume == "scratch":
        return None
    if is_finished(run):
        hint = f"start a new run with name={config.name}-2, or start over with resume=scratch"
        raise RunStateError("name", config.name, f"a run that is not finished (see {run.report})", hint)
    try:
        return _refuse_incomplete(run, config)
    except CheckpointError as error:
        raise RunStateError("resume", config.resume, f"a run that can continue; {error}") from None


def _refuse_incomplete(run: RunPaths, config: RunConfig) -> RunIdentity | None:
    """Raise `CheckpointError` if the run lacks files that `pipeline.checkpoints.run_progress` requires.

    Checkpoints that this machine cannot reach are not checked. `RunStateError` for a run with another config or
    version. The code of a run that has not begun is not checked: `freeze_run` replaces it.
    """
    known = known_identity(run)
    if known is None:
        return None
    root = root_of(config, run, known.run_id)
    tree = known_config(run, root)
    if tree is None:
        return known
    begun = has_begun(run)
    if begun:
        _refuse_code(run, known)
    old, new = _load(run, tree), located_config(config)
    if identity_digest(old) != identity_digest(new):
        changes = "; ".join(differences(old, new))
        hint = f"submit it with the old values, or give the new run another name (name={config.name}-2)"
        raise RunStateError("name", config.name, f"the config this run was made with, but {changes}", hint)
    if not begun:
        return known
    try:
        in_older_form(new, tree)
    except ConfigError as error:
        raise _of_another_version(run, f"a run whose code has {error.key} ({error})") from None
    if not (config.evaluation.only or config.training.jobs):  # those keep no checkpoints of the run's own
        _refuse_lost_checkpoints(run, root, elsewhere=bool(config.training.checkpoints))
    return known


def _refuse_code(run: RunPaths, known: RunIdentity) -> None:
    """Raise an error if the run's snapshot is damaged, or lacks a module that this version starts."""
    code_snapshot.refuse_damaged(run, known)
    if run.code.exists() and (absent := [name for name in ENTRANCES if not (run.code / name).exists()]):
        raise _of_another_version(run, f"a run whose code has {absent[0]}, which this version starts")


def _refuse_lost_checkpoints(run: RunPaths, root: str, *, elsewhere: bool) -> None:
    """Raise `CheckpointError` if the run's checkpoints are lost. The trainer checks unreachable stores."""
    try:
        if newest_checkpoint(root) is not None:
            return
        refuse_restart(run, root)
    except CheckpointError as error:
        if elsewhere and error.__cause__ is not None:
            print(f"warning: {root} cannot be seen from here: {error}", file=sys.stderr)
            return
        raise


def _load(run: RunPaths, tree: dict[str, Any]) -> RunConfig:
    try:
        return load_config(tree)
    except ConfigError as error:
        raise _of_another_version(run, f"a run whose config this version reads ({error})") from None


def _of_another_version(run: RunPaths, expected: str) -> RunStateError:
    """The error for a valid run of another version of the code."""
    known = shared_files.read_document(run.run, RunIdentity)
    made = known.revision if known else ""
    hint = f"submit it from the checkout it was made with{made and f' ({made})'}, or start a new one with "
    return RunStateError("name", run.root.name, expected, f"{hint}name={run.root.name}-2")


def set_aside(run: RunPaths) -> None:
    """Move the run's files to a new folder below `aside`, so that the run starts over with another id.

    An attempt that was cut off may still run. A new fencing owner revokes its right to write to the old checkpoints,
    and to the folder that the next attempt uses.
    """
    locks = {run.lock, run.job_lock, run.aside}
    entries = sorted(path for path in run.root.iterdir() if path not in locks and not path.name.startswith("."))
    if not entries:
        return
    target = new_aside_folder(run)
    owner = f"scratch-{target.name}"
    _adopt_owner(run, owner)
    target.mkdir(parents=True)
    for path in sorted(
        entries, key=lambda path: path in (run.attempts, run.metrics)
    ):  # attempts and metrics last: they show that the run had progress
        path.rename(target / path.name)
    fence = Fence(str(run.checkpoints), owner)
    fence.claim()
    fence.keep([])
    print(f"the files of {run.root} are in {target} now; the run starts over", file=sys.stderr)


def _adopt_owner(run: RunPaths, owner: str) -> None:
    """Claim the abandoned checkpoints for `owner`, if they are known and reachable."""
    try:
        config, known = read_frozen_config(run), known_identity(run)
        if config is not None and known is not None:
            Fence(root_of(config, run, known.run_id), owner).claim()
    except CheckpointError as error:
        print(f"warning: an attempt that was cut off may still write to the run: {error}", file=sys.stderr)


def freeze_run(run: RunPaths, known: RunIdentity | None, config: RunConfig) -> None:
    """Write code, config and identity, unless they exist; an existing config gets the operational changes, in the form
    that the run's code reads. A run that no attempt has begun gets the current code and the whole config.

    The order matters: if a submission is killed between two of them, the next submission completes it. Lost files of a
    `known` run are created again.
    """
    lost = [path for path, kind in ((run.run, RunIdentity), (run.config, dict)) if not _is_readable(path, kind)]
    resumed = known if known is not None and has_begun(run) else None
    if resumed is None:  # the code may have been edited since a submission that started nothing
        code_snapshot.snapshot_code(run, config)
    elif not run.code.exists():
        lost.append(run.code)
        code_snapshot.snapshot_code(run, config, resumed.code)
    earlier = known_config(run, root_of(config, run, resumed.run_id)) if resumed else None
    tree = config.model_dump(mode="json") if earlier is None else in_older_form(config, earlier)
    shared_files.write_document(run.config, tree)
    made = {"revision": git_revision(), "code": code_snapshot.digest(run)}
    if known is None:
        run_id = f"{config.name}-{secrets.token_hex(4)}"
        shared_files.create_document(run.run, RunIdentity(run_id=run_id, created=time.time(), **made))
    elif resumed is None:
        shared_files.write_document(run.run, msgspec.structs.replace(known, **made))
    elif run.run in lost:
        shared_files.write_document(run.run, known)
    for path in lost if known and run.attempts.exists() else ():
        print(f"warning: {path} was lost, and is created again from the remaining files", file=sys.stderr)


def _is_readable(path: Path, kind: type[Any]) -> bool:
    return shared_files.read_document(path, kind) is not None


def located_config(config: RunConfig) -> RunConfig:
    """The config with absolute paths, so that it is valid in any working directory."""
    jobs = config.training.jobs and str(Path(config.training.jobs).resolve())
    located: dict[str, Any] = {
        "resume": "auto",
        "replay": config.replay and _located_replay(config),
        "model": located_model(config.model),
        "data": located_data(config.data),
        "training": config.training.model_copy(update={"jobs": jobs}),
        "reward": _located_reward(config.reward),
        "inference": _located_inference(config),
    }
    located["task"] = _located_task(config.task)
    sets = config.evaluation.sets
    with_tasks = {
        name: eval_set.model_copy(
            update={"task": _located_task(eval_set.task), "reward": _located_reward(eval_set.reward)}
        )
        for name, eval_set in sets.items()
        if eval_set.task
    }
    located["evaluation"] = config.evaluation.model_copy(update={"sets": {**sets, **with_tasks}})
    return config.model_copy(update=located)


def _located_inference(config: RunConfig) -> InferenceConfig:
    speculation = config.inference.speculation
    if speculation.method != "draft":
        return config.inference
    located = speculation.model_copy(update={"model": str(draft_directory(config))})
    return config.inference.model_copy(update={"speculation": located})


def _located_replay(config: RunConfig) -> str:
    """The directory of the run that `replay` names."""
    from pipeline.rollout.recorded_groups import replayed_run  # its numpy would cost each agent a fifth of its imports

    return str(replayed_run(config).root)


def _located_reward(reward: RewardConfig) -> RewardConfig:
    path = reward.model.path and str(Path(reward.model.path).resolve())
    return reward.model_copy(update={"model": reward.model.model_copy(update={"path": path})})


def _located_task(task: TaskConfig) -> TaskConfig:
    def options_of(entry: TaskConfig | MixedTaskConfig) -> dict[str, Any]:
        if entry.name == "verifiers":  # its other paths are the environment's, which may give them another meaning
            python = {"python": entry.options["python"]} if "python" in entry.options else {}
            return {**entry.options, **located_options(python)}
        return located_options(entry.options) if entry.name in _WITH_FILES else entry.options

    tasks = tuple(entry.model_copy(update={"options": options_of(entry)}) for entry in task.tasks)
    # podman's name of an image, such as docker.io/library/python:3.12, is no path.
    image = located_path(task.sandbox.image)
    sandbox = task.sandbox.model_copy(update={"image": image})
    return task.model_copy(update={"options": options_of(task), "tasks": tasks, "sandbox": sandbox})


def git_revision() -> str:
    """The revision of this checkout, with `-dirty` if it has changes; empty without git."""
    source = Path(pipeline.__file__).parent.parent
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()
