"""Hydra's launcher plugin for runs: `hydra/launcher=rollcall`.

Owns the plugin: a launcher that derives from hydra-submitit-launcher's class and config, registered without a package
below `hydra_plugins`. Promises one `JobReturn` for each point, in order; the return value of a failed point raises the
reason when a sweeper reads it, and the sweeper decides what follows. Must not know how a point is run, which Hydra's
task function does.

The base class maps one job array over all points and waits for their pickles. This launcher starts a run for each
point, so it replaces `launch`; docs/decisions/0010 lists the other limits of an array.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher

MODULE = "hydra_plugins.rollcall_launcher"
"""Hydra instantiates plugins below `hydra_plugins` only."""


@dataclass
class RollcallQueueConf(BaseQueueConf):  # type: ignore[misc]
    """The keys below `hydra.launcher`; see `slurm.submission.sweeps.hydra_settings`."""

    _target_: str = f"{MODULE}.RollcallLauncher"
    objective: Any = "eval/accuracy"
    window: int = 1
    job: str = "rl"


class RollcallLauncher(BaseSubmititLauncher):  # type: ignore[misc]
    """Passes the points of a batch to the task function, and returns its results to the sweeper."""

    _EXECUTOR = "rollcall"

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points and return one `JobReturn` each, once all are over. `initial_job_idx` is not used."""
        del initial_job_idx
        assert self.config is not None
        assert self.task_function is not None
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        results = self.task_function([tuple(overrides) for overrides in job_overrides])
        return [_returned(overrides, result) for overrides, result in zip(job_overrides, results, strict=True)]


def register_launcher() -> None:
    """Register the launcher with Hydra, in this process."""
    RollcallLauncher.__module__ = MODULE
    sys.modules.setdefault(MODULE, sys.modules[__name__])
    Plugins.instance().register(RollcallLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="rollcall", node=RollcallQueueConf, provider="rollcall")


def _returned(overrides: Sequence[str], result: float | list[float] | Exception) -> JobReturn:
    returned = JobReturn(overrides=list(overrides), task_name="rollcall")
    returned.status = JobStatus.FAILED if isinstance(result, Exception) else JobStatus.COMPLETED
    returned.return_value = result
    return returned
