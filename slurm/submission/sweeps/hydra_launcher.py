"""Hydra's launcher plugin for runs: `hydra/launcher=rollcall`.

Owns what Hydra sees of us: a launcher on hydra-submitit-launcher's base class and config, found without a package of
ours below `hydra_plugins`. Promises one `JobReturn` for each point, in their order, and that a point which failed is
one that raises its reason when its value is asked for: what a sweeper makes of that is the sweeper's. Must not know how
a point is run: that is the task function, which Hydra hands over.

Its base maps one job array over all points and waits for their pickles. Ours starts a run for each, so `launch` is
replaced; docs/decisions/0010 says what else an array cannot do.
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
    """The keys below `hydra.launcher`: see `slurm.submission.sweeps.hydra_settings`."""

    _target_: str = f"{MODULE}.RollcallLauncher"
    objective: Any = "eval/accuracy"
    window: int = 1
    job: str = "rl"


class RollcallLauncher(BaseSubmititLauncher):  # type: ignore[misc]
    """Hands the points of a batch to the task function, and its results back to the sweeper."""

    _EXECUTOR = "rollcall"

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """A return for each point once all of them are over. `initial_job_idx` starts at 0 again with each command."""
        del initial_job_idx
        assert self.config is not None
        assert self.task_function is not None
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        results = self.task_function([tuple(overrides) for overrides in job_overrides])
        return [_returned(overrides, result) for overrides, result in zip(job_overrides, results, strict=True)]


def register_launcher() -> None:
    """Make the launcher known to Hydra, in this process."""
    RollcallLauncher.__module__ = MODULE
    sys.modules.setdefault(MODULE, sys.modules[__name__])
    Plugins.instance().register(RollcallLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="rollcall", node=RollcallQueueConf, provider="rollcall")


def _returned(overrides: Sequence[str], result: float | list[float] | Exception) -> JobReturn:
    returned = JobReturn(overrides=list(overrides), task_name="rollcall")
    returned.status = JobStatus.FAILED if isinstance(result, Exception) else JobStatus.COMPLETED
    returned.return_value = result
    return returned
