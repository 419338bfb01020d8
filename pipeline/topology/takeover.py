"""The takeover of a lost node's roles by a spare node.

Owns the third decision about placements, after `make_plan` and `assign`: the assignment after the loss of a rank. Pure:
no I/O, no clock.

    world = take_over(world, 2, "its agent was killed by SIGKILL", limit=config.recovery.nodes)
"""

import msgspec

from pipeline.errors import TakeoverError
from pipeline.topology.plan import NodeInfo, NodeLoss, Placement, World


def take_over(world: World, lost: int, cause: str, *, limit: int) -> World:
    """The next revision of the world, without the rank `lost`; a spare has its roles, if it had some.

    `limit` is the number of nodes that may be replaced in an attempt. `TakeoverError` reports why the attempt cannot
    continue without the rank.
    """
    moved = world.of_rank(lost)
    spare = _spare_for(world, lost, moved, limit) if moved else None
    placements = {placement.name: placement for placement in world.placements}
    if spare is not None:
        placements |= {placement.name: placement for placement in _placed_on(spare, moved)}
    heir = spare.rank if spare is not None else next(iter(placements.values())).rank
    return msgspec.structs.replace(
        world,
        leader=heir if world.leader == lost else world.leader,
        placements=tuple(placements.values()),
        spares=tuple(node for node in world.spares if node.rank != lost and node is not spare),
        losses=(*world.losses, NodeLoss(rank=lost, spare=spare.rank if spare else None, cause=cause)),
    )


def _spare_for(world: World, lost: int, moved: tuple[Placement, ...], limit: int) -> NodeInfo:
    """The lowest spare rank that can have these roles."""
    names = ", ".join(placement.name for placement in moved)
    if (used := sum(loss.spare is not None for loss in world.losses)) >= limit:
        raise TakeoverError(f"{names}: {used} nodes were replaced, the limit of recovery.nodes={limit}")
    roles = {placement.role for placement in moved}
    if "redis" in roles:
        raise TakeoverError(f"{names}: the clients of Redis know one address; the next attempt copies its data")
    if "trainer" in roles and len(world.of_role("trainer")) > 1:
        raise TakeoverError(f"{names}: the trainer spans several nodes, which only restart together")
    for node in world.spares:
        if node.rank != lost and len(node.gpus) >= len(_gpus(moved)) and len(node.ports) >= len(_ports(moved)):
            return node
    raise TakeoverError(f"{names}: no spare node with enough GPUs and ports is left (resources.spare_nodes)")


def _placed_on(node: NodeInfo, moved: tuple[Placement, ...]) -> list[Placement]:
    """The placements with the node's address, ports and GPUs; roles that shared a GPU share one again."""
    ports = dict(zip(_ports(moved), node.ports, strict=False))
    gpus = dict(zip(_gpus(moved), node.gpus, strict=False))
    return [
        msgspec.structs.replace(
            placement,
            rank=node.rank,
            address=node.addresses[0],
            ports=tuple(ports[port] for port in placement.ports),
            gpus=tuple(gpus[gpu] for gpu in placement.gpus),
        )
        for placement in moved
    ]


def _ports(moved: tuple[Placement, ...]) -> list[int]:
    return [port for placement in moved for port in placement.ports]


def _gpus(moved: tuple[Placement, ...]) -> list[int]:
    """The distinct GPUs of the roles, in order."""
    return list(dict.fromkeys(gpu for placement in moved for gpu in placement.gpus))
