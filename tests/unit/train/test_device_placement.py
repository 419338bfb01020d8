"""The plan of what is on the device: what an operation needs, and with colocated models nothing else."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.train.controller.device_placement import (
    REQUIREMENTS,
    Move,
    Purpose,
    Requirements,
    Residence,
    State,
    empty_device,
    plan_moves,
    states_after,
    states_of_new,
    without,
)

NAMES = ("policy", "critic", "reference")
HOLDINGS: list[Residence] = [("policy", "model"), ("policy", "optimizer"), ("critic", "model"), ("critic", "optimizer")]
HOLDINGS += [("reference", "model")]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
all_states = st.fixed_dictionaries({held: st.sampled_from(get_args(State)) for held in HOLDINGS})
all_needs = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(PURPOSES), max_size=3)


def needed(needs: Requirements) -> set[Residence]:
    return {(name, part) for name, purpose in needs.items() for part in REQUIREMENTS[purpose]} & set(HOLDINGS)


def test_every_purpose_is_in_the_table() -> None:
    assert set(REQUIREMENTS) == set(PURPOSES)


@given(all_states, all_needs, st.booleans())
def test_what_an_operation_needs_is_on_the_device(
    states: dict[Residence, State], needs: Requirements, colocated: bool
) -> None:
    found = states_after(states, plan_moves(states, needs, colocated))
    assert all(found[held] == "device" for held in needed(needs))


@given(all_states, all_needs.filter(needed))
def test_colocated_models_have_nothing_else_on_the_device(states: dict[Residence, State], needs: Requirements) -> None:
    found = states_after(states, plan_moves(states, needs, colocated=True))
    assert {held for held, state in found.items() if state != "offloaded"} == needed(needs)


@given(all_states, all_needs)
def test_models_that_are_not_colocated_never_leave(states: dict[Residence, State], needs: Requirements) -> None:
    assert all(move.to == "device" for move in plan_moves(states, needs, colocated=False))


@given(all_states, all_needs, st.booleans())
def test_a_plan_moves_only_what_is_not_where_it_belongs(
    states: dict[Residence, State], needs: Requirements, colocated: bool
) -> None:
    moves = plan_moves(states, needs, colocated)
    assert all(states[move.name, move.part] != move.to for move in moves)
    assert plan_moves(states_after(states, moves), needs, colocated) == ()


@given(all_states, all_needs, st.booleans())
def test_room_is_made_before_anything_comes(
    states: dict[Residence, State], needs: Requirements, colocated: bool
) -> None:
    going = [move.to == "device" for move in plan_moves(states, needs, colocated)]
    assert going == sorted(going)


@pytest.mark.parametrize("purpose", [name for name, parts in REQUIREMENTS.items() if not parts])
def test_an_operation_that_needs_nothing_moves_nothing(purpose: Purpose) -> None:
    assert plan_moves(dict.fromkeys(HOLDINGS, "device"), {"policy": purpose}, colocated=True) == ()


@given(all_states)
def test_an_emptied_device_holds_nothing(states: dict[Residence, State]) -> None:
    assert set(states_after(states, empty_device(states)).values()) == {"offloaded"}


def test_a_step_has_the_optimizer_on_the_device_too() -> None:
    states: dict[Residence, State] = dict.fromkeys(HOLDINGS, "offloaded")
    states = states_after(states, plan_moves(states, {"policy": "forward_backward"}, colocated=True))
    assert plan_moves(states, {"policy": "optim_step"}, colocated=True) == (Move("policy", "optimizer", "device"),)


def test_a_new_model_evicts_the_others_and_has_nothing_to_bring() -> None:
    states = states_of_new("policy", trained=True)
    moves = plan_moves(states, {"critic": "init_model"}, colocated=True)
    assert moves == (Move("policy", "model", "offloaded"), Move("policy", "optimizer", "offloaded"))


def test_a_move_that_may_not_have_ended_is_made_again_in_any_direction() -> None:
    move = Move("policy", "model", "device")
    states = states_after(states_of_new("policy", trained=False), [move], known=False)
    assert plan_moves(states, {"policy": "forward"}, colocated=False) == (move,)
    assert empty_device(states) == (Move("policy", "model", "offloaded"),)


def test_a_model_without_an_optimizer_moves_without_one() -> None:
    assert list(states_of_new("reference", trained=False)) == [("reference", "model")]


def test_a_removed_model_has_no_states() -> None:
    states = states_of_new("policy", trained=True) | states_of_new("critic", trained=True)
    assert without(states, "policy") == states_of_new("critic", trained=True)
