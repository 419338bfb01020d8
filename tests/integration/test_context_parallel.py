"""Attention of a packed line that real ranks share is that of one rank."""

import pytest

from tests.support.ranks import context_ranks
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_line_attend_as_one_rank_does(ranks: int) -> None:
    run_ranks(ranks, context_ranks.compare_attention)
