"""Trainer and servers packed onto nodes by their GPUs, from one machine to four nodes of eight."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.config import RunConfig
from pipeline.errors import PlanError, RendezvousError
from pipeline.topology.assignment import assign, check_world
from pipeline.topology.plan import NodeInfo, Plan, World, make_plan
from slurm.submission.compose_config import compose_config, config_groups
from tests.fakes.configs import make_config
from tests.fakes.ranks import ATTEMPT, RUN, make_node_infos

Table = list[tuple[str, ...]]
SERVICES = ("redis.0", "preprocessor.0", "actor.0")


def config_of(
    gpus_per_node: int, processes: int, servers: int, gpus: int = 1, *, nodes: int = 1, services: int = 0, **more: Any
) -> RunConfig:
    """So many trainer processes on each of `nodes`, and so many servers in all, of so many GPUs each."""
    resources = {
        "device": "cuda",
        "gpus_per_node": gpus_per_node,
        "services": {"nodes": services},
        "trainer": {"nodes": nodes, "processes": processes, "gpus": 1},
        "inference": {"servers": servers, "gpus": gpus},
    }
    return make_config(resources=resources | more, cluster={"scheduler": "slurm"})


def cards_for(plan: Plan, gpus: int) -> list[NodeInfo]:
    """A node record for each rank, with the ports that the plan may need of it."""
    ports = tuple(range(5000, 5000 + plan.ports_per_rank))
    return [replace(node_info, ports=ports) for node_info in make_node_infos(plan.ranks, gpus=gpus)]


def assigned(plan: Plan, node_infos: list[NodeInfo]) -> World:
    world = assign(plan, node_infos, run_id=RUN, attempt=ATTEMPT, epoch=1, leader=0, secret="s")
    for node_info in node_infos:
        check_world(world, plan, node_info)
    return world


def shares(world: World, ranks: int) -> Table:
    """For each rank the roles that have GPUs there, with them, as `inference.1:4,5`."""
    return [
        tuple(f"{place.name}:{','.join(map(str, place.gpus))}" for place in world.of_rank(rank) if place.gpus)
        for rank in range(ranks)
    ]


PLANS: list[tuple[str, RunConfig, Table]] = [
    ("2: 1 + 1", config_of(2, 1, 1), [("trainer.0:0", "inference.0:1")]),
    ("4: 2 + 2", config_of(4, 2, 2), [("trainer.0:0,1", "inference.0:2", "inference.1:3")]),
    ("4: 1 + 3", config_of(4, 1, 3), [("trainer.0:0", "inference.0:1", "inference.1:2", "inference.2:3")]),
    ("4: 3 + 1", config_of(4, 3, 1), [("trainer.0:0,1,2", "inference.0:3")]),
    ("4: 2 + tensor parallel 2", config_of(4, 2, 1, 2), [("trainer.0:0,1", "inference.0:2,3")]),
    ("4: 1 + tensor parallel 2", config_of(4, 1, 1, 2), [("inference.0:0,1", "trainer.0:2")]),
    ("8: 6 + 2", config_of(8, 6, 2), [("trainer.0:0,1,2,3,4,5", "inference.0:6", "inference.1:7")]),
    ("8: 7 + 1", config_of(8, 7, 1), [("trainer.0:0,1,2,3,4,5,6", "inference.0:7")]),
    (
        "8: 4 + 4",
        config_of(8, 4, 4),
        [("trainer.0:0,1,2,3", "inference.0:4", "inference.1:5", "inference.2:6", "inference.3:7")],
    ),
    ("8: 4 + 2 of 2", config_of(8, 4, 2, 2), [("trainer.0:0,1,2,3", "inference.0:4,5", "inference.1:6,7")]),
    ("8: 4 + tensor parallel 4", config_of(8, 4, 1, 4), [("trainer.0:0,1,2,3", "inference.0:4,5,6,7")]),
    (
        "2 × 8: 8 + 4 of 2",
        config_of(8, 8, 4, 2),
        [
            ("trainer.0:0,1,2,3,4,5,6,7",),
            ("inference.0:0,1", "inference.1:2,3", "inference.2:4,5", "inference.3:6,7"),
        ],
    ),
    (
        "2 × 8: a trainer over both, servers beside it",
        config_of(8, 6, 4, nodes=2),
        [
            ("trainer.0:0,1,2,3,4,5", "inference.0:6", "inference.1:7"),
            ("trainer.1:0,1,2,3,4,5", "inference.2:6", "inference.3:7"),
        ],
    ),
    (
        "2 × 8: 4 + 4 on each, though the trainer would fit on one",
        config_of(8, 4, 2, 4, nodes=2),
        [("trainer.0:0,1,2,3", "inference.0:4,5,6,7"), ("trainer.1:0,1,2,3", "inference.1:4,5,6,7")],
    ),
    (
        "4 × 8: 24 + 2 of 4",
        config_of(8, 8, 2, 4, nodes=3),
        [
            ("trainer.0:0,1,2,3,4,5,6,7",),
            ("trainer.1:0,1,2,3,4,5,6,7",),
            ("trainer.2:0,1,2,3,4,5,6,7",),
            ("inference.0:0,1,2,3", "inference.1:4,5,6,7"),
        ],
    ),
    (
        "4 × 8: 6 + 2 on each",
        config_of(8, 6, 8, nodes=4),
        [
            (f"trainer.{node}:0,1,2,3,4,5", f"inference.{2 * node}:6", f"inference.{2 * node + 1}:7")
            for node in range(4)
        ],
    ),
]


@pytest.mark.parametrize(("config", "table"), [plan[1:] for plan in PLANS], ids=[plan[0] for plan in PLANS])
def test_roles_are_packed_onto_nodes_by_their_gpus(config: RunConfig, table: Table) -> None:
    plan = make_plan(config)
    assert plan.ranks == len(table)
    world = assigned(plan, cards_for(plan, gpus=config.resources.gpus_per_node))
    assert shares(world, plan.ranks) == table
    assert {place.name for place in world.placements if not place.gpus} == set(SERVICES)


@pytest.mark.parametrize("config", [plan[1] for plan in PLANS], ids=[plan[0] for plan in PLANS])
def test_services_of_their_own_node_take_no_gpu_node(config: RunConfig) -> None:
    resources = config.resources.model_copy(
        update={"services": config.resources.services.model_copy(update={"nodes": 1})}
    )
    alone, beside = make_plan(config.model_copy(update={"resources": resources})), make_plan(config)
    assert alone.ranks == beside.ranks + 1
    node_infos = cards_for(alone, gpus=resources.gpus_per_node)
    node_infos[0] = replace(node_infos[0], gpus=())
    world = assigned(alone, node_infos)
    assert {place.name for place in world.of_rank(0)} == set(SERVICES)


GROUPS = {
    "gpus": (2, 1, 1),
    "gpus_4": (4, 2, 2),
    "gpus_8": (8, 4, 4),
    "gpus_2x8": (16, 8, 8),
    "gpus_2x8_tp2": (16, 8, 4),
    "gpus_2x8_train12": (16, 12, 2),
    "gpus_4x8": (32, 16, 16),
    "gpus_8x8_tp8": (64, 48, 2),
    "gpus_16x8_tp8": (128, 96, 4),
}
"""Of each shipped group: all GPUs, those that train, and servers."""


@pytest.mark.parametrize("cluster", ["local", "slurm"])
@pytest.mark.parametrize("group", [name for name in config_groups()["resources"] if name.startswith("gpus")])
def test_a_shipped_group_composes_and_fills_its_gpus(group: str, cluster: str) -> None:
    config = compose_config(["experiment=demo", f"cluster={cluster}", f"resources={group}"])
    plan = make_plan(config)
    slots = [slot for seat in plan.bundles for slot in seat.roles]
    training = sum(slot.gpus for slot in slots if slot.role == "trainer")
    servers = [slot for slot in slots if slot.role == "inference"]
    assert (sum(slot.gpus for slot in slots), training, len(servers)) == GROUPS[group]
    assert {seat.gpus for seat in plan.bundles} == {config.resources.gpus_per_node}
    assigned(plan, cards_for(plan, gpus=config.resources.gpus_per_node))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            config_of(8, 9, 1),
            "resources.gpus_per_node=8: expected at least 9, the GPUs of trainer.0, which has one node; "
            "raise it, or lower resources.trainer.processes",
        ),
        (
            config_of(2, 1, 1, 4),
            "resources.gpus_per_node=2: expected at least 4, the GPUs of inference.0, which has one node; "
            "raise it, or lower resources.inference.gpus",
        ),
    ],
)
def test_what_no_node_holds_is_refused_by_key(config: RunConfig, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(config)
    assert str(caught.value) == said


def test_too_few_nodes_are_refused_with_what_they_are_for() -> None:
    config = config_of(8, 6, 4, nodes=2, services=1)
    resources = config.resources.model_copy(update={"nodes": 3, "spare_nodes": 1})
    with pytest.raises(PlanError) as caught:
        make_plan(config.model_copy(update={"resources": resources}))
    assert str(caught.value) == (
        "resources.nodes=3: expected at least 4 (nodes of 8 GPUs 2 + services 1 + spares 1): 1 missing; "
        "set resources.nodes=4, or 0 for a fit"
    )


def test_a_node_with_fewer_gpus_than_its_seat_is_named_with_both_numbers() -> None:
    plan = make_plan(config_of(8, 6, 2))
    with pytest.raises(RendezvousError, match=r"rank 0 \(node0\): 7 of 8 GPUs; fix these nodes"):
        assigned(plan, cards_for(plan, gpus=7))


@given(
    size=st.integers(1, 8),
    processes=st.integers(1, 8),
    nodes=st.integers(1, 4),
    servers=st.integers(1, 16),
    gpus=st.integers(1, 8),
)
def test_every_role_gets_its_gpus_once_and_no_node_has_more_than_it_holds(
    size: int, processes: int, nodes: int, servers: int, gpus: int
) -> None:
    config = config_of(size, processes, servers, gpus, nodes=nodes)
    if max(processes, gpus) > size:
        with pytest.raises(PlanError, match=r"resources\.gpus_per_node"):
            make_plan(config)
        return
    plan = make_plan(config)
    slots = [slot for seat in plan.bundles for slot in seat.roles]
    assert sorted(slot.name for slot in slots if slot.gpus) == sorted(
        [*(f"trainer.{index}" for index in range(nodes)), *(f"inference.{index}" for index in range(servers))]
    )
    assert all(seat.gpus <= size for seat in plan.bundles)
    assert all(sum(slot.role == "trainer" for slot in seat.roles) <= 1 for seat in plan.bundles)
    world = assigned(plan, cards_for(plan, gpus=size))
    for rank in range(plan.ranks):
        dealt = [gpu for place in world.of_rank(rank) for gpu in place.gpus]
        assert len(dealt) == len(set(dealt))
