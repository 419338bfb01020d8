"""Experts spread over two real ranks give each token what whole experts give it, whoever was chosen."""

import pytest
import torch

from tests.support.ranks import expert_ranks
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_spread_experts_are_those_of_one_rank_even_where_no_token_chose_one(dtype: torch.dtype) -> None:
    run_ranks(2, expert_ranks.work, dtype)
