"""Weights & Biases (https://wandb.ai).

In offline mode wandb uses no network, and all of its files are below the run's tracking folder. wandb writes its file
in blocks, so a killed process leaves an incomplete last record, at which `wandb sync` stops, and loses the rows of that
block. Therefore each start, and each rollback, replaces the folder by a new one with all rows of `metrics.jsonl`. No
other module imports wandb.
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
from pipeline.tracking.tracker_protocol import Mode, numbers_of

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
        """The command for the folder of the newest attempt, which has the rows of all attempts."""
        folder = paths.tracking / "wandb"
        return f"wandb sync {shlex.quote(str(folder))}/{_FOLDERS}" if any(folder.glob(_FOLDERS)) else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        self._config, self._run_id, self._folder, self._mode = config, run_id, folder, mode
        self._is_online = mode == "online"
        self._run: Any = self._start() if self._is_online else None

    def _start(self) -> Any:
        import wandb

        quiet = {} if self._is_online else _QUIET
        run = wandb.init(
            project=self._config.tracking.project,
            id=self._run_id,
            name=self._config.name,
            mode=self._mode,
            resume="allow" if self._is_online else None,
            dir=str(self._folder),
            config=self._config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True, init_timeout=START_SECONDS, **quiet),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for job in ("sft", "preference"):
            run.define_metric(f"{job}/*", step_metric=f"{job}/step")
        return run

    def start_over(self) -> bool:
        """Offline, replace the folders of all attempts by a new one."""
        if self._is_online:
            return False
        self.finish()
        for folder in (self._folder / "wandb").glob(_FOLDERS):
            shutil.rmtree(folder)
        self._run = self._start()
        return True

    @property
    def received(self) -> int | None:
        """wandb counts the rows that it has received; offline it starts over."""
        return int(self._run.starting_step) if self._is_online else None

    def log(self, row: MetricRecord, number: int) -> None:
        # A training step and its evaluation are two rows of one step, so wandb's own step is the number of the row.
        self._run.log(numbers_of(row), **({} if self._is_online else {"step": number}))

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
