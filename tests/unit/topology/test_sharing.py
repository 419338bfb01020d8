"""Servers on the GPUs of the trainer, and several on one GPU."""

from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.config import RunConfig
from pipeline.config.cross_checks import check_config
from pipeline.errors import ConfigError, PlanError, RendezvousError
from pipeline.topology.assignment import check_world, describe_plan
from pipeline.topology.plan import make_plan
from slurm.submission.compose_config import compose_config
from tests.fakes.configs import make_config
from tests.unit.topology.test_packing import Table, assigned, cards_for, shares


def sharing(memory: float = 0.4, **resources: Any) -> RunConfig:
    """One process that trains and one server on one GPU, or as `resources` say otherwise."""
    wanted = {
        "device": "cuda",
        "colocate": True,
        "services": {"nodes": 0},
        "trainer": {"gpus": 1},
        "inference": {"gpus": 1},
    }
    return make_config(resources=wanted | resources, inference={"gpu_memory": memory})


SHARED: list[tuple[str, RunConfig, Table]] = [
    ("one GPU", sharing(), [("trainer.0:0", "inference.0:0")]),
    (
        "a server on each of two",
        sharing(trainer={"gpus": 1, "processes": 2}, inference={"gpus": 1, "servers": 2}),
        [("trainer.0:0,1", "inference.0:0", "inference.1:1")],
    ),
    (
        "tensor parallel on both",
        sharing(trainer={"gpus": 1, "processes": 2}, inference={"gpus": 2}),
        [("trainer.0:0,1", "inference.0:0,1")],
    ),
    (
        "two servers on the one",
        sharing(inference={"gpus": 1, "servers": 2, "servers_per_gpu": 2}),
        [("trainer.0:0", "inference.0:0", "inference.1:0")],
    ),
    (
        "two nodes",
        sharing(trainer={"gpus": 1, "nodes": 2}, inference={"gpus": 1, "nodes": 2}),
        [("trainer.0:0", "inference.0:0"), ("trainer.1:0", "inference.1:0")],
    ),
    (
        "two servers on a GPU of their own",
        sharing(colocate=False, gpus_per_node=2, inference={"gpus": 1, "servers": 2, "servers_per_gpu": 2}),
        [("trainer.0:0", "inference.0:1", "inference.1:1")],
    ),
    (
        "three on two",
        sharing(colocate=False, gpus_per_node=3, inference={"gpus": 1, "servers": 3, "servers_per_gpu": 2}),
        [("trainer.0:0", "inference.0:1", "inference.1:1", "inference.2:2")],
    ),
]


@pytest.mark.parametrize(("config", "table"), [case[1:] for case in SHARED], ids=[case[0] for case in SHARED])
def test_servers_share_gpus_where_they_are_told_to(config: RunConfig, table: Table) -> None:
    plan = make_plan(config)
    gpus = max(seat.gpus for seat in plan.bundles)
    assert shares(assigned(plan, cards_for(plan, gpus)), plan.ranks) == table


def test_the_group_for_one_gpu_composes_and_plans() -> None:
    config = compose_config(["experiment=demo", "resources=one_gpu", "name=x"])
    check_config(config)
    plan = make_plan(config)
    assert shares(assigned(plan, cards_for(plan, 1)), plan.ranks) == [("trainer.0:0", "inference.0:0")]


def test_the_group_for_the_multi_process_service_has_three_servers_on_the_trainers_gpu() -> None:
    config = compose_config(["experiment=demo", "resources=one_gpu_mps", "name=x"])
    check_config(config)
    assert config.resources.needs_mps
    servers = ("inference.0:0", "inference.1:0", "inference.2:0")
    plan = make_plan(config)
    assert shares(assigned(plan, cards_for(plan, 1)), plan.ranks) == [("trainer.0:0", *servers)]


def test_a_plan_says_whose_gpus_are_shared() -> None:
    assert "trainer.0 (1 GPU), inference.0 (1 shared GPU)" in describe_plan(make_plan(sharing()))[0]


def test_a_rank_refuses_a_world_whose_roles_share_more_than_planned() -> None:
    plan = make_plan(sharing(colocate=False, gpus_per_node=2))
    node_infos = cards_for(plan, gpus=2)
    world = assigned(plan, node_infos)
    placements = tuple(replace(place, gpus=(0,)) if place.gpus else place for place in world.placements)
    with pytest.raises(RendezvousError, match="got GPUs"):
        check_world(replace(world, placements=placements), plan, node_infos[0])


@pytest.mark.parametrize(
    ("resources", "key"),
    [
        ({"inference": {"gpus": 1, "servers": 2}}, "resources.inference.servers"),
        ({"trainer": {"gpus": 1, "nodes": 2}}, "resources.inference.nodes"),
        ({"trainer": {"gpus": 1, "processes": 2}, "gpus_per_node": 1}, "resources.gpus_per_node"),
    ],
    ids=["more servers than GPUs", "servers on fewer nodes", "more processes than a node has GPUs"],
)
def test_a_plan_that_cannot_share_names_the_key(resources: dict[str, Any], key: str) -> None:
    with pytest.raises(PlanError) as told:
        make_plan(sharing(**resources))
    assert told.value.key == key


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (sharing(memory=0.85), "inference.gpu_memory"),
        (sharing(device="cpu"), "resources.colocate"),
        (sharing(inference={"gpus": 2, "servers_per_gpu": 2}), "resources.inference.servers_per_gpu"),
    ],
    ids=["memory for nobody else", "no GPUs at all", "parts of several GPUs"],
)
def test_what_cannot_be_shared_is_refused_by_key(config: RunConfig, key: str) -> None:
    with pytest.raises(ConfigError) as told:
        check_config(config)
    assert told.value.key == key
