"""Weights & Biases (https://wandb.ai).

In offline mode wandb uses no network, and all of its files are below the run's tracking folder. No other module imports
wandb.
"""

import shlex
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
_QUIET = {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False, "disable_git": True}


class Tracker(tracker_protocol.Tracker):
    """One wandb run, whose step axis is the run's step. Each step is logged once, since wandb cannot roll back."""

    package = "wandb"

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
        """One command for the folders of all attempts."""
        folder = paths.tracking / "wandb"
        return f"wandb sync {shlex.quote(str(folder))}/offline-run-*" if any(folder.glob("offline-run-*")) else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        import wandb

        self._is_online = mode == "online"
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
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for job in ("sft", "preference"):
            self._run.define_metric(f"{job}/*", step_metric=f"{job}/step")

    @property
    def received(self) -> int | None:
        """wandb counts the rows that it has received; offline it knows nothing of earlier attempts."""
        return int(self._run.starting_step) if self._is_online else None

    def log(self, row: MetricRecord, number: int) -> None:
        # Offline each attempt would start at 0, and rows with equal numbers would collide in the upload.
        self._run.log(numbers_of(row), **({} if self._is_online else {"step": number}))

    def finish(self) -> None:
        self._run.finish()
