"""What runs, and what each part of it needs.

Owns the words of the rendezvous (`NodeInfo`, `Placement`, `World`, `Plan`) and the first of its two decisions:
`make_plan`, what a config asks of the allocation. Who gets it is decided in `pipeline.topology.assignment`. Pure
functions of
values: no I/O, no clock, no randomness.
"""

import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ResourcesConfig
from pipeline.errors import PlanError

RoleName = Literal["redis", "trainer", "inference", "actor", "preprocessor"]

_GPUS_OF = {"trainer": "resources.trainer.processes", "inference": "resources.inference.gpus"}
"""The keys by which a role that has GPUs has fewer on one node."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes about itself.

    Attributes:
        rank: its place in the job, 0 … ranks − 1.
        attempt: the attempt it belongs to.
        hostname, pid: of the agent process.
        boot: identity of the node: of the machine's boot, and of the network that its processes are in.
        addresses: all candidate addresses, best first.
        beacon: port where the agent answers connect-backs.
        token: what the callers of the beacon must know.
        ports: ports this agent holds (bound, see `pipeline.utils.subprocesses.hold_port`) for the roles it may get.
        gpus: indices of the GPUs that its roles may get: those that the scheduler gave, or that the agent has claimed.
        memory: bytes of free memory.
        problems: what its preflight found wrong; a rank with problems gets no role.
    """

    rank: int
    attempt: str
    hostname: str
    pid: int
    boot: str
    addresses: tuple[str, ...]
    probe_port: int
    ports: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    memory: int = 0
    problems: tuple[str, ...] = ()
    token: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One process (or torchrun agent) of a role: the `index`-th of its role, on `rank` at `address`."""

    role: RoleName
    index: int
    rank: int
    address: str
    ports: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`role.index`, as in log and status file names."""
        return f"{self.role}.{self.index}"

    @property
    def endpoint(self) -> str:
        """`address:port` of the role's first port."""
        return f"{self.address}:{self.ports[0]}"


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The assignment that the leader publishes once: everything the ranks need to find each other.

    `secret` signs what the trainer's processes say to each other (`pipeline.utils.signed_store`) and never travels. A
    process of another attempt has another one and is refused.
    """

    run_id: str
    attempt: str
    epoch: int
    leader: int
    secret: str
    placements: tuple[Placement, ...]

    @property
    def password(self) -> str:
        """What this attempt's Redis and servers ask for. It travels as it is, so the secret does not follow from it."""
        return hmac.digest(self.secret.encode(), b"password", "sha256").hex()[:32]

    def of_role(self, role: RoleName) -> tuple[Placement, ...]:
        """The placements of a role, by index."""
        return tuple(sorted((p for p in self.placements if p.role == role), key=lambda p: p.index))

    def of_rank(self, rank: int) -> tuple[Placement, ...]:
        """What a rank has to run, in the order to start it."""
        return tuple(p for p in self.placements if p.rank == rank)


class RoleProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The `index`-th process of a role before it has a rank: how many ports and GPUs it needs.

    Its GPUs follow those of the slots before it in its seat; `back` GPUs further back begin those that it shares.
    """

    role: RoleName
    index: int = 0
    ports: int = 0
    gpus: int = 0
    shared_gpu_offset: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"


class NodeBundle(msgspec.Struct, frozen=True, kw_only=True):
    """The roles that one rank runs together, in the order to start them."""

    roles: tuple[RoleProcess, ...]

    @property
    def ports(self) -> int:
        return sum(slot.ports for slot in self.roles)

    @property
    def gpus(self) -> int:
        return max((places.stop for places in self.gpu_places()), default=0)

    def gpu_places(self) -> list[range]:
        """Which of the seat's GPUs each slot gets."""
        places, end = list[range](), 0
        for slot in self.roles:
            begin = end - slot.shared_gpu_offset
            places.append(range(begin, begin + slot.gpus))
            end = max(end, begin + slot.gpus)
        return places

    @property
    def name(self) -> str:
        return " + ".join(slot.name for slot in self.roles)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a config asks of the allocation: written by `make_plan`, filled by `assign`.

    `ranks` is the size of the allocation; each of the `seats` takes a rank of its own and what is left is spare.
    """

    ranks: int
    bundles: tuple[NodeBundle, ...]

    @property
    def ports_per_rank(self) -> int:
        """Ports that every rank has to hold, since it may get any seat."""
        return max(seat.ports for seat in self.bundles)

    @property
    def spare_nodes(self) -> int:
        return self.ranks - len(self.bundles)


def make_plan(config: RunConfig) -> Plan:
    """The seats that a config asks for; `PlanError` when its resources contradict each other or do not suffice."""
    seats = _bundles(config)
    return Plan(ranks=_ranks(config.resources, seats), bundles=tuple(seats))


def _bundles(config: RunConfig) -> list[NodeBundle]:
    wanted = config.resources
    if config.serve.enabled:  # its front is where its launcher is
        inference = _inference_bundles(wanted) if config.serve.sampling else []
        return [seat for seats in _placed(_trainer_bundles(wanted, ports=1), inference, wanted) for seat in seats]
    if config.evaluation.only:
        return _evaluation_bundles(wanted)
    if not config.has_rollouts:
        return _trainer_bundles(wanted, ports=1)
    services = _services(redis=config.streams.backend == "redis")
    trainer, inference = _placed(_trainer_bundles(wanted, ports=2), _inference_bundles(wanted), wanted)
    if wanted.services.nodes:
        return [NodeBundle(roles=services), *trainer, *inference]
    host = trainer if trainer and _trainer_load(wanted) < _inference_load(wanted) else inference
    host[-1] = NodeBundle(roles=services[:1] + host[-1].roles + services[1:])
    return [*trainer, *inference]


def _placed(
    trainer: list[NodeBundle], inference: list[NodeBundle], wanted: ResourcesConfig
) -> tuple[list[NodeBundle], list[NodeBundle]]:
    """On nodes of their own, or together on nodes with GPUs."""
    if wanted.colocate and inference:
        return [], _shared(trainer, inference, wanted)
    if wanted.gpus_per_node:
        return [], _packed([*trainer, *inference], wanted.gpus_per_node)
    return trainer, inference


def _packed(seats: Sequence[NodeBundle], gpus: int) -> list[NodeBundle]:
    """The same slots on as few nodes of so many GPUs as first fit finds, the largest first; each part of the trainer
    on a node of its own, as `resources.trainer.nodes` says. Slots that share GPUs stay together."""
    groups = sorted((group for seat in seats for group in _split_by_gpu(seat)), key=lambda group: -group.gpus)
    nodes: list[NodeBundle] = []
    for group in groups:
        if group.gpus > gpus:
            expected = f"at least {group.gpus}, the GPUs of {group.name}, which has one node"
            hint = f"raise it, or lower {_GPUS_OF[group.roles[0].role]}"
            raise PlanError("resources.gpus_per_node", gpus, expected, hint)
        place = next((place for place, node in enumerate(nodes) if _has_room(node, group, gpus)), None)
        if place is None:
            nodes.append(group)
        else:
            nodes[place] = NodeBundle(roles=nodes[place].roles + group.roles)
    return nodes


def _has_room(node: NodeBundle, group: NodeBundle, gpus: int) -> bool:
    two_trainers = all(any(slot.role == "trainer" for slot in seat.roles) for seat in (node, group))
    return node.gpus + group.gpus <= gpus and not two_trainers


def _split_by_gpu(seat: NodeBundle) -> list[NodeBundle]:
    """The seat in parts that share no GPU with each other."""
    groups: list[tuple[RoleProcess, ...]] = []
    for slot in seat.roles:
        if slot.shared_gpu_offset:
            groups[-1] += (slot,)
        else:
            groups.append((slot,))
    return [NodeBundle(roles=group) for group in groups]


def _shared(
    trainer: Sequence[NodeBundle], inference: Sequence[NodeBundle], wanted: ResourcesConfig
) -> list[NodeBundle]:
    """Each node's servers on the GPUs of its trainer, from the first on."""
    if len(trainer) != len(inference):
        expected = f"{len(trainer)} with resources.colocate, as resources.trainer.nodes"
        raise PlanError("resources.inference.nodes", len(inference), expected, "set it")
    held, needed = trainer[0].gpus, inference[0].gpus
    if 0 < wanted.gpus_per_node < held:
        expected = f"at least {held}, the GPUs of a node's trainer with resources.colocate, or 0"
        hint = "raise it, or lower resources.trainer.processes"
        raise PlanError("resources.gpus_per_node", wanted.gpus_per_node, expected, hint)
    if needed > held:
        expected = f"servers that need at most the {held} GPUs of a node's trainer, not {needed}"
        raise PlanError("resources.inference.servers", wanted.inference.servers, expected, "set fewer")
    pairs = zip(trainer, inference, strict=True)
    return [NodeBundle(roles=(*training.roles, *_colocated_on(serving, held))) for training, serving in pairs]


def _colocated_on(serving: NodeBundle, held: int) -> Iterator[RoleProcess]:
    """The slots with their GPUs among the `held` ones before them."""
    for slot, places in zip(serving.roles, serving.gpu_places(), strict=True):
        yield msgspec.structs.replace(slot, shared_gpu_offset=held - places.start)


def _ranks(wanted: ResourcesConfig, seats: Sequence[NodeBundle]) -> int:
    """Size of the allocation."""
    least = len(seats) + wanted.spare_nodes
    if wanted.nodes and wanted.nodes < least:
        found = Counter(_bundle_kind(seat, wanted) for seat in seats)
        services = found.pop("services", 0)
        counts = dict(sorted(found.items(), reverse=True)) | {"services": services, "spares": wanted.spare_nodes}
        parts = " + ".join(f"{name} {count}" for name, count in counts.items() if count)
        expected = f"at least {least} ({parts}): {least - wanted.nodes} missing"
        raise PlanError("resources.nodes", wanted.nodes, expected, f"set resources.nodes={least}, or 0 for a fit")
    return wanted.nodes or least


def _bundle_kind(seat: NodeBundle, wanted: ResourcesConfig) -> str:
    """What a node with this seat is called where nodes are counted."""
    roles = {slot.role for slot in seat.roles}
    parts = [role for role in ("trainer", "inference") if role in roles]
    if parts and wanted.gpus_per_node:
        return f"nodes of {wanted.gpus_per_node} GPUs"
    return " with ".join(parts) or "services"


def _services(*, redis: bool) -> tuple[RoleProcess, ...]:
    store = (RoleProcess(role="redis", ports=1),) if redis else ()
    return (*store, RoleProcess(role="preprocessor"), RoleProcess(role="actor"))


def _trainer_bundles(wanted: ResourcesConfig, ports: int) -> list[NodeBundle]:
    """One torchrun agent a node; the first holds torchrun's master port and, where there are servers, the weight
    store's: so many `ports`."""
    gpus = wanted.trainer.processes * wanted.trainer.gpus
    slots = [
        RoleProcess(role="trainer", index=i, ports=0 if i else ports, gpus=gpus) for i in range(wanted.trainer.nodes)
    ]
    return [NodeBundle(roles=(slot,)) for slot in slots]


def _inference_bundles(wanted: ResourcesConfig) -> list[NodeBundle]:
    servers, gpus = wanted.inference.servers, wanted.inference.gpus
    count = servers * wanted.inference.nodes
    back = [gpus if index % servers % wanted.inference.servers_per_gpu else 0 for index in range(count)]
    slots = [
        RoleProcess(role="inference", index=index, ports=1, gpus=gpus, shared_gpu_offset=back[index])
        for index in range(count)
    ]
    return [NodeBundle(roles=tuple(slots[first : first + servers])) for first in range(0, count, servers)]


def _evaluation_bundles(wanted: ResourcesConfig) -> list[NodeBundle]:
    """The servers, and on the last of their nodes the actor."""
    seats = _inference_bundles(wanted)
    *others, last = _packed(seats, wanted.gpus_per_node) if wanted.gpus_per_node else seats
    return [*others, NodeBundle(roles=(*last.roles, RoleProcess(role="actor")))]


def _trainer_load(wanted: ResourcesConfig) -> int:
    return wanted.trainer.processes * wanted.trainer.threads


def _inference_load(wanted: ResourcesConfig) -> int:
    return wanted.inference.servers * wanted.inference.threads
