"""The placement of models' parts on the device or in host memory, before each operation.

Owns the table of the parts that each operation needs on the device, and the plan of moves. Promises that after the
moves of a plan every needed part is on the device and, when models are colocated, no other; and that an operation
without needs moves nothing. Pure: states and operations in, moves out. Must not know the transfer of bytes or the
number of ranks: all ranks are always in the same state.

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
"""The use of a model by an operation. An operation without any, such as `remove_model`, moves nothing."""
Target = Literal["device", "offloaded"]
State = Literal["device", "offloaded", "unknown"]
"""`unknown`: a move began, and not all ranks have reported its end. A plan always moves such a part; on a rank where it
is at the target already, the move does nothing."""
Residence = tuple[str, Part]
"""A part of a model, by the model's name."""
States = Mapping[Residence, State]
Requirements = Mapping[str, Purpose]
"""An operation's use of each model, by name."""

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
"""The parts of a model that must be on the device for each purpose. Gradients belong to the part `model`."""


@dataclass(frozen=True)
class Move:
    """The move of a part of a model to the device, or to host memory."""

    name: str
    part: Part
    to: Target


def plan_moves(states: States, needs: Requirements, colocated: bool) -> tuple[Move, ...]:
    """The moves before an operation: first those off the device, so that there is memory for the others.

    Parts leave the device only if models are `colocated`. Parts without a state do not move: of a model that is not
    created yet, or the optimizer of a frozen one.
    """
    needed = {(name, part) for name, purpose in needs.items() for part in REQUIREMENTS[purpose]}
    evicted = [residence for residence in states if residence not in needed] if colocated and needed else []
    loaded = [residence for residence in states if residence in needed]
    return _moves(states, evicted, "offloaded") + _moves(states, loaded, "device")


def empty_device(states: States) -> tuple[Move, ...]:
    """The moves that offload every part."""
    return _moves(states, states, "offloaded")


def states_after(states: States, moves: Iterable[Move], *, known: bool = True) -> dict[Residence, State]:
    """The states after these moves; with `known=False`, during them: `unknown` for every moved part."""
    moved: dict[Residence, State] = {(move.name, move.part): move.to if known else "unknown" for move in moves}
    return {**states, **moved}


def states_of_new(name: str, trained: bool) -> dict[Residence, State]:
    """The states of a new model."""
    parts: tuple[Part, ...] = ("model", "optimizer") if trained else ("model",)
    return {(name, part): "device" for part in parts}


def without(states: States, name: str) -> dict[Residence, State]:
    """The states without those of a model."""
    return {residence: state for residence, state in states.items() if residence[0] != name}


def _moves(states: States, residences: Iterable[Residence], to: Target) -> tuple[Move, ...]:
    return tuple(Move(name, part, to) for name, part in residences if states[name, part] != to)
