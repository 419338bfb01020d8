"""The assignment of the plan's bundles to ranks.

`assign` is the second decision of the rendezvous: a pure function of the plan and the node records. The
leader publishes the result, and every rank validates it with `check_world`. No I/O, no clock, no randomness.
"""

from collections.abc import Iterable, Sequence

from pipeline.errors import RendezvousError
from pipeline.topology.plan import NodeBundle, NodeInfo, Placement, Plan, RoleName, RoleProcess, World


def assign(
    plan: Plan, node_infos: Iterable[NodeInfo], *, run_id: str, attempt: str, epoch: int, leader: int, secret: str
) -> World:
    """Assign every bundle of the plan to a rank. The result does not depend on the order of the node records.

    Bundles with the most GPUs are assigned first, then in the order of the plan, each to the lowest healthy rank that
    has enough GPUs and ports. A role gets the first address of its node record. `RendezvousError` names the unusable
    ranks, the reasons, and a fix.
    """
    ordered = sorted(node_infos, key=lambda node_info: node_info.rank)
    _check_nodes(plan, ordered, attempt)
    by_rank = {node_info.rank: node_info for node_info in ordered}
    filled = sorted(_fill(plan, ordered), key=lambda pair: pair[0])
    if len(filled) < len(plan.bundles):
        raise RendezvousError(_shortage(plan, ordered, filled))
    placements = tuple(placement for rank, bundle in filled for placement in bundle_placements(bundle, by_rank[rank]))
    assigned = {rank for rank, _ in filled}
    spares = tuple(node for node in ordered if node.rank not in assigned and _is_healthy(node))
    return World(
        run_id=run_id,
        attempt=attempt,
        epoch=epoch,
        leader=leader,
        secret=secret,
        placements=placements,
        spares=spares,
    )


def check_world(world: World, plan: Plan, node_info: NodeInfo) -> None:
    """Raise `RendezvousError` unless the node's rank got one whole bundle, with ports and GPUs of the node."""
    if world.attempt != node_info.attempt:
        raise RendezvousError(
            f"rank {node_info.rank} is of attempt {node_info.attempt}, the world of attempt {world.attempt}"
        )
    mine = world.of_rank(node_info.rank)
    if not mine:
        return
    assigned = [(p.role, p.index, len(p.ports), len(p.gpus)) for p in mine]
    first = mine[0].role, mine[0].index
    # Of thousands of bundles, one is compared in full.
    bundle = next((b for b in plan.bundles if (b.roles[0].role, b.roles[0].index) == first), None)
    if bundle is None or [_needs(process) for process in bundle.roles] != assigned:
        names = ", ".join(p.name for p in mine)
        raise RendezvousError(
            f"rank {node_info.rank} got {names}, which is no bundle of the plan; submit the run again"
        )
    _check_available(node_info, "port", [port for p in mine for port in p.ports], bundle.ports, node_info.ports)
    _check_available(node_info, "GPU", [gpu for p in mine for gpu in p.gpus], bundle.gpus, node_info.gpus)
    for p in mine:
        if p.address not in node_info.addresses:
            raise RendezvousError(f"rank {node_info.rank} got {p.name} at {p.address}, which is not its address")


def describe_plan(plan: Plan, without_gpus: int = 0) -> tuple[str, ...]:
    """One line per rank, such as `rank 0: redis.0, actor.0`, for an allocation of healthy nodes.

    All nodes are equal, except that the first `without_gpus` have no GPUs.
    """
    width = len(str(plan.ranks - 1))
    bundles = dict(_fill(plan, [_ideal_node(plan, rank, gpus=rank >= without_gpus) for rank in range(plan.ranks)]))
    lines = []
    for rank in range(plan.ranks):
        bundle = bundles.get(rank)
        roles = ", ".join(_describe_process(process) for process in bundle.roles) if bundle else "spare"
        lines.append(f"rank {rank:>{width}}: {roles}")
    return tuple(lines)


def _check_nodes(plan: Plan, node_infos: Sequence[NodeInfo], attempt: str) -> None:
    previous: NodeInfo | None = None
    for node_info in node_infos:
        if node_info.attempt != attempt:
            raise RendezvousError(
                f"the node record of rank {node_info.rank} is of attempt {node_info.attempt}, not {attempt}"
            )
        if not 0 <= node_info.rank < plan.ranks:
            raise RendezvousError(f"rank {node_info.rank} is outside the plan's {plan.ranks} ranks")
        if previous and previous.rank == node_info.rank:
            raise RendezvousError(
                f"rank {node_info.rank} has two node records, of {previous.hostname} and {node_info.hostname}"
            )
        previous = node_info


def _fill(plan: Plan, node_infos: Sequence[NodeInfo]) -> list[tuple[int, NodeBundle]]:
    """(rank, bundle) for every bundle that a node record can take."""
    free = [node_info for node_info in node_infos if _is_healthy(node_info)]
    filled = []
    # A node record that has the GPUs for a larger bundle has them for a smaller one, so the greedy order loses nothing.
    for bundle in sorted(plan.bundles, key=lambda bundle: -bundle.gpus):
        chosen = next((node_info for node_info in free if _shortfall(node_info, bundle) == ""), None)
        if chosen:
            free.remove(chosen)
            filled.append((chosen.rank, bundle))
    return filled


def _is_healthy(node_info: NodeInfo) -> bool:
    return bool(node_info.addresses) and not node_info.problems


def _shortfall(node_info: NodeInfo, bundle: NodeBundle) -> str:
    """The reason why a healthy node record cannot take a bundle; empty if it can."""
    if len(node_info.gpus) < bundle.gpus:
        return f"{len(node_info.gpus)} of {bundle.gpus} GPUs"
    if len(node_info.ports) < bundle.ports:
        return f"{len(node_info.ports)} of {bundle.ports} ports"
    return ""


def _needs(process: RoleProcess) -> tuple[RoleName, int, int, int]:
    return process.role, process.index, process.ports, process.gpus


def bundle_placements(bundle: NodeBundle, node_info: NodeInfo) -> Iterable[Placement]:
    """The placements of a bundle's processes on a node record's rank, with its ports and GPUs in order."""
    ports = iter(node_info.ports)
    for process, gpus in zip(bundle.roles, bundle.gpu_ranges(), strict=True):
        yield Placement(
            role=process.role,
            index=process.index,
            rank=node_info.rank,
            address=node_info.addresses[0],
            ports=tuple(next(ports) for _ in range(process.ports)),
            gpus=tuple(node_info.gpus[gpu] for gpu in gpus),
        )


def _shortage(plan: Plan, node_infos: Sequence[NodeInfo], filled: Sequence[tuple[int, NodeBundle]]) -> str:
    placed_ranks, placed_bundles = {rank for rank, _ in filled}, {bundle.name for _, bundle in filled}
    empty = [bundle for bundle in plan.bundles if bundle.name not in placed_bundles]
    by_rank = {node_info.rank: node_info for node_info in node_infos}
    reasons = [_unusable(by_rank.get(rank), rank, empty[0]) for rank in range(plan.ranks) if rank not in placed_ranks]
    shown = "; ".join(reasons[:8]) + (f"; and {len(reasons) - 8} more" if len(reasons) > 8 else "")
    names = ", ".join(bundle.name for bundle in empty[:4]) + (f" and {len(empty) - 4} more" if len(empty) > 4 else "")
    spares = plan.spare_nodes + len(empty)
    return f"no rank is left for {names}: {shown}; fix these nodes, exclude them, or set resources.spare_nodes={spares}"


def _unusable(node_info: NodeInfo | None, rank: int, bundle: NodeBundle) -> str:
    if node_info is None:
        return f"rank {rank}: no node record"
    reason = (
        ", ".join(node_info.problems) or ("" if node_info.addresses else "no address") or _shortfall(node_info, bundle)
    )
    return f"rank {rank} ({node_info.hostname}): {reason}"


def _check_available(node_info: NodeInfo, what: str, assigned: Sequence[int], needed: int, held: Sequence[int]) -> None:
    """Raise `RendezvousError` unless the node holds the assigned ports or GPUs, and `needed` of them are distinct."""
    if len(set(assigned)) != needed or not set(assigned) <= set(held):
        raise RendezvousError(
            f"rank {node_info.rank} got {what}s {list(assigned)} and holds {list(held)}; submit the run again"
        )


def _ideal_node(plan: Plan, rank: int, *, gpus: bool) -> NodeInfo:
    count, ports = max(bundle.gpus for bundle in plan.bundles) if gpus else 0, plan.ports_per_rank
    return NodeInfo(
        rank=rank,
        attempt="",
        hostname="",
        pid=0,
        boot="",
        addresses=("",),
        probe_port=0,
        ports=tuple(range(ports)),
        gpus=tuple(range(count)),
    )


def _describe_process(process: RoleProcess) -> str:
    if not process.gpus:
        return process.name
    shared, plural = "shared " if process.shared_gpu_offset else "", "s" if process.gpus > 1 else ""
    return f"{process.name} ({process.gpus} {shared}GPU{plural})"
