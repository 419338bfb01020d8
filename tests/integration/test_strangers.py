"""A process that does not hold the world's secret, among those that do."""

import pytest

from pipeline.errors import SignatureError
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration
PATIENCE = Deadlines(operation=20, control=20, checkpoint=20, grace=1)


def test_a_rank_of_another_secret_meets_nobody() -> None:
    run_ranks(2, a_rank_that_is_refused)


def a_rank_that_is_refused(rank: int) -> None:
    with pytest.raises(SignatureError, match="carries no signature with this world's secret"):
        run_controller_or_worker(
            lambda dispatch: None, Budget(64), patience=PATIENCE, secret=f"the secret of rank {rank}"
        )


def test_ranks_of_one_secret_run_what_the_controller_orders() -> None:
    run_ranks(2, a_rank_that_serves)


def a_rank_that_serves(rank: int) -> None:
    answers: list[list[int]] = []

    def lead(dispatch: RankGroup) -> None:
        answers.append(dispatch.run_on_all_models(number_of))

    run_controller_or_worker(lead, Budget(64), patience=PATIENCE, secret="of all")
    assert answers == ([] if rank else [[0, 1]])


def number_of(site: RankState) -> int:
    return site.rank
