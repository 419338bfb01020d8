"""The schedulers of a checkout are the folders of `slurm/scheduler`, to a config and to the registry."""

from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.errors import ConfigError
from pipeline.run.run_documents import LOCAL
from slurm.registry import run_registry
from slurm.scheduler.scheduler_protocol import BatchScheduler
from slurm.scheduler.scheduler_registry import batch_scheduler, find_scheduler, scheduler_names
from tests.fakes.configs import make_config
from tests.support.spool import SCHEDULER


def test_a_name_without_a_folder_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"cluster.scheduler='pbs': expected 'local' or 'slurm'"):
        make_config(cluster={"scheduler": "pbs"})


def test_the_folders_are_the_names_that_a_config_may_have_and_all_but_one_have_a_queue() -> None:
    assert scheduler_names() == ("local", "slurm")
    assert get_args(ClusterConfig.model_fields["scheduler"].annotation) == scheduler_names()
    assert [name for name in scheduler_names() if not isinstance(find_scheduler(name), BatchScheduler)] == [LOCAL]
    with pytest.raises(ConfigError, match="expected a scheduler with a queue; set cluster=slurm"):
        batch_scheduler(LOCAL)


def test_a_job_of_a_scheduler_that_this_checkout_lacks_is_an_error_of_one_line(tmp_path: Path) -> None:
    with run_registry.claimed_run(make_config(output=tmp_path)) as run:
        run_registry.record_job(run, "pbs", "7")
    expected = "cluster.scheduler='pbs': expected a scheduler of this checkout: local, slurm; add slurm/scheduler/pbs"
    with pytest.raises(ConfigError, match=expected):
        run_registry.examine(make_config(output=tmp_path))


def test_every_scheduler_has_the_methods_of_its_protocol() -> None:
    assert isinstance(SCHEDULER, BatchScheduler)
    assert [find_scheduler(name).title for name in scheduler_names()] == ["this machine", "Slurm"]
