"""The worker on one and on two real ranks, without the dispatch; what they do is in `worker_scenarios`."""

import json
from pathlib import Path

import pytest

from pipeline.config.schema import MomentType
from tests.support.ranks import moment_ranks
from tests.support.ranks.forked_ranks import run_ranks
from tests.support.ranks.worker_cases import write_config
from tests.support.ranks.worker_scenarios import ALONE, TOGETHER, Scenario, copies_of_a_shard_count_once

pytestmark = pytest.mark.integration


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model")


@pytest.mark.parametrize("scenario", ALONE, ids=lambda scenario: scenario.__name__)
def test_one_rank(scenario: Scenario, model: Path) -> None:
    run_ranks(1, scenario, model)


@pytest.mark.parametrize("scenario", TOGETHER, ids=lambda scenario: scenario.__name__)
def test_two_ranks(scenario: Scenario, model: Path) -> None:
    run_ranks(2, scenario, model)


def test_two_ranks_that_hold_the_same_shard_compute_what_one_does(model: Path) -> None:
    for ranks in (1, 2):
        run_ranks(ranks, copies_of_a_shard_count_once, model)
    alone, first, second = (
        json.loads((model.parent / f"seen{each}.json").read_text()) for each in ("0of1", "0of2", "1of2")
    )
    assert first == second == alone


@pytest.mark.parametrize(("moment_type", "share"), [("bfloat16", 0.5), ("float8", 0.32)])
def test_rounded_moments_survive_a_checkpoint(moment_type: MomentType, share: float, model: Path) -> None:
    run_ranks(1, moment_ranks.rounded_moments_survive_a_checkpoint, model, moment_type, share)


def test_float8_moments_of_two_ranks_go_bit_for_bit_to_one_and_to_three(model: Path) -> None:
    run_ranks(2, moment_ranks.train_and_save, model)
    for ranks in (1, 3):
        run_ranks(ranks, moment_ranks.load_and_compare, model)
