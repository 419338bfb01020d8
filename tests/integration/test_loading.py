"""Real ranks read a model by shards and write it together."""

from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.worker_spec import ModelSpec
from tests.support.ranks.forked_ranks import run_ranks
from tests.support.ranks.worker_cases import (
    MICRO_BATCHES,
    OPTIM,
    assert_equal,
    parameters,
    spec_of,
    train,
    world,
    write_config,
)

pytestmark = pytest.mark.integration


def test_a_mixture_of_experts_is_read_by_shards_and_written_as_it_was(tmp_path: Path) -> None:
    run_ranks(2, read_train_and_write, tmp_path / "model")


def read_train_and_write(rank: int, path: Path) -> None:
    """Three experts, which two ranks cannot share evenly, and which are one parameter in memory."""
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with world() as mesh:
        source = path.parent / "experts"
        if rank == 0:
            write_config(source, model_type="qwen3_moe", **experts)
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)
        dist.barrier()
        given = spec_of(source)
        read = ModelSpec("policy", given.model.model_copy(update={"init": "pretrained"}), OPTIM)
        one, truth = ModelWorker(read, mesh), load_file(source / "model.safetensors")
        assert_equal(parameters(one), truth)
        one.save_hf_model(path.parent / "out")
        assert_equal(load_file(path.parent / "out" / "model.safetensors"), truth)
        answers = one.forward(MICRO_BATCHES, True)
        train(one)
        assert any((new != old).any() for new, old in zip(one.forward(MICRO_BATCHES, True), answers, strict=True))
