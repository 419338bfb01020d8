"""Weights & Biases (https://wandb.ai).

In offline mode wandb uses no network, and all of its files are below the run's tracking folder. wandb writes its file
in blocks, so a killed process leaves an incomplete last record, at which `wandb sync` stops, and loses the rows of that
block. Therefore an attempt replaces the folders that were not uploaded by a new one, with their rows from
`metrics.jsonl`. No other module imports wandb.
"""

import shlex
import shutil
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.tracking import tracker_protocol
from pipeline.tracking.tracker_protocol import Mode, axis_of, metrics_of, numbers_of

START_SECONDS = 60.0
_FOLDERS = "offline-run-*"
_FIRST_ROW = "rollcall-first-row"
"""A file in a folder with the number of its first row among all rows of the run."""
_QUIET = {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False, "disable_git": True}


class Tracker(tracker_protocol.Tracker):
    """One wandb run, whose step axis is the run's step. Online, wandb cannot roll back: each step is logged once."""

    package = "wandb"
    project_pattern = r"[^/\\#?%:]{1,128}"
    project_rule = "at most 128 characters, none of them `/`, `\\`, `#`, `?`, `%` or `:`"

    @staticmethod
    def has_login(variables: Mapping[str, str], home: Path) -> bool:
        """With `WANDB_API_KEY`, or a key in the netrc file."""
        try:
            in_file = netrc(home / ".netrc").authenticators("api.wandb.ai") is not None
        except (OSError, NetrcParseError):
            in_file = False
        return bool(variables.get("WANDB_API_KEY")) or in_file

    @staticmethod
    def variables(folder: Path, mode: Mode) -> Mapping[str, str]:
        """Direct wandb's files below `folder`, and disable its error reports."""
        folders = {"WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
        if mode == "offline":  # online, wandb needs the user's settings
            folders |= {"WANDB_CONFIG_DIR": "config"}
        return {name: str(folder / child) for name, child in folders.items()} | {"WANDB_ERROR_REPORTING": "false"}

    @staticmethod
    def upload_command(paths: RunPaths) -> str:
        """One command for all folders; wandb leaves out those that it has uploaded."""
        folder = paths.tracking / "wandb"
        return f"wandb sync {shlex.quote(str(folder))}/{_FOLDERS}" if any(folder.glob(_FOLDERS)) else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        import wandb

        self._folder, self._is_online, self._is_new = folder / "wandb", mode == "online", True
        self._received = None if self._is_online else _drop_unsynced(self._folder)
        self._known = set(self._folder.glob(_FOLDERS))
        quiet = {} if self._is_online else _QUIET
        self._run: Any = wandb.init(
            project=config.tracking.project,
            id=run_id,
            name=config.name,
            mode=mode,
            resume="allow" if self._is_online else None,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True, init_timeout=START_SECONDS, **quiet),
        )
        self._named: set[str] = set()

    @property
    def received(self) -> int | None:
        """wandb counts the rows that it has received; offline, those of the folders that were kept."""
        return int(self._run.starting_step) if self._is_online else self._received

    def log(self, row: MetricRecord, number: int) -> None:
        if self._is_new:
            self._is_new = False
            for folder in set(self._folder.glob(_FOLDERS)) - self._known:
                (folder / _FIRST_ROW).write_text(str(number))
        self._define_axes(row)
        # Offline each attempt would start at 0, and rows with equal numbers would collide in the upload.
        self._run.log(numbers_of(row), **({} if self._is_online else {"step": number}))

    def _define_axes(self, row: MetricRecord) -> None:
        """Give each new name its axis. By a pattern `*`, wandb would add the RL axis to rows of SFT too."""
        axis = axis_of(row)
        for name in (axis, *metrics_of(row)):
            if name not in self._named:
                self._named.add(name)
                self._run.define_metric(name, step_metric=None if name == axis else axis)

    def finish(self) -> None:
        self._run.finish()


def _drop_unsynced(folder: Path) -> int | None:
    """Remove the folders that `wandb sync` has not uploaded. Returns the number of rows before them, if any had rows.

    An uploaded folder stays: the service appends the rows of a later folder to its own.
    """
    firsts = []
    for old in folder.glob(_FOLDERS):
        if not any(old.glob("*.wandb.synced")):
            if (first := old / _FIRST_ROW).exists():
                firsts.append(int(first.read_text()))
            shutil.rmtree(old)
    return min(firsts, default=None)
