"""When a trainer is warmed up, and with which rows; with a dispatch that only remembers."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import RunConfig
from pipeline.tinker.tinker_records import Adapter
from pipeline.train.batching.packing import Budget, group_by_prefix, split_rows
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp, shapes
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.loss_specs import SFT
from pipeline.train.model.model_flops import ModelFlops
from pipeline.train.model.model_worker import ModelInfo
from pipeline.train.service.client_models import ServedModels
from tests.fakes.configs import make_config

BUDGET = 4096
sizes = st.integers(48, 40_000)


class Ranks:
    """What was asked for, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.batches: list[Batch] = []
        self.models = dict.fromkeys(("policy", "reference"), ModelInfo(1, 17, ModelFlops()))
        self.budget = Budget(BUDGET, shared=False)

    def forward_backward(self, name: str, batch: Batch, *_: object, **__: object) -> None:
        self.asked.append(f"train {name}")
        self.batches.append(batch)

    def forward(self, name: str, batch: Batch) -> None:
        self.asked.append(f"ask {name}")

    def run_on_ranks(self, name: str, function: Callable[..., object], *_: object, **__: object) -> None:
        self.asked.append(f"{function.__name__} {name}")

    def init_model(self, name: str, spec: object) -> None:
        self.models[name] = ModelInfo(1, 17, ModelFlops())


def a_config(mesh: dict[str, int] | None = None, **resources: Any) -> RunConfig:
    return make_config(
        model={"path": "tiny_qwen3", "init": "random", "max_length": 512},
        training={
            "compile": True,
            "micro_batch_tokens": BUDGET,
            "steps": 1,
            "prompts_per_step": 16,
            "mesh": mesh or {},
        },
        resources=resources,
    )


def warm_up(ranks: Ranks, config: RunConfig, pulse: Callable[[], None] = lambda: None) -> WarmUp:
    return WarmUp(config, cast(RankGroup, ranks), pulse)


@given(tokens=sizes, longest=sizes, most=st.one_of(st.none(), st.integers(1, 40)))
def test_every_micro_batch_is_one_that_could_come_and_the_second_is_as_large_as_any(
    tokens: int, longest: int, most: int | None
) -> None:
    longest = min(longest, tokens)
    found = shapes(tokens, longest, most)
    for rows, length in found:
        assert 0 < length <= longest
        assert rows * length <= tokens
        assert rows <= (most or tokens)
    rows, length = found[1]
    assert rows * length >= min(tokens * 0.8, (most or tokens) * (longest - 2))
    assert found[-1][0] == 1


@given(tokens=sizes, longest=sizes)
def test_no_two_sizes_of_the_micro_batch_that_is_compiled_for_all_lengths_are_equal(tokens: int, longest: int) -> None:
    (few, short), (rows, length), _ = shapes(tokens, min(longest, tokens))
    of_full = [rows, rows + 1, length, rows * length]
    assert len(set(of_full)) == len(of_full)
    assert not any(one == other for one, other in zip((few, few + 1, short, few * short), of_full, strict=True))


def test_each_rank_gets_one_micro_batch_of_the_whole_budget() -> None:
    config, ranks = a_config(trainer={"processes": 2}), Ranks()
    warm_up(ranks, config).run({"policy": SFT})
    shares = [split_rows(batch.lengths, 2, ranks.budget) for batch in ranks.batches]
    assert all(len(bins) == 1 for share in shares for bins in share)
    assert ranks.batches[1].lengths == [512] * 16


def test_ranks_that_share_lines_get_micro_batches_of_the_budget_of_all_of_them() -> None:
    config, ranks = a_config(trainer={"processes": 4}, mesh={"cp": 2}), Ranks()
    ranks.budget = Budget(config.training.micro_batch_budget, shared=False)
    warm_up(ranks, config).run({"policy": SFT})
    shares = [split_rows(batch.lengths, 2, ranks.budget) for batch in ranks.batches]
    assert all(len(bins) == 1 for share in shares for bins in share)
    assert ranks.batches[1].lengths == [512] * 32


def test_where_rows_may_share_two_more_micro_batches_have_rows_that_begin_alike() -> None:
    config, ranks = a_config(trainer={"processes": 2}), Ranks()
    ranks.budget = Budget(BUDGET)
    warm_up(ranks, config).run({"policy": SFT})
    kin = [group_by_prefix([row.tokens for row in batch.rows]) for batch in ranks.batches]
    assert [[len(each.rows) for each in one] for one in kin[3:]] == [[2, 2], [8, 8]]
    assert all(len(each.rows) == 1 for one in kin[:3] for each in one)
    for batch, one in zip(ranks.batches, kin, strict=True):
        assert all(len(bins) == 1 for bins in split_rows(batch.lengths, 2, ranks.budget, one))


def test_models_are_trained_without_a_trace_and_then_asked_one_after_the_other() -> None:
    warm_up(ranks := Ranks(), a_config()).run({"policy": SFT}, ["policy", "reference"])
    assert ranks.asked == 3 * ["train policy", "drop_gradients policy"] + 3 * ["ask policy"] + 3 * ["ask reference"]


def test_nothing_is_run_where_nothing_is_compiled() -> None:
    shown: list[str] = []

    @contextmanager
    def phase() -> Any:
        yield shown.append("warming up")

    WarmUp(make_config(), cast(RankGroup, ranks := Ranks()), lambda: None, phase).run({"policy": SFT}, ["policy"])
    assert ranks.asked == shown == []


def test_an_attempt_that_is_ending_waits_for_one_pass_at_most() -> None:
    ranks = Ranks()

    def pulse() -> None:
        if ranks.asked:
            raise Interrupted("draining by agent-0")

    with pytest.raises(Interrupted):
        warm_up(ranks, a_config(), pulse).run({"policy": SFT}, ["reference"])
    assert ranks.asked == ["train policy", "drop_gradients policy"]


def test_a_place_for_models_of_clients_is_warmed_up_once_with_the_whole_budget(tmp_path: Path) -> None:
    plain, ranks = a_config(), Ranks()
    config = plain.model_copy(update={"serve": plain.serve.model_copy(update={"enabled": True})})
    served = ServedModels(cast(RankGroup, ranks), config, tmp_path, "one")
    for rank in (4, 4, 8):
        name = cast(Any, served)._slot(Adapter(rank)).name
        served.warm_up(warm_up(ranks, config))
        assert ranks.asked[-4:-2] == [f"drop_gradients {name}", f"ask {name}"]
    assert len(ranks.asked) == 2 * (2 + 1) * 3
    assert sum(ranks.batches[1].lengths) > 0.9 * BUDGET
