"""The prompt of each position: weights that are exact after each round, and epochs of each task."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.environments import Prompt, Task, TaskOptions, user_prompt
from pipeline.environments.task_protocol import TaskPart
from pipeline.rollout.prompt_order import PromptOrder
from pipeline.transport.ledger import prompt_at


class Parted(Task):
    """A task of these parts; none: alone."""

    name = "parted"

    def __init__(self, *parts: TaskPart, size: int = 0) -> None:
        super().__init__(TaskOptions(), 0)
        self._parts, self._size = parts, size

    @property
    def parts(self) -> tuple[TaskPart, ...]:
        return self._parts

    def __len__(self) -> int:
        return self._size or sum(part.size for part in self._parts)

    def prompt(self, index: int) -> Prompt:
        return user_prompt(str(index))

    def held_out(self) -> Any:
        return []

    def reward(self, prompt: Prompt, text: str) -> float:
        return 0.0


TWO = Parted(TaskPart("sums", 2, 5), TaskPart("words", 1, 100))


def test_a_task_alone_is_visited_in_the_ledgers_order() -> None:
    order = PromptOrder(Parted(size=10), seed=7)
    assert [order.at(position) for position in range(25)] == [prompt_at(position, 10, 7) for position in range(25)]
    assert order.label(3) == ""


def test_each_round_has_the_shares_and_each_task_its_own_epochs() -> None:
    order = PromptOrder(TWO, seed=7)
    prompts = [order.at(position) for position in range(3 * 50)]
    for start in range(0, 150, 3):
        assert Counter(map(order.label, prompts[start : start + 3])) == {"sums": 2, "words": 1}
    sums = [prompt for prompt in prompts if order.label(prompt) == "sums"]
    assert Counter(sums) == dict.fromkeys(range(5), 20), "100 turns are 20 epochs of 5 prompts"
    words = [prompt for prompt in prompts if order.label(prompt) == "words"]
    assert len(set(words)) == len(words) == 50
    assert set(map(order.label, range(5, 105))) == {"words"}


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 1 << 40),
    st.integers(0, 10_000),
)
def test_every_turn_of_every_task_comes_once_wherever_a_run_resumes(
    parts: list[tuple[int, int]], seed: int, resumed: int
) -> None:
    task = Parted(*(TaskPart(f"t{number}", share, size) for number, (share, size) in enumerate(parts)))
    length = sum(share for share, _ in parts)
    whole, again = PromptOrder(task, seed), PromptOrder(task, seed)
    first = resumed // length * length
    turns = [whole.turn(position) for position in range(first, first + 2 * length)]
    expected = Counter(
        (number, first // length * share + turn) for number, (share, _) in enumerate(parts) for turn in range(2 * share)
    )
    assert Counter(turns) == expected
    positions = [*range(first, first + 20), 3, 0]  # issued again, in another order
    assert [whole.at(position) for position in reversed(positions)] == [again.at(position) for position in positions][
        ::-1
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds_give_other_orders_and_tasks_of_one_size_do_not_run_in_step(seed: int) -> None:
    twins = Parted(TaskPart("a", 1, 50), TaskPart("b", 1, 50))
    order, other = PromptOrder(twins, seed), PromptOrder(twins, seed + 1)
    prompts = [order.at(position) for position in range(100)]
    assert prompts != [other.at(position) for position in range(100)]
    first = [prompt for prompt in prompts if prompt < 50]
    second = [prompt - 50 for prompt in prompts if prompt >= 50]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
