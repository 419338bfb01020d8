"""What a config asks for, and who gets it."""

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.errors import PlanError, RendezvousError
from pipeline.topology.assignment import assign, check_world, describe_plan
from pipeline.topology.plan import NodeBundle, NodeInfo, Plan, RoleProcess, World, make_plan
from tests.fakes.configs import make_config
from tests.fakes.ranks import ATTEMPT, RUN, make_node_infos


def plan_of(streams: str = "redis", **resources) -> Plan:
    return make_plan(make_config(resources=resources, streams={"backend": streams}))


def assigned(plan: Plan, node_infos: list[NodeInfo]) -> World:
    return assign(plan, node_infos, run_id=RUN, attempt=ATTEMPT, epoch=1, leader=0, secret="s")


def roles(plan: Plan) -> list[str]:
    return [seat.name for seat in plan.bundles]


def test_every_kind_of_role_has_nodes_of_its_own_by_default():
    plan = plan_of(inference={"nodes": 2})
    assert roles(plan) == ["redis.0 + preprocessor.0 + actor.0", "trainer.0", "inference.0", "inference.1"]
    assert (plan.ranks, plan.spare_nodes, plan.ports_per_rank) == (4, 0, 2)


def test_without_steps_of_rl_the_trainer_is_the_only_role():
    training = {"steps": 0, "prompts_per_step": 1, "sft": {"steps": 5}}
    resources = {"trainer": {"nodes": 2}, "inference": {"nodes": 2}, "spare_nodes": 1}
    plan = make_plan(make_config(training=training, resources=resources))
    assert roles(plan) == ["trainer.0", "trainer.1"]
    assert (plan.ranks, plan.spare_nodes, plan.ports_per_rank) == (3, 1, 1)
    with pytest.raises(PlanError, match=r"at least 3 \(trainer 2 \+ spares 1\): 1 missing"):
        make_plan(make_config(training=training, resources={**resources, "nodes": 2}))


def test_file_streams_need_no_redis():
    assert roles(plan_of(streams="files"))[0] == "preprocessor.0 + actor.0"


def test_only_the_first_trainer_holds_the_ports_of_torchrun_and_of_the_weight_store():
    seats = plan_of(trainer={"nodes": 3, "processes": 8, "gpus": 1}).bundles
    assert [(seat.ports, seat.gpus) for seat in seats if seat.roles[0].role == "trainer"] == [(2, 8), (0, 8), (0, 8)]


def test_servers_of_one_node_are_numbered_over_all_nodes():
    assert roles(plan_of(inference={"nodes": 2, "servers": 2}))[2:] == [
        "inference.0 + inference.1",
        "inference.2 + inference.3",
    ]


@pytest.mark.parametrize(
    ("trainer_threads", "expected"),
    [(1, "redis.0 + trainer.0 + preprocessor.0 + actor.0"), (3, "redis.0 + inference.0 + preprocessor.0 + actor.0")],
)
def test_services_without_a_node_go_where_fewer_threads_work(trainer_threads, expected):
    resources = {"trainer": {"threads": trainer_threads}, "inference": {"threads": 2}, "services": {"nodes": 0}}
    plan = plan_of(**resources)
    assert plan.ranks == 2
    assert expected in roles(plan)


def test_spares_and_explicit_nodes_add_ranks_without_seats():
    assert plan_of(spare_nodes=2).spare_nodes == 2
    assert plan_of(spare_nodes=1, nodes=6).spare_nodes == 3


def test_a_partition_needs_a_node_with_roles():
    faults = {"faults": ["partition:node[2]=5s@9s"]}
    assert len(make_plan(make_config(**faults)).bundles) == 3
    with pytest.raises(PlanError, match=r"one of the 3 nodes with roles, node\[0\] to node\[2\]"):
        make_plan(make_config(faults=["partition:node[3]=5s@9s"]))


def test_too_few_nodes_are_refused_with_what_is_missing():
    with pytest.raises(PlanError) as caught:
        plan_of(nodes=2, spare_nodes=1)
    assert str(caught.value) == (
        "resources.nodes=2: expected at least 4 (trainer 1 + inference 1 + services 1 + spares 1): 2 missing; "
        "set resources.nodes=4, or 0 for a fit"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"serve": {"enabled": True, "sampling": True}}, r"3 \(trainer 1 \+ inference 2\)"),
        ({"serve": {"enabled": True}}, r"2 \(trainer 1 \+ spares 1\)"),
        ({}, r"3 \(trainer with inference 2 \+ services 1\)"),
    ],
    ids=["a service with servers", "a service without", "servers on the trainer's GPUs"],
)
def test_too_few_nodes_are_counted_as_the_plan_has_them(sections: dict[str, Any], parts: str) -> None:
    resources: dict[str, Any] = {"nodes": 1, "inference": {"nodes": 2}, "spare_nodes": int("spares" in parts)}
    if not sections:
        gpu = {"gpus": 1, "nodes": 2}
        resources |= {"colocate": True, "device": "cuda", "trainer": gpu, "inference": gpu}
    with pytest.raises(PlanError, match=f"at least {parts}"):
        make_plan(make_config(resources=resources, **sections))


def test_a_plan_is_described_rank_by_rank():
    assert describe_plan(plan_of(trainer={"processes": 2, "gpus": 1}, inference={"gpus": 1}, spare_nodes=1)) == (
        "rank 0: trainer.0 (2 GPUs)",
        "rank 1: inference.0 (1 GPU)",
        "rank 2: redis.0, preprocessor.0, actor.0",
        "rank 3: spare",
    )


def test_gpus_and_ports_of_a_node_are_dealt_out_disjointly():
    plan = plan_of(inference={"servers": 4, "gpus": 2}, trainer={"gpus": 1})
    world = assigned(plan, make_node_infos(plan.ranks, gpus=8))
    servers = world.of_role("inference")
    assert [server.gpus for server in servers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [server.ports for server in servers] == [(5000,), (5001,), (5002,), (5003,)]
    assert len({server.rank for server in servers}) == 1


def test_gpu_roles_find_the_gpu_nodes_wherever_they_are():
    plan = plan_of(trainer={"gpus": 1}, inference={"gpus": 1})
    node_infos = make_node_infos(3, gpus=1)
    node_infos[0] = replace(node_infos[0], gpus=())
    world = assigned(plan, node_infos)
    assert [place.role for place in world.of_rank(0)] == ["redis", "preprocessor", "actor"]
    assert [world.of_rank(rank)[0].role for rank in (1, 2)] == ["trainer", "inference"]


def test_redis_is_started_first_of_its_rank():
    plan = plan_of(services={"nodes": 0})
    world = assigned(plan, make_node_infos(2))
    assert world.of_rank(world.of_role("redis")[0].rank)[0].role == "redis"


@given(st.permutations(make_node_infos(7)))
def test_the_order_of_the_node_records_does_not_matter(node_infos):
    plan = plan_of(trainer={"nodes": 2}, inference={"nodes": 3}, spare_nodes=1)
    assert assigned(plan, node_infos) == assigned(plan, make_node_infos(7))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_whenever_some_assignment_exists_one_is_found(needs, haves):
    ranks = max(len(needs), len(haves))
    plan = Plan(
        ranks=ranks,
        bundles=tuple(NodeBundle(roles=(RoleProcess(role="trainer", index=i, gpus=g),)) for i, g in enumerate(needs)),
    )
    node_infos = [
        replace(node_info, gpus=tuple(range(gpus)))
        for node_info, gpus in zip(make_node_infos(len(haves)), haves, strict=True)
    ]
    exists = any(
        all(have >= need for need, have in zip(needs, chosen, strict=True))
        for chosen in itertools.permutations(haves, len(needs))
    )
    if not exists:
        with pytest.raises(RendezvousError, match="no rank is left"):
            assigned(plan, node_infos)
        return
    world = assigned(plan, node_infos)
    assert len({place.rank for place in world.placements}) == len(needs)
    for node_info in node_infos:
        check_world(world, plan, node_info)


def test_a_shortage_names_each_rank_and_its_problem():
    plan = plan_of(trainer={"gpus": 1}, inference={"gpus": 1}, spare_nodes=1)
    node_infos = make_node_infos(4, gpus=1)[:3]
    node_infos[1] = replace(node_infos[1], problems=("disk is full", "no memory"))
    node_infos[2] = replace(node_infos[2], gpus=())
    with pytest.raises(RendezvousError) as caught:
        assigned(plan, node_infos)
    assert str(caught.value) == (
        "no rank is left for inference.0: rank 1 (node1): disk is full, no memory; rank 3: no node record; "
        "fix these nodes, exclude them, or set resources.spare_nodes=2"
    )


def test_a_long_shortage_is_cut_short():
    plan = plan_of(inference={"nodes": 20})
    node_infos = [replace(node_info, problems=("bad",)) for node_info in make_node_infos(plan.ranks)]
    with pytest.raises(RendezvousError, match=r"and 14 more; fix these nodes.*spare_nodes=22"):
        assigned(plan, node_infos)


@pytest.mark.parametrize(
    ("node_infos", "words"),
    [
        ([*make_node_infos(3), make_node_infos(1)[0]], "rank 0 has two node records"),
        (make_node_infos(4), "rank 3 is outside the plan's 3 ranks"),
        (make_node_infos(3, attempt="11-0"), "is of attempt 11-0, not 12-1"),
    ],
)
def test_node_records_that_contradict_each_other_are_refused(node_infos, words):
    with pytest.raises(RendezvousError, match=words):
        assigned(plan_of(), node_infos)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": "10.9.9.9"}, "not its address"),
        ({"ports": (1, 2)}, "got ports"),
        ({"ports": (5000, 5000)}, "got ports"),
        ({"ports": (5000,)}, "no bundle of the plan"),
        ({"index": 5}, "no bundle of the plan"),
        ({"gpus": (3,)}, "got GPUs"),
    ],
)
def test_a_rank_refuses_a_world_that_does_not_fit_it(change, words):
    plan, node_infos = plan_of(trainer={"gpus": 1}, inference={"gpus": 1}), make_node_infos(3, gpus=1)
    world = assigned(plan, node_infos)
    check_world(world, plan, node_infos[0])
    placements = tuple(replace(p, **change) if p.role == "trainer" else p for p in world.placements)
    with pytest.raises(RendezvousError, match=words):
        check_world(replace(world, placements=placements), plan, node_infos[0])


def test_a_rank_refuses_the_world_of_another_attempt():
    plan, node_infos = plan_of(), make_node_infos(3)
    with pytest.raises(RendezvousError, match="is of attempt 12-1, the world of attempt 12-0"):
        check_world(replace(assigned(plan, node_infos), attempt="12-0"), plan, node_infos[0])
