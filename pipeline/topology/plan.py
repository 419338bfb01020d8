"""The plan of a run: the processes that a config requires, and the ports and GPUs of each.

Owns the records of the rendezvous (`NodeInfo`, `Placement`, `World`, `Plan`) and the first of its two decisions,
`make_plan`. The second one, the assignment of bundles to ranks, is in `pipeline.topology.assignment`. Pure functions:
no I/O, no clock, no randomness.
"""

import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pipeline.config import RunConfig
from pipeline.config.cluster_keys import ResourcesConfig
from pipeline.errors import PlanError
from pipeline.run.fault_plan import NODE, parse_faults

RoleName = Literal["redis", "trainer", "inference", "actor", "preprocessor"]

_GPUS_OF = {"trainer": "resources.trainer.processes", "inference": "resources.inference.gpus"}
"""The key that lowers the number of GPUs of a role on one node."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The node record of a rank, published in the rendezvous directory.

    Attributes:
        rank: index of the rank in the job, 0 … ranks − 1.
        attempt: the rank's attempt.
        hostname, pid: of the agent process.
        boot: identity of the node: of the machine's boot, and of its processes' network namespace.
        addresses: all candidate addresses, the best first.
        probe_port: port of the agent's probe server.
        token: the secret that callers of the probe server must know.
        ports: ports that this agent holds (bound, see `pipeline.utils.subprocesses.hold_port`) for its roles.
        gpus: indices of the GPUs for its roles: those that the scheduler assigned, or that the agent has claimed.
        memory: bytes of free memory.
        problems: failed preflight checks; a rank with problems gets no role.
        process_began, published: when the agent's process began, and when it published this record (Unix seconds), for
            the run's goodput.
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
    process_began: float = 0.0
    published: float = 0.0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One process (or torchrun agent) of a role, with its number `index` within the role, its rank and its address."""

    role: RoleName
    index: int
    rank: int
    address: str
    ports: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`role.index`, the name in log and status files."""
        return f"{self.role}.{self.index}"

    @property
    def endpoint(self) -> str:
        """`address:port` of the role's first port."""
        return f"{self.address}:{self.ports[0]}"


class NodeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was lost after the rendezvous, the spare rank that took over its roles, and the cause in one line.

    `spare` is None for a lost rank without roles.
    """

    rank: int
    spare: int | None
    cause: str


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The assignment: all that the ranks need to find each other.

    The leader publishes it once. After the loss of a node, the next revision of it is published, in which a spare rank
    has the lost rank's roles (`pipeline.topology.takeover`); all other placements stay.

    `secret` signs the messages between the trainer's processes (`pipeline.utils.signed_store`) and is never sent. A
    process of another attempt has another secret and is refused. `spares` are the healthy nodes without roles.
    """

    run_id: str
    attempt: str
    epoch: int
    leader: int
    secret: str
    placements: tuple[Placement, ...]
    spares: tuple[NodeInfo, ...] = ()
    losses: tuple[NodeLoss, ...] = ()

    @property
    def revision(self) -> int:
        """The number of losses after which this is the assignment."""
        return len(self.losses)

    def has_lost(self, rank: int) -> bool:
        """Whether a rank is no part of the attempt any more."""
        return any(loss.rank == rank for loss in self.losses)

    @property
    def password(self) -> str:
        """The password of this attempt's Redis and servers. It is sent in plain text and does not reveal the secret."""
        return hmac.digest(self.secret.encode(), b"password", "sha256").hex()[:32]

    def of_role(self, role: RoleName) -> tuple[Placement, ...]:
        """The placements of a role, by index."""
        return tuple(sorted((p for p in self.placements if p.role == role), key=lambda p: p.index))

    def of_rank(self, rank: int) -> tuple[Placement, ...]:
        """The placements on a rank, in the order of their start."""
        return tuple(p for p in self.placements if p.rank == rank)

    @property
    def rank_of_address(self) -> dict[str, int]:
        """The rank of each address at which roles listen, or would on a spare node."""
        spare = {address: node.rank for node in self.spares for address in node.addresses}
        return spare | {placement.address: placement.rank for placement in self.placements}

    @property
    def address_of_rank(self) -> dict[int, str]:
        """The address of each rank with roles and of each spare one, which the leader has verified."""
        spare = {node.rank: node.addresses[0] for node in self.spares}
        return spare | {placement.rank: placement.address for placement in self.placements}


class RoleProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Process number `index` of a role before its assignment to a rank, with the ports and GPUs that it needs.

    Its GPUs follow those of the earlier processes in its bundle, minus `shared_gpu_offset`: with an offset of n, it
    shares the last n of their GPUs.
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
    """The processes that one rank runs, in the order of their start."""

    roles: tuple[RoleProcess, ...]

    @property
    def ports(self) -> int:
        return sum(process.ports for process in self.roles)

    @property
    def gpus(self) -> int:
        return max((gpus.stop for gpus in self.gpu_ranges()), default=0)

    def gpu_ranges(self) -> list[range]:
        """For each process, its GPUs as a range of indices into the bundle's GPUs."""
        ranges, end = list[range](), 0
        for process in self.roles:
            begin = end - process.shared_gpu_offset
            ranges.append(range(begin, begin + process.gpus))
            end = max(end, begin + process.gpus)
        return ranges

    @property
    def name(self) -> str:
        return " + ".join(process.name for process in self.roles)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of a config on the allocation, made by `make_plan` and satisfied by `assign`.

    `ranks` is the size of the allocation. Each of the `bundles` takes one rank; the remaining ranks are spares.
    """

    ranks: int
    bundles: tuple[NodeBundle, ...]

    @property
    def ports_per_rank(self) -> int:
        """Number of ports that every rank must hold, since it may get any bundle."""
        return max(bundle.ports for bundle in self.bundles)

    @property
    def spare_nodes(self) -> int:
        return self.ranks - len(self.bundles)


def make_plan(config: RunConfig) -> Plan:
    """The plan of a config. `PlanError` if its resources are contradictory or insufficient."""
    bundles = _bundles(config)
    _partitioned_nodes_have_roles(config, len(bundles))
    return Plan(ranks=_ranks(config.resources, bundles), bundles=tuple(bundles))


def _partitioned_nodes_have_roles(config: RunConfig, nodes: int) -> None:
    for fault in parse_faults(config.faults):
        if fault.target == NODE and fault.index >= nodes:
            expected = f"one of the {nodes} nodes with roles, node[0] to node[{nodes - 1}]"
            raise PlanError("faults", fault.text, expected, "lower its index")


def make_servers_plan(config: RunConfig, first: int = 0) -> Plan:
    """The plan of a job that consists of the servers of `resources.inference`; their indices begin at `first`."""
    bundles = [
        NodeBundle(roles=tuple(msgspec.structs.replace(role, index=role.index + first) for role in bundle.roles))
        for bundle in _inference_bundles(config.resources)
    ]
    return Plan(ranks=len(bundles), bundles=tuple(bundles))


def _bundles(config: RunConfig) -> list[NodeBundle]:
    resources = config.resources
    if config.serve.enabled:  # the gateway runs on the machine of the launcher
        inference = _inference_bundles(resources) if config.serve.sampling else []
        placed = _placed(_trainer_bundles(resources, ports=1), inference, resources)
        return [bundle for bundles in placed for bundle in bundles]
    if config.evaluation.only:
        return _evaluation_bundles(resources)
    if not config.has_rollouts:
        return _trainer_bundles(resources, ports=1)
    services = _services(redis=config.streams.backend == "redis")
    trainer, inference = _placed(_trainer_bundles(resources, ports=2), _inference_bundles(resources), resources)
    if resources.services.nodes:
        return [NodeBundle(roles=services), *trainer, *inference]
    # Without separate nodes, the services join the last node of the role with the lower CPU load. Redis, if used,
    # starts first, since all other roles connect to it.
    host = trainer if trainer and _trainer_load(resources) < _inference_load(resources) else inference
    host[-1] = NodeBundle(roles=services[:1] + host[-1].roles + services[1:])
    return [*trainer, *inference]


def _placed(
    trainer: list[NodeBundle], inference: list[NodeBundle], resources: ResourcesConfig
) -> tuple[list[NodeBundle], list[NodeBundle]]:
    """The bundles of trainer and servers: on separate nodes, on shared GPUs, or packed onto nodes of equal size.

    Combined bundles are returned as the second list.
    """
    if resources.colocate and inference:
        return [], _shared(trainer, inference, resources)
    if resources.gpus_per_node:
        return [], _packed([*trainer, *inference], resources.gpus_per_node)
    return trainer, inference


def _packed(bundles: Sequence[NodeBundle], gpus: int) -> list[NodeBundle]:
    """The processes of `bundles`, packed onto nodes of `gpus` GPUs by first fit, the largest first.

    The trainer's parts go to different nodes, as `resources.trainer.nodes` requires. Processes that share GPUs stay
    together.
    """
    groups = sorted((group for bundle in bundles for group in _split_by_gpu(bundle)), key=lambda group: -group.gpus)
    nodes: list[NodeBundle] = []
    for group in groups:
        if group.gpus > gpus:
            expected = f"at least {group.gpus}, the GPUs of {group.name}, which has one node"
            hint = f"raise it, or lower {_GPUS_OF[group.roles[0].role]}"
            raise PlanError("resources.gpus_per_node", gpus, expected, hint)
        index = next((index for index, node in enumerate(nodes) if _has_room(node, group, gpus)), None)
        if index is None:
            nodes.append(group)
        else:
            nodes[index] = NodeBundle(roles=nodes[index].roles + group.roles)
    return nodes


def _has_room(node: NodeBundle, group: NodeBundle, gpus: int) -> bool:
    two_trainers = all(any(process.role == "trainer" for process in bundle.roles) for bundle in (node, group))
    return node.gpus + group.gpus <= gpus and not two_trainers


def _split_by_gpu(bundle: NodeBundle) -> list[NodeBundle]:
    """The bundle, split into groups that share no GPU with each other."""
    groups: list[tuple[RoleProcess, ...]] = []
    for process in bundle.roles:
        if process.shared_gpu_offset:
            groups[-1] += (process,)
        else:
            groups.append((process,))
    return [NodeBundle(roles=group) for group in groups]


def _shared(
    trainer: Sequence[NodeBundle], inference: Sequence[NodeBundle], resources: ResourcesConfig
) -> list[NodeBundle]:
    """Bundles with each node's servers on the GPUs of its trainer, starting with the first GPU."""
    if len(trainer) != len(inference):
        expected = f"{len(trainer)} with resources.colocate, as resources.trainer.nodes"
        raise PlanError("resources.inference.nodes", len(inference), expected, "set it")
    held, needed = trainer[0].gpus, inference[0].gpus
    if 0 < resources.gpus_per_node < held:
        expected = f"at least {held}, the GPUs of a node's trainer with resources.colocate, or 0"
        hint = "raise it, or lower resources.trainer.processes"
        raise PlanError("resources.gpus_per_node", resources.gpus_per_node, expected, hint)
    if needed > held:
        expected = f"servers that need at most the {held} GPUs of a node's trainer, not {needed}"
        raise PlanError("resources.inference.servers", resources.inference.servers, expected, "set fewer")
    pairs = zip(trainer, inference, strict=True)
    return [NodeBundle(roles=(*training.roles, *_colocated_on(serving, held))) for training, serving in pairs]


def _colocated_on(serving: NodeBundle, held: int) -> Iterator[RoleProcess]:
    """The processes, with GPUs among the `held` ones of the trainer before them."""
    for process, gpus in zip(serving.roles, serving.gpu_ranges(), strict=True):
        yield msgspec.structs.replace(process, shared_gpu_offset=held - gpus.start)


def _ranks(resources: ResourcesConfig, bundles: Sequence[NodeBundle]) -> int:
    """The number of nodes of the allocation."""
    least = len(bundles) + resources.spare_nodes
    if resources.nodes and resources.nodes < least:
        kinds = Counter(_bundle_kind(bundle, resources) for bundle in bundles)
        services = kinds.pop("services", 0)
        counts = dict(sorted(kinds.items(), reverse=True)) | {"services": services, "spares": resources.spare_nodes}
        parts = " + ".join(f"{name} {count}" for name, count in counts.items() if count)
        expected = f"at least {least} ({parts}): {least - resources.nodes} missing"
        raise PlanError("resources.nodes", resources.nodes, expected, f"set resources.nodes={least}, or 0 for a fit")
    return resources.nodes or least


def _bundle_kind(bundle: NodeBundle, resources: ResourcesConfig) -> str:
    """The name of a bundle's kind in the node count of an error."""
    roles = {process.role for process in bundle.roles}
    parts = [role for role in ("trainer", "inference") if role in roles]
    if parts and resources.gpus_per_node:
        return f"nodes of {resources.gpus_per_node} GPUs"
    return " with ".join(parts) or "services"


def _services(*, redis: bool) -> tuple[RoleProcess, ...]:
    store = (RoleProcess(role="redis", ports=1),) if redis else ()
    return (*store, RoleProcess(role="preprocessor"), RoleProcess(role="actor"))


def _trainer_bundles(resources: ResourcesConfig, ports: int) -> list[NodeBundle]:
    """One torchrun agent per node. The first holds `ports` ports: for its master and for the weight store."""
    gpus = resources.trainer.processes * resources.trainer.gpus
    processes = [
        RoleProcess(role="trainer", index=i, ports=0 if i else ports, gpus=gpus) for i in range(resources.trainer.nodes)
    ]
    return [NodeBundle(roles=(process,)) for process in processes]


def _inference_bundles(resources: ResourcesConfig) -> list[NodeBundle]:
    servers, gpus = resources.inference.servers, resources.inference.gpus
    count = servers * resources.inference.nodes
    back = [gpus if index % servers % resources.inference.servers_per_gpu else 0 for index in range(count)]
    processes = [
        RoleProcess(role="inference", index=index, ports=1, gpus=gpus, shared_gpu_offset=back[index])
        for index in range(count)
    ]
    return [NodeBundle(roles=tuple(processes[first : first + servers])) for first in range(0, count, servers)]


def _evaluation_bundles(resources: ResourcesConfig) -> list[NodeBundle]:
    """The servers' bundles, with the actor on the last one."""
    bundles = _inference_bundles(resources)
    *others, last = _packed(bundles, resources.gpus_per_node) if resources.gpus_per_node else bundles
    return [*others, NodeBundle(roles=(*last.roles, RoleProcess(role="actor")))]


def _trainer_load(resources: ResourcesConfig) -> int:
    return resources.trainer.processes * resources.trainer.threads


def _inference_load(resources: ResourcesConfig) -> int:
    return resources.inference.servers * resources.inference.threads
