"""Where the processes of roles tell that their work goes on, and what they declare."""

import errno
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from pipeline.roles.role_context import RoleContext
from pipeline.topology.plan import Placement, World
from pipeline.train.controller.operation_runner import OperationRunner
from pipeline.train.controller.rank_process import STOP, Deadlines, RankState
from pipeline.train.model.model_worker import ModelWorker
from pipeline.utils import heartbeat
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT, retry_transient
from slurm.agent.supervisor import role_command
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun


class Heart:
    """Stands in for this process's; what it declares, and how often it beat."""

    def __init__(self) -> None:
        self.allowed, self.beats = (0.0, b""), 0

    def beat(self) -> None:
        self.beats += 1


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heart]:
    made = Heart()
    monkeypatch.setattr(heartbeat, "_heart", made)
    yield made
    assert made.allowed == (0.0, b"")


@pytest.fixture
def site() -> RankState:
    group = cast(dist.ProcessGroup, None)
    return RankState(0, 1, "cpu", dist.HashStore(), group, group, Deadlines(operation=100.0, control=1000.0))


def test_an_operation_that_stands_still_is_told_before_its_peers_give_up(heart: Heart, site: RankState) -> None:
    def operation(site: RankState) -> tuple[float, bytes]:
        return heart.allowed

    assert site.run(operation, ()) == (90.0, b"operation 1")


def test_an_operation_that_fails_declares_nothing_any_more(heart: Heart, site: RankState) -> None:
    def operation(site: RankState) -> None:
        raise OSError("disk full")

    site.run(operation, ())
    assert heart.allowed == (0.0, b"")


def test_a_rank_may_wait_for_its_order_as_long_as_the_controller_may_be_silent(
    heart: Heart, site: RankState, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: list[Any] = []

    def scatter(mine: list[Any], orders: object, **group: Any) -> None:
        declared.append(heart.allowed)
        mine[0] = STOP

    monkeypatch.setattr(dist, "scatter_object_list", scatter)
    site.send([STOP])
    assert declared == [(1000.0, b"scattering orders")]


def test_a_controller_that_waits_tells_that_it_does(heart: Heart, site: RankState) -> None:
    OperationRunner(site, False, FakeClock()).keepalive()
    assert heart.beats == 1


def test_who_retries_on_a_disk_that_fails_is_never_silent_for_long(
    heart: Heart, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, beats = FakeClock(), [0.0]
    monkeypatch.setattr(heart, "beat", lambda: beats.append(clock.time))

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        retry_transient("it", fail, FS_OUTAGE_TIMEOUT, clock)
    assert clock.time == pytest.approx(FS_OUTAGE_TIMEOUT)
    assert max(after - before for before, after in pairwise([*beats, clock.time])) < 3.0


@pytest.mark.parametrize("ask", [ModelWorker._values, partial(ModelWorker._logprobs, temperature=1.0, entropy=False)])
def test_every_micro_batch_is_progress(heart: Heart, ask: Callable[..., object]) -> None:
    micro = SimpleNamespace(tokens_BT=0, positions_BT=0, segments=0, before_M=0, targets_M=0, complete=lambda it: it)
    for _ in range(3):
        ask(SimpleNamespace(model=lambda *given: (0, None)), micro)
    assert heart.beats == 3


def test_each_role_of_ours_tells_heartbeats_and_the_others_are_asked(tmp_path: Path) -> None:
    paths = FakeRun(tmp_path / "run").attempt("12-0").paths
    config = make_config(resources={"trainer": {"processes": 3}})
    names = ("redis", "trainer", "inference", "actor", "preprocessor")
    places = tuple(Placement(role=name, index=0, rank=0, address="127.0.0.2", ports=(1, 2)) for name in names)
    world = World(run_id="r", attempt="a", epoch=1, leader=0, secret="s", placements=places)
    beats = {place.role: role_command(RoleContext(paths, config, world, place)).has_heartbeat for place in places}
    assert beats == {"redis": 0, "inference": 0, "trainer": 3, "actor": 1, "preprocessor": 1}
