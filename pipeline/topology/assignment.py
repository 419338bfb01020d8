"""Who gets which seat of the plan.

Owns the second decision of the rendezvous: `assign`, a pure function of the plan and the ranks' cards, which the leader
publishes and every rank checks for itself with `check_world`. No I/O, no clock, no randomness.
"""

from collections.abc import Iterable, Sequence

from pipeline.errors import RendezvousError
from pipeline.topology.plan import NodeBundle, NodeInfo, Placement, Plan, RoleName, RoleProcess, World


def assign(
    plan: Plan, cards: Iterable[NodeInfo], *, run_id: str, attempt: str, epoch: int, leader: int, secret: str
) -> World:
    """Give every seat of the plan to a card, deterministically: any order of the same cards gives the same world.

    Seats that need most GPUs choose first, in the order of the plan, each the lowest healthy rank that has its GPUs and
    ports. A role gets its card's first address. `RendezvousError` names the ranks that cannot be used, why, and how to
    mend it.
    """
    dealt = sorted(cards, key=lambda card: card.rank)
    _check_nodes(plan, dealt, attempt)
    by_rank = {card.rank: card for card in dealt}
    filled = sorted(_fill(plan, dealt), key=lambda pair: pair[0])
    if len(filled) < len(plan.bundles):
        raise RendezvousError(_shortage(plan, dealt, filled))
    placements = tuple(place for rank, seat in filled for place in _place(seat, by_rank[rank]))
    return World(run_id=run_id, attempt=attempt, epoch=epoch, leader=leader, secret=secret, placements=placements)


def check_world(world: World, plan: Plan, card: NodeInfo) -> None:
    """Raise `RendezvousError` unless the card's rank got a seat of the plan, whole, with what the card holds."""
    if world.attempt != card.attempt:
        raise RendezvousError(f"rank {card.rank} is of attempt {card.attempt}, the world of attempt {world.attempt}")
    mine = world.of_rank(card.rank)
    if not mine:
        return
    given = [(p.role, p.index, len(p.ports), len(p.gpus)) for p in mine]
    seat = next((seat for seat in plan.bundles if [_needs(slot) for slot in seat.roles] == given), None)
    if seat is None:
        names = ", ".join(place.name for place in mine)
        raise RendezvousError(f"rank {card.rank} got {names}, which is no seat of the plan; submit the run again")
    _check_available(card, "port", [port for place in mine for port in place.ports], seat.ports, card.ports)
    _check_available(card, "GPU", [gpu for place in mine for gpu in place.gpus], seat.gpus, card.gpus)
    for place in mine:
        if place.address not in card.addresses:
            raise RendezvousError(f"rank {card.rank} got {place.name} at {place.address}, which is not its address")


def describe_plan(plan: Plan, without_gpus: int = 0) -> tuple[str, ...]:
    """One line a rank, as the plan is filled when all nodes are healthy: `rank 0: redis.0, actor.0`.

    All nodes are alike, but for so many at the beginning that have no GPUs.
    """
    width = len(str(plan.ranks - 1))
    seats = dict(_fill(plan, [_ideal_node(plan, rank, gpus=rank >= without_gpus) for rank in range(plan.ranks)]))
    lines = []
    for rank in range(plan.ranks):
        seat = seats.get(rank)
        roles = ", ".join(_describe_slot(slot) for slot in seat.roles) if seat else "spare"
        lines.append(f"rank {rank:>{width}}: {roles}")
    return tuple(lines)


def _check_nodes(plan: Plan, cards: Sequence[NodeInfo], attempt: str) -> None:
    previous: NodeInfo | None = None
    for card in cards:
        if card.attempt != attempt:
            raise RendezvousError(f"the card of rank {card.rank} is of attempt {card.attempt}, not {attempt}")
        if not 0 <= card.rank < plan.ranks:
            raise RendezvousError(f"rank {card.rank} is outside the plan's {plan.ranks} ranks")
        if previous and previous.rank == card.rank:
            raise RendezvousError(f"rank {card.rank} has two cards, of {previous.hostname} and {card.hostname}")
        previous = card


def _fill(plan: Plan, cards: Sequence[NodeInfo]) -> list[tuple[int, NodeBundle]]:
    """(rank, seat) for every seat that a card can take.

    Whoever satisfies a greater need satisfies every smaller one, so serving the greatest need first loses nothing.
    """
    free = [card for card in cards if card.addresses and not card.problems]
    filled = []
    for seat in sorted(plan.bundles, key=lambda seat: -seat.gpus):
        chosen = next((card for card in free if _shortfall(card, seat) == ""), None)
        if chosen:
            free.remove(chosen)
            filled.append((chosen.rank, seat))
    return filled


def _shortfall(card: NodeInfo, seat: NodeBundle) -> str:
    """Why a healthy card cannot take a seat; empty when it can."""
    if len(card.gpus) < seat.gpus:
        return f"{len(card.gpus)} of {seat.gpus} GPUs"
    if len(card.ports) < seat.ports:
        return f"{len(card.ports)} of {seat.ports} ports"
    return ""


def _needs(slot: RoleProcess) -> tuple[RoleName, int, int, int]:
    return slot.role, slot.index, slot.ports, slot.gpus


def _place(seat: NodeBundle, card: NodeInfo) -> Iterable[Placement]:
    ports = iter(card.ports)
    for slot, places in zip(seat.roles, seat.gpu_places(), strict=True):
        yield Placement(
            role=slot.role,
            index=slot.index,
            rank=card.rank,
            address=card.addresses[0],
            ports=tuple(next(ports) for _ in range(slot.ports)),
            gpus=tuple(card.gpus[place] for place in places),
        )


def _shortage(plan: Plan, cards: Sequence[NodeInfo], filled: Sequence[tuple[int, NodeBundle]]) -> str:
    placed_ranks, placed_seats = {rank for rank, _ in filled}, {seat.name for _, seat in filled}
    empty = [seat for seat in plan.bundles if seat.name not in placed_seats]
    by_rank = {card.rank: card for card in cards}
    reasons = [_unusable(by_rank.get(rank), rank, empty[0]) for rank in range(plan.ranks) if rank not in placed_ranks]
    shown = "; ".join(reasons[:8]) + (f"; and {len(reasons) - 8} more" if len(reasons) > 8 else "")
    seats = ", ".join(seat.name for seat in empty[:4]) + (f" and {len(empty) - 4} more" if len(empty) > 4 else "")
    spares = plan.spare_nodes + len(empty)
    return (
        f"no rank is left for {seats}: {shown}; mend these nodes, exclude them, or set resources.spare_nodes={spares}"
    )


def _unusable(card: NodeInfo | None, rank: int, seat: NodeBundle) -> str:
    if card is None:
        return f"rank {rank}: no card"
    why = ", ".join(card.problems) or ("" if card.addresses else "no address") or _shortfall(card, seat)
    return f"rank {rank} ({card.hostname}): {why}"


def _check_available(card: NodeInfo, what: str, given: Sequence[int], needed: int, held: Sequence[int]) -> None:
    """Among what is `held`, and as many different ones as are needed."""
    if len(set(given)) != needed or not set(given) <= set(held):
        raise RendezvousError(
            f"rank {card.rank} got {what}s {list(given)} and holds {list(held)}; submit the run again"
        )


def _ideal_node(plan: Plan, rank: int, *, gpus: bool) -> NodeInfo:
    count, ports = max(seat.gpus for seat in plan.bundles) if gpus else 0, plan.ports_per_rank
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


def _describe_slot(slot: RoleProcess) -> str:
    if not slot.gpus:
        return slot.name
    return f"{slot.name} ({slot.gpus} {'shared ' if slot.shared_gpu_offset else ''}GPU{'s' if slot.gpus > 1 else ''})"
