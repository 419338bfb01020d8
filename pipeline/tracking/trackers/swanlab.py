"""SwanLab (https://swanlab.cn).

In offline mode SwanLab uses no network, and its files are in `tracking/swanlab/` of the run directory. SwanLab buffers
its file, so a killed process loses its last rows. Therefore each attempt replaces the folder by a new one with all
rows of `metrics.jsonl` (`pipeline.tracking.offline_folders`). No other module imports swanlab.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.tracking import tracker_protocol
from pipeline.tracking.offline_folders import OfflineFolders, complete_folders
from pipeline.tracking.tracker_protocol import Mode, logged_rows, metrics_of

_FOLDERS = "run-*"


class Tracker(tracker_protocol.Tracker):
    """One experiment with the run_id as its id. Online, each step is logged once."""

    package = "swanlab"
    project_pattern = r"[0-9A-Za-z_.+-]{1,100}"
    project_rule = "letters, digits, `_`, `.`, `+` and `-`, at most 100"

    @staticmethod
    def has_login(variables: Mapping[str, str], home: Path) -> bool:
        """With `SWANLAB_API_KEY`, or the file that `swanlab login` writes."""
        return bool(variables.get("SWANLAB_API_KEY")) or (home / ".swanlab" / ".netrc").exists()

    @staticmethod
    def variables(folder: Path, mode: Mode) -> Mapping[str, str]:
        """Offline, direct SwanLab's settings below `folder`; online it needs the user's."""
        return {"SWANLAB_SAVE_DIR": str(folder / "swanlab-home")} if mode == "offline" else {}

    @staticmethod
    def upload_command(paths: RunPaths) -> str:
        """The command for the newest complete folder, which has the rows of all attempts before."""
        folders = complete_folders(paths.tracking / "swanlab", _FOLDERS)
        return f"swanlab sync {folders}" if folders else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        import swanlab

        (folder / "swanlab").mkdir(parents=True, exist_ok=True)
        logged = logged_rows(folder, "swanlab")
        self._folders = None if mode == "online" else OfflineFolders(folder / "swanlab", _FOLDERS, logged)
        self._run: Any = swanlab.init(
            project=config.tracking.project,
            name=config.name,
            log_dir=str(folder / "swanlab"),
            mode=mode,
            config=config.model_dump(mode="json"),
            id=run_id,
            resume="allow",
        )
        if self._folders is not None:
            self._folders.mark_new()

    @property
    def received(self) -> int | None:
        """Offline none, so that all rows are logged to the new folder; an upload skips steps that the service has."""
        return None if self._folders is None else 0

    def log(self, row: MetricRecord, number: int) -> None:
        if self._folders is not None:
            self._folders.add_row()
        self._run.log({name: float(value) for name, value in metrics_of(row).items()}, step=row["step"])

    def idle(self) -> None:
        if self._folders is not None:
            self._folders.idle()

    def finish(self) -> None:
        self._run.finish()
        if self._folders is not None:
            self._folders.complete()
