"""What runs, and what each part of it needs.

Owns the words of the rendezvous (`Card`, `Placement`, `World`, `Plan`) and the first of its two decisions: `make_plan`,
what a config asks of the allocation. Who gets it is decided in `pipeline.world.assignment`. Pure functions of values:
no I/O, no clock, no randomness.
"""

import hmac
from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeline.config import RunConfig
from pipeline.config.places import ResourcesConfig
from pipeline.errors import PlanError

RoleName = Literal["redis", "trainer", "inference", "actor", "preprocessor"]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes about itself.

    Attributes:
        rank: its place in the job, 0 … ranks − 1.
        attempt: the attempt it belongs to.
        hostname, pid: of the agent process.
        boot: identity of the node: of the machine's boot, and of the network that its processes are in.
        addresses: all candidate addresses, best first.
        beacon: port where the agent answers connect-backs.
        token: what the callers of the beacon must know.
        ports: ports this agent holds (bound, see `pipeline.system.process.hold_port`) for the roles it may get.
        gpus: indices of the usable GPUs.
        memory: bytes of free memory.
        problems: what its preflight found wrong; a rank with problems gets no role.
    """

    rank: int
    attempt: str
    hostname: str
    pid: int
    boot: str
    addresses: tuple[str, ...]
    beacon: int
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

    `secret` signs what the trainer's processes say to each other (`pipeline.system.signed`) and never travels. A
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


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The `index`-th process of a role before it has a rank: how many ports and GPUs it needs."""

    role: RoleName
    index: int = 0
    ports: int = 0
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The roles that one rank runs together, in the order to start them."""

    slots: tuple[Slot, ...]

    @property
    def ports(self) -> int:
        return sum(slot.ports for slot in self.slots)

    @property
    def gpus(self) -> int:
        return sum(slot.gpus for slot in self.slots)

    @property
    def name(self) -> str:
        return " + ".join(slot.name for slot in self.slots)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a config asks of the allocation: written by `make_plan`, filled by `assign`.

    `ranks` is the size of the allocation; each of the `seats` takes a rank of its own and what is left is spare.
    """

    ranks: int
    seats: tuple[Seat, ...]

    @property
    def ports_per_rank(self) -> int:
        """Ports that every rank has to hold, since it may get any seat."""
        return max(seat.ports for seat in self.seats)

    @property
    def spares(self) -> int:
        return self.ranks - len(self.seats)


def make_plan(config: RunConfig) -> Plan:
    """The seats that a config asks for; `PlanError` when its resources contradict each other or do not suffice."""
    _check_gpus(config)
    wanted = config.resources
    if config.serve.enabled:
        return _plan_of(config, _serving_seats(config))
    if not config.has_rollouts:
        return _plan_of(config, _trainer_seats(wanted, ports=1))
    services = _services(redis=config.streams.backend == "redis")
    trainer, inference = _trainer_seats(wanted, ports=2), _inference_seats(wanted)
    if wanted.gpus_per_node:
        trainer, inference = [], _packed([*trainer, *inference], wanted.gpus_per_node)
    if wanted.services.nodes:
        seats = [Seat(slots=services), *trainer, *inference]
    else:
        host = trainer if trainer and _trainer_load(wanted) < _inference_load(wanted) else inference
        host[-1] = Seat(slots=services[:1] + host[-1].slots + services[1:])
        seats = [*trainer, *inference]
    return _plan_of(config, seats)


def _serving_seats(config: RunConfig) -> list[Seat]:
    """The trainer and the servers of a run that serves; its front is where its launcher is."""
    wanted = config.resources
    seats = _trainer_seats(wanted, ports=1) + (_inference_seats(wanted) if config.serve.sampling else [])
    return _packed(seats, wanted.gpus_per_node) if wanted.gpus_per_node else seats


def _plan_of(config: RunConfig, seats: Sequence[Seat]) -> Plan:
    _check_virtual_nodes(config, seats)
    return Plan(ranks=_ranks(config, len(seats)), seats=tuple(seats))


def _check_gpus(config: RunConfig) -> None:
    trainer = config.resources.trainer.gpus
    if trainer > 1:
        raise PlanError(
            "resources.trainer.gpus", trainer, "0 or 1 for each process", "raise resources.trainer.processes"
        )


def _check_virtual_nodes(config: RunConfig, seats: Sequence[Seat]) -> None:
    """The virtual nodes of one machine would all take its first GPUs."""
    holders = [seat for seat in seats if seat.gpus]
    if config.resources.device == "cuda" and config.cluster.kind == "local" and len(holders) > 1:
        gpus = sum(seat.gpus for seat in holders)
        expected = f"{gpus} with cluster=local, so that one virtual node has all GPUs"
        mend = f"set resources.gpus_per_node={gpus}"
        raise PlanError("resources.gpus_per_node", config.resources.gpus_per_node, expected, mend)


def _packed(seats: Sequence[Seat], gpus: int) -> list[Seat]:
    """The same slots on as few nodes of so many GPUs as first fit finds, the largest first."""
    slots = sorted((slot for seat in seats for slot in seat.slots), key=lambda slot: -slot.gpus)
    nodes: list[list[Slot]] = []
    for slot in slots:
        if slot.gpus > gpus:
            expected = f"at least {slot.gpus}, which {slot.name} needs"
            raise PlanError("resources.gpus_per_node", gpus, expected, "raise it, or give that role fewer GPUs")
        room = (node for node in nodes if sum(each.gpus for each in node) + slot.gpus <= gpus)
        node = next(room, None)
        if node is None:
            nodes.append(node := [])
        node.append(slot)
    return [Seat(slots=tuple(node)) for node in nodes]


def _ranks(config: RunConfig, seats: int) -> int:
    """Size of the allocation."""
    wanted = config.resources
    least = seats + wanted.spares
    if wanted.nodes and wanted.nodes < least:
        counts = {"trainer": wanted.trainer.nodes}
        if config.has_rollouts:
            counts |= {"inference": wanted.inference.nodes, "services": wanted.services.nodes}
        counts |= {"spares": wanted.spares}
        parts = " + ".join(f"{name} {count}" for name, count in counts.items())
        expected = f"at least {least} ({parts}): {least - wanted.nodes} missing"
        raise PlanError("resources.nodes", wanted.nodes, expected, f"set resources.nodes={least}, or 0 for a fit")
    return wanted.nodes or least


def _services(*, redis: bool) -> tuple[Slot, ...]:
    store = (Slot(role="redis", ports=1),) if redis else ()
    return (*store, Slot(role="preprocessor"), Slot(role="actor"))


def _trainer_seats(wanted: ResourcesConfig, ports: int) -> list[Seat]:
    """One torchrun agent a node; the first holds torchrun's master port and, where there are servers, the weight
    store's: so many `ports`."""
    gpus = wanted.trainer.processes * wanted.trainer.gpus
    slots = [Slot(role="trainer", index=i, ports=0 if i else ports, gpus=gpus) for i in range(wanted.trainer.nodes)]
    return [Seat(slots=(slot,)) for slot in slots]


def _inference_seats(wanted: ResourcesConfig) -> list[Seat]:
    servers, gpus = wanted.inference.servers, wanted.inference.gpus
    count = servers * wanted.inference.nodes
    slots = [Slot(role="inference", index=index, ports=1, gpus=gpus) for index in range(count)]
    return [Seat(slots=tuple(slots[first : first + servers])) for first in range(0, count, servers)]


def _trainer_load(wanted: ResourcesConfig) -> int:
    return wanted.trainer.processes * wanted.trainer.threads


def _inference_load(wanted: ResourcesConfig) -> int:
    return wanted.inference.servers * wanted.inference.threads
