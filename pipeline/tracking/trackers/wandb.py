"""Weights & Biases (https://wandb.ai).

In offline mode wandb uses no network, and all of its files are below the run's tracking folder. wandb writes its file
in blocks, so a killed process leaves an incomplete last record, at which `wandb sync` stops, and loses the rows of that
block. Therefore an attempt replaces the folders that were not uploaded by a new one, with their rows from
`metrics.jsonl` (`pipeline.tracking.offline_folders`). No other module imports wandb.
"""

from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.tracking import tracker_protocol
from pipeline.tracking.offline_folders import OfflineFolders, complete_folders
from pipeline.tracking.tracker_protocol import Mode, axis_of, logged_rows, metrics_of, numbers_of

START_SECONDS = 60.0
_FOLDERS = "offline-run-*"
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
        """One command for all complete folders; wandb leaves out those that it has uploaded."""
        folders = complete_folders(paths.tracking / "wandb", _FOLDERS)
        return f"wandb sync {folders}" if folders else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        import wandb

        self._is_online = mode == "online"
        logged = logged_rows(folder, "wandb")
        self._folders = None if self._is_online else OfflineFolders(folder / "wandb", _FOLDERS, logged, _is_uploaded)
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
        if self._folders is not None:
            self._folders.mark_new()

    @property
    def received(self) -> int | None:
        """wandb counts the rows that it has received; offline, those of the folders that were uploaded."""
        return int(self._run.starting_step) if self._folders is None else self._folders.first_row

    def log(self, row: MetricRecord, number: int) -> None:
        if self._folders is not None:
            self._folders.add_row()
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

    def idle(self) -> None:
        if self._folders is not None:
            self._folders.idle()

    def finish(self) -> None:
        import wandb

        self._run.finish()
        if self._folders is not None:
            if self._folders.is_rewriting:
                wandb.teardown()  # the file's last block is written by wandb's own process, after `finish`
            self._folders.complete()


def _is_uploaded(folder: Path) -> bool:
    """Whether `wandb sync` has uploaded the folder."""
    return any(folder.glob("*.wandb.synced"))
