"""Random clusters meet in memory: whatever fails, one leader an epoch and one world, or one clear error in time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.errors import DeadlineError, RendezvousError
from pipeline.topology.assignment import assign, check_world
from pipeline.topology.plan import NodeBundle, NodeInfo, Plan, RoleProcess, World, make_plan
from slurm.rendezvous.membership import Membership, name_ranks
from slurm.rendezvous.rank_meeting import LeaderClaim, Lease, rendezvous
from tests.fakes.clock import FakeClock
from tests.fakes.configs import make_config
from tests.fakes.disk import Disk, Faults, Version, View
from tests.fakes.ranks import ATTEMPT, RUN, Rank, Simulation, make_node_infos


def plan_of(trainer: int = 1, inference: int = 1, spare_nodes: int = 0, gpus: int = 0, services: int = 1) -> Plan:
    """A plan with so many nodes of each kind; `gpus` for every trainer and server."""
    resources = {
        "trainer": {"nodes": trainer, "gpus": min(gpus, 1)},
        "inference": {"nodes": inference, "gpus": gpus},
        "services": {"nodes": services},
        "spare_nodes": spare_nodes,
    }
    return make_plan(make_config(resources=resources))


@dataclass
class Cluster:
    """What hypothesis draws: a plan, the ranks that come, and what goes wrong."""

    plan: Plan
    node_infos: list[NodeInfo]
    starts: list[float]
    faults: Faults
    silent: frozenset[int]
    planted: dict[str, Any]

    def run(self, view: type[View] = View) -> Simulation:
        simulation = Simulation(
            self.plan, self.node_infos, self.faults, starts=self.starts, silent=self.silent, view=view, lease=2.0
        )
        for name, document in self.planted.items():
            simulation.disk.plant(name, document)
        return simulation.run()


JUNK = {
    "claim-1.json": LeaderClaim(epoch=1, rank=0, hostname="ghost", pid=1),
    "lease-1.json": Lease(epoch=1, beat=40),
    "claim-x.json": LeaderClaim(epoch=9, rank=0, hostname="ghost", pid=1),
    ".world.json.7.ab": Lease(epoch=0, beat=0),
    "nodes/notes.json": Lease(epoch=0, beat=0),
    "nodes/99999.json": make_node_infos(1)[0],
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any seats, not only those that a config can ask for: from one rank that runs everything to some dozens."""
    kinds = draw(st.lists(st.tuples(st.sampled_from([0, 1, 4]), st.integers(0, 3)), min_size=1, max_size=4))
    repeats = draw(st.sampled_from([1, 1, 2, 10]))
    seats = [
        NodeBundle(roles=(RoleProcess(role="inference", index=index, gpus=gpus, ports=ports),))
        for index, (gpus, ports) in enumerate(kinds * repeats)
    ]
    return Plan(ranks=len(seats) + draw(st.integers(0, 3)), bundles=tuple(seats))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    plan, gpus = draw(plans()), draw(st.sampled_from([0, 4, 8]))
    node_infos = make_node_infos(plan.ranks, gpus=gpus)
    some_ranks = st.one_of(st.just(set()), st.just(set()), st.sets(st.integers(0, plan.ranks - 1), max_size=2))
    for rank in draw(some_ranks):
        node_infos[rank] = replace(node_infos[rank], problems=("disk is full",))
    for rank in draw(some_ranks):
        node_infos[rank] = replace(node_infos[rank], gpus=())
    absent = draw(some_ranks)
    node_infos = [node_info for node_info in node_infos if node_info.rank not in absent]
    node_infos += [replace(node_infos[0], pid=9)] if node_infos and draw(st.booleans()) else []
    faults = Faults(
        late=draw(st.sampled_from([0.0, 0.5, 3.0])),
        torn=draw(st.integers(0, 3)),
        deaths=draw(st.dictionaries(st.integers(0, min(3, plan.ranks - 1)), st.integers(0, 40), max_size=3)),
        stalls=draw(
            st.dictionaries(
                st.integers(0, min(3, plan.ranks - 1)), st.tuples(st.integers(0, 40), st.floats(1, 10)), max_size=2
            )
        ),
        seed=draw(st.integers(0, 10_000)),
    )
    return Cluster(
        plan=plan,
        node_infos=node_infos,
        starts=draw(st.lists(st.floats(0, 8), min_size=len(node_infos), max_size=len(node_infos))),
        faults=faults,
        silent=frozenset(draw(some_ranks)),
        planted={name: JUNK[name] for name in draw(st.sets(st.sampled_from(sorted(JUNK))))},
    )


def violations(simulation: Simulation) -> list[str]:
    """The promises that a finished simulation broke; empty if it kept all."""
    broken = []
    created = [name for name, _ in simulation.disk.created]
    broken += [f"{name} was created twice" for name in set(created) if created.count(name) > 1]
    if len(simulation.disk.versions("world.json")) > 1:
        broken.append("the verdict was replaced")
    worlds = [rank.world for rank in simulation.ranks if rank.world]
    if any(world != worlds[0] for world in worlds):
        broken.append("two worlds")
    for rank in simulation.ranks:
        broken += _late_or_unclear(rank, simulation.seconds)
    return broken + (_misplaced(simulation, worlds[0]) if worlds else [])


def _late_or_unclear(rank: Rank, seconds: float) -> list[str]:
    broken = []
    if not rank.dead and rank.ended > rank.start + seconds + 12:  # a stall may begin just before the end
        broken.append(f"rank {rank.node_info.rank} ended after {rank.ended - rank.start:.0f} s")
    if rank.error is not None and len(str(rank.error)) < 20:
        broken.append(f"unclear: {rank.error}")
    return broken


def _misplaced(simulation: Simulation, world: World) -> list[str]:
    """What is wrong with a world, given the node records of all who could have come."""
    broken = []
    asked = sorted(slot.name for seat in simulation.plan.bundles for slot in seat.roles)
    if asked != sorted(place.name for place in world.placements):
        broken.append("not the roles of the plan")
    node_infos = {node_info.rank: node_info for node_info in reversed(simulation.node_infos)}
    for rank in {place.rank for place in world.placements}:
        node_info = node_infos.get(rank)
        if node_info is None or node_info.problems or rank in simulation.silent:
            broken.append(f"rank {rank} is unusable and got a role")
            continue
        check_world(world, simulation.plan, node_info)
    return broken


def is_possible(cluster: Cluster, simulation: Simulation) -> bool:
    """True if the ranks that lived, came and answer could fill the plan."""
    living = {rank.node_info.rank for rank in simulation.ranks if not rank.dead} - cluster.silent
    usable = {node_info.rank: node_info for node_info in reversed(cluster.node_infos) if node_info.rank in living}
    try:
        assign(cluster.plan, usable.values(), run_id=RUN, attempt=ATTEMPT, epoch=1, leader=0, secret="")
    except RendezvousError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_any_cluster_gets_one_leader_an_epoch_and_one_world_or_one_clear_error(cluster):
    simulation = cluster.run()
    assert violations(simulation) == []
    event("a world" if any(rank.world for rank in simulation.ranks) else "an error")
    if is_possible(cluster, simulation):
        twins = [rank for rank in simulation.ranks if rank.error and "is taken" in str(rank.error)]
        assert len(twins) <= len(simulation.ranks) - len({node_info.rank for node_info in cluster.node_infos})
        assert all(rank.world or rank.dead or rank in twins for rank in simulation.ranks)


class TwoWinners(View):
    """A mutant: a claim is written over the claim of another."""

    def create(self, name: str, document: Any) -> bool:
        if not name.startswith("claim-"):
            return super().create(name, document)
        self._operate("create")
        self._disk.versions(name).append(Version(self._disk.clock.now(), self._rank, document))
        self._disk.created.append((name, self._rank))
        return True


class TwoVerdicts(View):
    """A mutant: whoever publishes last wins."""

    def create(self, name: str, document: Any) -> bool:
        if name != "world.json":
            return super().create(name, document)
        self.replace(name, document)
        return True


def stalled_leader(seed: int) -> Cluster:
    """Rank 0 opens the first epoch, falls asleep at some operation for longer than a lease, and wakes up."""
    plan, faults = plan_of(inference=2), Faults(late=0.5, stalls={0: (seed % 12, 5.0)}, seed=seed)
    node_infos = make_node_infos(plan.ranks)
    return Cluster(plan, node_infos, [0.0] * len(node_infos), faults, frozenset(), {})


@pytest.mark.parametrize("mutant", [TwoWinners, TwoVerdicts])
def test_the_checks_notice_a_directory_that_is_not_exclusive(mutant):
    assert any(violations(stalled_leader(seed).run(mutant)) for seed in range(48))


def test_a_leader_that_sleeps_and_wakes_changes_nothing():
    for seed in range(48):
        simulation = stalled_leader(seed).run()
        assert violations(simulation) == []
        assert all(rank.world for rank in simulation.ranks)


@pytest.mark.parametrize("ranks", [1, 2, 65, 300, 1000])
def test_clusters_of_any_size_survive_their_leader(ranks):
    seats = tuple(
        NodeBundle(roles=(RoleProcess(role="trainer", index=index, gpus=1, ports=2),)) for index in range(ranks)
    )
    plan = Plan(ranks=ranks + 1, bundles=seats)
    node_infos = make_node_infos(plan.ranks, gpus=1)
    simulation = Simulation(plan, node_infos, Faults(deaths={0: 3 + ranks // 2})).run()
    assert violations(simulation) == []
    assert [rank.node_info.rank for rank in simulation.ranks if rank.dead] == [0]
    assert all(rank.world for rank in simulation.ranks[1:])


@pytest.mark.parametrize("last", range(14))
def test_the_leader_may_die_between_any_two_of_its_operations(last):
    plan = plan_of(inference=2, spare_nodes=1)
    simulation = Simulation(plan, make_node_infos(plan.ranks), Faults(deaths={0: last})).run()
    assert violations(simulation) == []
    assert all(rank.world for rank in simulation.ranks[1:])


def test_every_successor_of_a_dying_leader_opens_an_epoch_of_its_own():
    plan = plan_of(inference=2, spare_nodes=3)
    simulation = Simulation(plan, make_node_infos(plan.ranks), Faults(deaths={0: 4, 1: 20, 2: 30})).run()
    assert violations(simulation) == []
    claims = [entry for entry in simulation.disk.created if entry[0].startswith("claim-")]
    assert [name for name, _ in claims] == [f"claim-{epoch}.json" for epoch in range(1, len(claims) + 1)]
    assert len({rank for _, rank in claims}) == len(claims) >= 2


def test_four_thousand_ranks_meet_with_a_constant_number_of_operations_each():
    plan = plan_of(inference=4094, gpus=1)
    assert plan.ranks == 4096
    simulation = Simulation(plan, make_node_infos(plan.ranks, gpus=1), lease=7.5).run()
    assert all(rank.world for rank in simulation.ranks)
    assert violations(simulation) == []
    assert sum(simulation.disk.operations.values()) < 30 * plan.ranks


def test_a_bad_node_is_replaced_by_a_spare():
    plan, node_infos = plan_of(spare_nodes=1), make_node_infos(4)
    node_infos[1] = replace(node_infos[1], problems=("GPU 0 is held",))
    simulation = Simulation(plan, node_infos).run()
    world = simulation.ranks[0].world
    assert world is not None
    assert {place.rank for place in world.placements} == {0, 2, 3}
    assert simulation.ranks[1].world == world


def test_without_a_spare_every_rank_learns_which_node_is_bad_and_what_to_do():
    plan, node_infos = plan_of(), make_node_infos(3)
    node_infos[1] = replace(node_infos[1], problems=("disk is full",))
    simulation = Simulation(plan, node_infos).run()
    for rank in simulation.ranks:
        assert "rank 1 (node1): disk is full" in str(rank.error)
        assert "resources.spare_nodes=1" in str(rank.error)
    assert max(rank.ended for rank in simulation.ranks) < 2


def test_a_rank_that_never_comes_is_named_before_the_deadline():
    plan = plan_of()
    simulation = Simulation(plan, make_node_infos(3)[:2], seconds=30).run()
    assert all(isinstance(rank.error, RendezvousError) for rank in simulation.ranks)
    assert all("rank 2 (?): no node record appeared" in str(rank.error) for rank in simulation.ranks)
    assert all(26 < rank.ended < 30 for rank in simulation.ranks)


def test_a_rank_that_never_comes_is_replaced_by_a_spare_at_half_time():
    plan = plan_of(spare_nodes=1)
    simulation = Simulation(plan, make_node_infos(4)[:3], seconds=30).run()
    assert all(rank.world and 14 < rank.ended < 18 for rank in simulation.ranks)


def test_a_rank_that_answers_nowhere_is_named_with_what_was_tried():
    simulation = Simulation(plan_of(), make_node_infos(3), silent=frozenset({2})).run()
    assert "rank 2 (?): node2 does not answer at 192.168.0.1:4000, 10.0.0.2:4000" in str(simulation.ranks[0].error)


def test_the_world_names_the_address_that_answered():
    simulation = Simulation(plan_of(), make_node_infos(3)).run()
    world = simulation.ranks[0].world
    assert world is not None
    assert {place.address for place in world.placements} == {"10.0.0.0", "10.0.0.1", "10.0.0.2"}


def test_a_twin_is_told_who_has_its_rank_and_the_others_meet():
    node_infos = make_node_infos(3)
    twin = replace(node_infos[1], pid=77, hostname="other")
    simulation = Simulation(plan_of(), [*node_infos, twin], starts=[0, 0, 0, 0.001]).run()
    assert "other pid 77 came after node1 pid 1001" in str(simulation.ranks[3].error)
    assert all(rank.world for rank in simulation.ranks[:3])


def test_a_node_record_of_another_attempt_is_never_believed():
    simulation = Simulation(plan_of(), make_node_infos(3)[:2], seconds=20)
    simulation.disk.plant("nodes/2.json", make_node_infos(3, attempt="12-0")[2])
    simulation.run()
    assert "rank 2 (?): its node record is of rank 2 of attempt 12-0" in str(simulation.ranks[0].error)


def test_a_stale_claim_only_costs_a_lease():
    simulation = Simulation(plan_of(), make_node_infos(3), lease=2.0)
    simulation.disk.plant("claim-1.json", JUNK["claim-1.json"])
    simulation.disk.plant("lease-1.json", JUNK["lease-1.json"])
    simulation.run()
    assert all(rank.world and rank.world.epoch == 2 for rank in simulation.ranks)
    assert max(rank.ended for rank in simulation.ranks) < 6


def test_a_world_of_another_attempt_or_run_is_an_error_not_a_world():
    world = Simulation(plan_of(), make_node_infos(3)).run().ranks[0].world
    assert world is not None
    for stale in (replace(world, attempt="12-0"), replace(world, run_id="other")):
        simulation = Simulation(plan_of(), make_node_infos(3))
        simulation.disk.plant("world.json", stale)
        simulation.run()
        assert all(isinstance(rank.error, RendezvousError) and rank.world is None for rank in simulation.ranks)


def test_a_rank_outside_the_plan_is_refused_at_once():
    simulation = Simulation(plan_of(), make_node_infos(4)).run()
    assert "rank 3 is outside the plan's 3 ranks" in str(simulation.ranks[3].error)


def test_who_is_alone_learns_at_its_deadline_who_is_missing():
    plan = plan_of(inference=8)
    simulation = Simulation(plan, make_node_infos(10)[7:8], Faults(stalls={7: (3, 70.0)})).run()
    error = simulation.ranks[0].error
    assert isinstance(error, DeadlineError)
    assert "missing: ranks 0-6, 8-9" in str(error)


def test_meeting_ends_at_its_deadline_and_names_who_is_missing():
    clock = FakeClock()
    view = View(Disk(clock, Faults()), 1)
    with pytest.raises(DeadlineError) as caught:
        rendezvous(
            view, plan_of(), make_node_infos(3)[1], run_id=RUN, seconds=20, lease=60, find_addresses=_all, clock=clock
        )
    assert str(caught.value) == "waited 20.0 s for the world of attempt 12-1; missing: ranks 0, 2"
    assert clock.time == pytest.approx(20.0)


def test_a_rank_alone_in_its_plan_leads_and_serves():
    clock, plan = FakeClock(), Plan(ranks=1, bundles=(NodeBundle(roles=(RoleProcess(role="trainer"),)),))
    view = View(Disk(clock, Faults()), 0)
    world = rendezvous(view, plan, make_node_infos(1)[0], run_id=RUN, seconds=20, find_addresses=_all, clock=clock)
    assert (world.leader, [place.name for place in world.placements]) == (0, ["trainer.0"])


def _all(node_infos: Sequence[NodeInfo], witnesses: Sequence[NodeInfo]) -> Mapping[int, str]:
    return {node_info.rank: node_info.addresses[0] for node_info in node_infos}


def test_a_roster_reads_each_node_record_once():
    plan = plan_of(inference=198)
    simulation = Simulation(plan, make_node_infos(plan.ranks)).run()
    view = View(simulation.disk, 0)
    roster = Membership(view, plan.ranks, ATTEMPT, "boot of node0", _all)
    while roster.gather():
        pass
    assert roster.complete
    assert view.operations == plan.ranks + 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "rank 3"),
        ([3, 5, 6, 7], "ranks 3, 5-7"),
        (list(range(0, 60, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, …"),
    ],
)
def test_ranks_are_named_in_few_words(ranks, text):
    assert name_ranks(ranks) == text
