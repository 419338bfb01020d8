"""Recipes of tinker-cookbook, unmodified and offline, that learn on a server of ours: trials.

`tests.integration.tinker_recipes` runs each recipe to its end and makes the table of docs/tinker.md.

The cookbook needs an older transformers than we do, so it runs in an environment of its own, which `TINKER_COOKBOOK`
names the Python of:

    python -m venv cb && cb/bin/pip install torch==2.13.0 'transformers<=5.5.4' tinker==0.38.0
    cb/bin/pip install --no-deps tinker-cookbook==0.6.1
    cb/bin/pip install aiohttp blobfile chz cloudpickle datasets pillow pyrage rich termcolor tiktoken \
        tml-renderers sympy pylatexenc math-verify textarena
    TINKER_COOKBOOK=cb/bin/python python -m pytest -m trial tests/integration/test_tinker_cookbook.py
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

import pytest

from tests.integration.tinker_recipes import RECIPES, run_recipe, serving, write_room

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> str:
    if not os.environ.get("TINKER_COOKBOOK"):
        pytest.skip("TINKER_COOKBOOK names no Python with tinker-cookbook")
    return os.environ["TINKER_COOKBOOK"]


@pytest.fixture(scope="module")
def room(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("cookbook")
    write_room(room)
    return room


@pytest.fixture(scope="module")
def client(room: Path) -> Iterator[Mapping[str, str]]:
    with serving(room) as made:
        yield made


def rows_of(name: str, python: str, room: Path, client: Mapping[str, str], **given: object) -> list[float]:
    """What the recipe's metric was at each step."""
    recipe = RECIPES[name]
    recipe = dataclasses.replace(recipe, given={**recipe.given, **given})
    return [row[recipe.shows] for row in run_recipe(recipe, python, room, client) if recipe.shows in row]


def test_supervised_training_lowers_its_loss(python: str, room: Path, client: Mapping[str, str]) -> None:
    losses = rows_of("sl_loop", python, room, client, learning_rate=1e-2)
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_arithmetic_raises_its_reward(python: str, room: Path, client: Mapping[str, str]) -> None:
    """A model of random weights learns to end its answer in time: 0.1 of the reward."""
    options = {"group_size": 16, "groups_per_batch": 16, "max_steps": 20, "learning_rate": 1e-2}
    rewards = rows_of("math_rl, arithmetic", python, room, client, **options)
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.02, rewards
