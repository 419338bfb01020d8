"""Which parts of which models are on the device.

Owns the one table of what has to be on the device for what, and the plan that gets it there. Promises that after the
moves of a plan everything that the operation needs is on the device and, when models are colocated, nothing else; and
that an operation which needs nothing moves nothing. Pure: states and operations go in, moves come out. Must not know
how bytes move, nor how many ranks there are: all ranks are always in one state.

    moves = plan_moves(states, {"policy": "optim_step"}, colocated=True)
    states = states_after(states, moves)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pipeline.train.model.cpu_offload import Part

Purpose = Literal[
    "init_model",
    "forward",
    "forward_backward",
    "optim_step",
    "set_lr",
    "reset_optimizer",
    "copy_parameters",
    "prepare_weight_sync",
    "save_hf_model",
    "save_checkpoint",
    "load_checkpoint",
    "run_on_ranks",
]
"""Where an operation wants a model. An operation that wants none anywhere, such as `remove_model`, moves nothing."""
Place = Literal["device", "offloaded"]
State = Literal["device", "offloaded", "unknown"]
"""`unknown`: a move began, and not all ranks said that it ended. A plan moves such a part whichever way it has to go,
which does nothing where it is there already."""
Residence = tuple[str, Part]
"""A part of a model, by the model's name."""
States = Mapping[Residence, State]
Requirements = Mapping[str, Purpose]
"""Where an operation wants each model, by name."""

_NOTHING: Final[frozenset[Part]] = frozenset()
_MODEL: Final[frozenset[Part]] = frozenset({"model"})
_BOTH: Final[frozenset[Part]] = frozenset({"model", "optimizer"})
REQUIREMENTS: Final[Mapping[Purpose, frozenset[Part]]] = {
    "init_model": _BOTH,
    "forward": _MODEL,
    "forward_backward": _MODEL,
    "optim_step": _BOTH,
    "set_lr": _NOTHING,
    "reset_optimizer": _BOTH,
    "copy_parameters": _MODEL,
    "prepare_weight_sync": _MODEL,
    "save_hf_model": _MODEL,
    "save_checkpoint": _BOTH,
    "load_checkpoint": _BOTH,
    "run_on_ranks": _BOTH,
}
"""The parts of a model that have to be on the device for each purpose. Gradients are with the model."""


@dataclass(frozen=True)
class Move:
    """A part of a model goes to the device, or away from it."""

    name: str
    part: Part
    to: Place


def plan_moves(states: States, needs: Requirements, colocated: bool) -> tuple[Move, ...]:
    """The moves before an operation: first what leaves, then what comes, so that there is room.

    Only colocated models leave. What has no state, a model that is yet to be made or one that has no optimizer, does
    not move.
    """
    needed = {(name, part) for name, purpose in needs.items() for part in REQUIREMENTS[purpose]}
    leaving = [held for held in states if held not in needed] if colocated and needed else []
    coming = [held for held in states if held in needed]
    return _moves(states, leaving, "offloaded") + _moves(states, coming, "device")


def empty_device(states: States) -> tuple[Move, ...]:
    """The moves after which nothing is on the device."""
    return _moves(states, states, "offloaded")


def states_after(states: States, moves: Iterable[Move], *, known: bool = True) -> dict[Residence, State]:
    """The states when these moves are over; with `known=False`, while that is not certain."""
    moved: dict[Residence, State] = {(move.name, move.part): move.to if known else "unknown" for move in moves}
    return {**states, **moved}


def states_of_new(name: str, trained: bool) -> dict[Residence, State]:
    """The states of a new model."""
    parts: tuple[Part, ...] = ("model", "optimizer") if trained else ("model",)
    return {(name, part): "device" for part in parts}


def without(states: States, name: str) -> dict[Residence, State]:
    """The states without those of a model."""
    return {held: state for held, state in states.items() if held[0] != name}


def _moves(states: States, held: Iterable[Residence], to: Place) -> tuple[Move, ...]:
    return tuple(Move(name, part, to) for name, part in held if states[name, part] != to)
