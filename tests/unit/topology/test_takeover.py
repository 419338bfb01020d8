"""Which spare node gets a lost node's roles, and why an attempt cannot continue without a node."""

from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.errors import TakeoverError
from pipeline.topology.assignment import assign
from pipeline.topology.plan import NodeInfo, World, make_plan
from pipeline.topology.takeover import take_over
from tests.fakes.configs import make_config
from tests.fakes.ranks import ATTEMPT, RUN, make_node_infos

CAUSE = "killed by SIGKILL"


def world_of(spares: int = 1, nodes: list[NodeInfo] | None = None, streams: str = "files", **resources: Any) -> World:
    config = make_config(resources={"spare_nodes": spares, **resources}, streams={"backend": streams})
    plan = make_plan(config)
    infos = nodes or make_node_infos(plan.ranks)
    return assign(plan, infos, run_id=RUN, attempt=ATTEMPT, epoch=1, leader=0, secret="s")


def rank_of(world: World, name: str) -> int:
    return next(placement.rank for placement in world.placements if placement.name == name)


@pytest.mark.parametrize("name", ["inference.1", "actor.0", "trainer.0"])
def test_a_spare_gets_all_roles_of_a_lost_node_and_everything_else_stays(name: str) -> None:
    world = world_of(inference={"nodes": 2})
    (spare,), lost = world.spares, rank_of(world, name)
    following = take_over(world, lost, CAUSE, limit=1)
    moved = following.of_rank(spare.rank)
    assert [placement.name for placement in moved] == [placement.name for placement in world.of_rank(lost)]
    assert {placement.address for placement in moved} == {spare.addresses[0]}
    assert {port for placement in moved for port in placement.ports} <= set(spare.ports)
    assert set(world.placements) - set(world.of_rank(lost)) == set(following.placements) - set(moved)
    assert (following.revision, following.spares, following.has_lost(lost)) == (1, (), True)
    assert following.leader == (spare.rank if lost == world.leader else world.leader)
    assert following.secret == world.secret


def test_roles_that_shared_gpus_share_those_of_the_spare() -> None:
    resources = {"device": "cuda", "colocate": True, "trainer": {"gpus": 1, "processes": 2}, "inference": {"gpus": 1}}
    gpus = [replace(info, gpus=(4, 5)) for info in make_node_infos(3)]
    gpus[-1] = replace(gpus[-1], gpus=(2, 3))
    config = {"services": {"nodes": 1}, **resources}
    world = world_of(nodes=gpus, **config)
    following = take_over(world, rank_of(world, "trainer.0"), CAUSE, limit=1)
    (spare,) = world.spares
    assert {p.role: p.gpus for p in following.of_rank(spare.rank)} == {"trainer": (2, 3), "inference": (2,)}


def test_a_lost_spare_is_noted_and_not_replaced() -> None:
    world = world_of(spares=2)
    first, second = world.spares
    following = take_over(world, first.rank, CAUSE, limit=0)
    assert (following.placements, following.spares) == (world.placements, (second,))
    assert following.losses[0].spare is None


@pytest.mark.parametrize(
    ("name", "world", "reason"),
    [
        ("redis.0", world_of(streams="redis"), "the next attempt copies its data"),
        ("trainer.1", world_of(trainer={"nodes": 2}), "the trainer spans several nodes"),
        ("inference.0", world_of(spares=0), "no spare node with enough GPUs and ports is left"),
    ],
    ids=str,
)
def test_a_node_that_no_spare_can_replace_is_refused_with_its_roles_and_the_reason(
    name: str, world: World, reason: str
) -> None:
    with pytest.raises(TakeoverError, match=reason) as refused:
        take_over(world, rank_of(world, name), CAUSE, limit=3)
    assert name in str(refused.value)


def test_the_budget_counts_replaced_nodes_only() -> None:
    world = take_over(world_of(spares=3, inference={"nodes": 2}), 4, CAUSE, limit=1)
    assert world.losses[0].spare is None
    world = take_over(world, rank_of(world, "inference.0"), CAUSE, limit=1)
    with pytest.raises(TakeoverError, match=r"1 nodes were replaced, the limit of recovery\.nodes=1"):
        take_over(world, rank_of(world, "inference.1"), CAUSE, limit=1)
