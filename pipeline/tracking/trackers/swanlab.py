"""SwanLab (https://swanlab.cn).

In offline mode SwanLab uses no network, and its files are in `tracking/swanlab/` of the run directory, with one folder
for each attempt. No other module imports swanlab.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.tracking import tracker_protocol
from pipeline.tracking.tracker_protocol import Mode, numbers_of


class Tracker(tracker_protocol.Tracker):
    """One experiment with the run_id as its id. Each step is logged once."""

    package = "swanlab"

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
        """One command for the folders of all attempts."""
        folder = paths.tracking / "swanlab"
        return f"swanlab sync {shlex.quote(str(folder))}/run-*" if any(folder.glob("run-*")) else ""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, mode: Mode) -> None:
        import swanlab

        (folder / "swanlab").mkdir(parents=True, exist_ok=True)
        self._run: Any = swanlab.init(
            project=config.tracking.project,
            name=config.name,
            log_dir=str(folder / "swanlab"),
            mode=mode,
            config=config.model_dump(mode="json"),
            id=run_id,
            resume="allow",
        )

    def log(self, row: MetricRecord, number: int) -> None:
        numbers = numbers_of(row)
        self._run.log({name: float(numbers[name]) for name in numbers if name != "step"}, step=row["step"])

    def finish(self) -> None:
        self._run.finish()
