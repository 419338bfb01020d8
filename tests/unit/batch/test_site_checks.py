"""What a submission asks of the site before anything is queued."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config
from pipeline.errors import ConfigError, PlanError
from pipeline.topology.plan import make_plan
from slurm.batch.site_checks import check_site, seconds_of, warnings
from slurm.scheduler.scheduler_protocol import Nodes, Partition
from slurm.scheduler.slurm.slurm_commands import NO_SUCH_NODES
from slurm.submission.compose_config import compose_config
from tests.fakes.configs import make_config
from tests.fakes.scheduler import FakeScheduler, make_partition

CPU = make_partition("cpu", default=True, time_limit="1-00:00:00", nodes=(Nodes(8),))
GPU = make_partition("gpu", time_limit="12:00:00", nodes=(Nodes(2, {"a100": 4}), Nodes(1, {"h100": 8})))
PLAIN = make_partition("plain", nodes=(Nodes(4, {"": 2}),))
CLOSED = make_partition("closed", up=False)


def check(
    *sites: Partition, scheduler: FakeScheduler | None = None, resources: dict[str, Any] | None = None, **cluster: Any
) -> None:
    """Check the smallest config: services, one trainer and one server, on a node each."""
    config = make_config(cluster={"scheduler": "slurm"} | cluster, resources=resources or {})
    check_site(
        config, make_plan(config), scheduler or FakeScheduler(*(sites or (CPU, GPU, PLAIN, CLOSED))), "#!/bin/sh"
    )


def with_gpus(inference: int, servers: int = 1, **more: Any) -> dict[str, Any]:
    return {"inference": {"gpus": inference, "servers": servers}} | more


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("0", None),
        ("0:00", None),
        ("90", 5400),
        ("90:30", 5430),
        ("1:02:03", 3723),
        ("36:00:00", 129600),
        ("1-0", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("365-00:00:00", 31536000),
        ("infinite", None),
        ("UNLIMITED", None),
        ("n/a", None),
        ("", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int | None) -> None:
    assert seconds_of(time) == seconds


def test_a_run_with_trainers_only_is_told_of_no_other_role() -> None:
    training = {"steps": 0, "prompts_per_step": 1, "sft": {"steps": 1}}
    resources = {"trainer": {"nodes": 9}, "inference": {"nodes": 2}, "spare_nodes": 1}
    config = make_config(cluster={"scheduler": "slurm"}, training=training, resources=resources)
    with pytest.raises(
        PlanError, match=r"lower one of resources.trainer.nodes \(9\), resources.spare_nodes \(1\), or set"
    ):
        check_site(config, make_plan(config), FakeScheduler(CPU), "#!/bin/sh")


@pytest.mark.parametrize("time", ["2h", "1:2:3:4", "-5", "1-", "soon", "90m", 60, 43200])
def test_a_time_in_a_wrong_form_is_refused_with_the_right_forms(time: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(cluster={"scheduler": "slurm", "time": time})
    assert str(caught.value).startswith(
        f"cluster.time={time!r}: expected a time such as 90:00 (M:S), 12:00:00 (H:M:S), 1-12"
    )
    assert "pattern" not in str(caught.value)


def test_every_form_of_a_time_that_is_told_is_taken() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(cluster={"scheduler": "slurm", "time": "2h"})
    told = re.findall(r"[\d:-]*\d[:-][\d:-]*\d", caught.value.expected)
    assert len(told) == 5
    for time in told:
        assert make_config(cluster={"scheduler": "slurm", "time": time}).cluster.time == time
        assert seconds_of(time)


def test_numbers_are_taken_where_text_is_meant() -> None:
    config = compose_config(["experiment=demo", "cluster=slurm", "cluster.account=4711", "cluster.memory=0"])
    assert (config.cluster.account, config.cluster.memory) == ("4711", "0")
    assert load_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("cluster.memory=64GB", "a number with K, M, G or T"),
        ("name=a/b", "at most 63 letters, digits"),
        ("cluster.network=10.1.0.0/33", "an interface such as ib0, or a subnet such as 10.1.0.0/16"),
        ("cluster.network=10.1.0.300/16", "an interface such as ib0, or a subnet such as 10.1.0.0/16"),
    ],
)
def test_no_message_shows_a_pattern(wrong: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        compose_config(["experiment=demo", "cluster=slurm", wrong])
    assert "^" not in str(caught.value)


def test_a_job_that_fits_is_tried_out_with_its_whole_file() -> None:
    scheduler = FakeScheduler(CPU)
    check(scheduler=scheduler, time="12:00:00")
    assert scheduler.tried == ["#!/bin/sh"]
    assert scheduler.jobs == {}


@pytest.mark.parametrize(
    ("cluster", "resources", "said"),
    [
        ({"partition": "gqu"}, {}, r"partition='gqu': .*this cluster \(closed, cpu, gpu, plain\); did you mean gpu\?"),
        ({"partition": "nope"}, {}, r"partition='nope': .*this cluster; choose from: closed, cpu, gpu, plain"),
        ({"partition": "cpu,nope"}, {}, r"partition='nope'"),
        ({"partition": "closed"}, {}, r"partition='closed': .*is up; choose from: cpu, gpu, plain"),
        ({"services": {"partition": "cqu"}}, {"hetjob": True}, r"cluster.services.partition='cqu'.*mean cpu\?"),
        (
            {"partition": "gpu", "time": "12:00:01"},
            {},
            r"time='12:00:01': .*at most 12:00:00, the limit of partition gpu",
        ),
        ({"time": "1-0:0:1"}, {}, r"time='1-0:0:1': .*at most 1-00:00:00, the limit of partition cpu"),
        ({"time": "0"}, {}, r"time='0': .*at most 1-00:00:00, the limit of partition cpu"),
        ({"time": "2", "notice_seconds": 120}, {}, r"notice_seconds=120: .*less than the time limit .* is 120 s"),
    ],
)
def test_what_the_site_does_not_have_is_refused_with_what_it_has(
    cluster: dict[str, Any], resources: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(resources=resources, **cluster)


@pytest.mark.parametrize(
    ("cluster", "resources", "said"),
    [
        ({}, with_gpus(1), r"cluster.partition='cpu': .*inference.0 needs 1; those that do: gpu, plain"),
        ({"partition": "plain"}, with_gpus(2, 2), r"inference.gpus=2: .*at most 2 GPUs .* plain has, not 4; .*servers"),
        ({"partition": "plain", "gpu_type": "h100"}, with_gpus(1), r"gpu_type='h100': expected nothing.*leave it out"),
        (
            {"partition": "gpu", "gpu_type": "h10"},
            with_gpus(1),
            r"gpu_type='h10': .*\(a100, h100\); did you mean h100\?",
        ),
        ({"partition": "gpu", "gpu_type": "a100"}, with_gpus(8), r"inference.gpus=8: .*at most 4 a100 GPUs"),
        (
            {"partition": "plain"},
            {"trainer": {"gpus": 1, "processes": 4}},
            r"trainer.processes=4: .*at most 2 GPUs .*raise resources.trainer.nodes",
        ),
        (
            {"partition": "plain"},
            with_gpus(1, device="cuda", colocate=True, gpus_per_node=4, trainer={"gpus": 1, "processes": 4}),
            r"trainer.processes=4: .*at most 2 GPUs .*raise resources.trainer.nodes and resources.inference.nodes",
        ),
        (
            {"partition": "gpu"},
            with_gpus(8),
            r"resources='3 nodes': .*at most 1, the nodes with 8 GPUs of partition gpu",
        ),
        ({"partition": "gpu", "gpu_type": "a100"}, with_gpus(1), r"at most 2, the nodes with 1 a100 of partition gpu"),
        (
            {},
            {"inference": {"nodes": 9}, "spare_nodes": 1},
            r"'12 nodes': .*at most 8, .*trainer.nodes \(1\), .*nodes \(9\), .*nodes \(1\), .*spare_nodes \(1\), or",
        ),
        ({}, {"nodes": 9}, r"resources.nodes=9: .*at most 8"),
    ],
)
def test_a_plan_that_the_partition_cannot_hold_is_refused(
    cluster: dict[str, Any], resources: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(resources=resources, **cluster)


def test_a_heterogeneous_job_is_checked_component_by_component() -> None:
    nodes = {"trainer": {"gpus": 1, "nodes": 2}, "inference": {"gpus": 4}}
    with pytest.raises(PlanError, match="at most 3"):
        check(partition="gpu", resources=nodes | {"hetjob": False})
    check(partition="gpu", services={"partition": "cpu"}, resources=nodes | {"hetjob": True})
    with pytest.raises(ConfigError, match="those that do: gpu, plain"):
        check(services={"partition": "gpu"}, resources=nodes | {"hetjob": True})


def test_of_several_partitions_one_that_fits_is_enough() -> None:
    check(partition="cpu,gpu", resources=with_gpus(4))
    check(partition="closed,cpu")
    with pytest.raises(PlanError, match="partition plain"):
        check(partition="plain,gpu", resources=with_gpus(16))


def test_a_site_without_a_default_partition_wants_one_named() -> None:
    with pytest.raises(ConfigError, match="no default; choose from: gpu"):
        check(GPU)


def test_a_quality_of_service_may_allow_more_time_than_the_partition() -> None:
    check(partition="gpu", time="2-0", qos="long")


def test_no_time_limit_may_be_asked_for_where_the_partition_has_none() -> None:
    check(partition="plain", time="0")


def test_an_account_is_checked_where_there_is_accounting() -> None:
    scheduler = FakeScheduler()
    check(scheduler=scheduler, account="anything")
    scheduler.known_accounts = ["bio", "physics"]
    check(scheduler=scheduler, account="Physics")
    with pytest.raises(ConfigError, match=r"cluster.account='physic': .*\(bio, physics\); did you mean physics\?"):
        check(scheduler=scheduler, account="physic")


def test_accounts_are_not_asked_for_without_one() -> None:
    scheduler = FakeScheduler()
    scheduler.fail("accounts")
    check(scheduler=scheduler)


def test_what_slurm_itself_refuses_is_one_line() -> None:
    scheduler = FakeScheduler()
    scheduler.refusal = "Invalid feature specification"
    with pytest.raises(ConfigError, match="its refusal: Invalid feature specification; see the batch file"):
        check(scheduler=scheduler)


@pytest.mark.parametrize("down", [0, 1])
def test_nodes_that_are_down_make_a_job_wait_and_do_not_refuse_it(down: int) -> None:
    scheduler = FakeScheduler(make_partition(default=True, nodes=(Nodes(4, down=down),)))
    scheduler.refusal = NO_SUCH_NODES
    if down:
        check(scheduler=scheduler)
    else:
        with pytest.raises(ConfigError, match="node configuration is not available"):
            check(scheduler=scheduler)


@pytest.mark.parametrize("operation", ["partitions", "test_only", "accounts"])
def test_a_scheduler_that_does_not_answer_is_named(operation: str) -> None:
    scheduler = FakeScheduler()
    scheduler.fail(operation)
    with pytest.raises(ConfigError, match=r"cluster.scheduler='slurm': expected a scheduler that answers; .*timed out"):
        check(scheduler=scheduler, account="physics")


def test_nothing_of_the_tried_file_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    check()
    assert list(tmp_path.iterdir()) == []


def test_a_site_that_kills_before_a_run_can_commit_is_a_warning() -> None:
    scheduler = FakeScheduler()
    config = make_config(cluster={"scheduler": "slurm", "grace_seconds": 25, "stop_seconds": 6})
    scheduler.seconds_to_kill = 37
    assert warnings(config, scheduler) == []
    scheduler.seconds_to_kill = 30
    (line,) = warnings(config, scheduler)
    assert "kills a job 30 s after" in line
    assert "may need 37 s" in line
    assert "set cluster.grace_seconds=18" in line
    mended = make_config(cluster={"scheduler": "slurm", "grace_seconds": 18, "stop_seconds": 6})
    assert warnings(mended, scheduler) == []
    scheduler.seconds_to_kill = 10
    assert "lower cluster.stop_seconds" in warnings(config, scheduler)[0]
    scheduler.fail("kill_wait")
    assert "is not known: kill_wait: Socket timed out" in warnings(config, scheduler)[0]
