"""Meshes of four real ranks: replicas (HSDP), spread experts (EP) and shared lines (CP) train as one sharded model.

A trial loads the checkpoint of each mesh of 1, 2, 4 and 8 ranks on each of them:

    python -m pytest -m trial tests/integration/test_trainer_mesh.py
"""

from pathlib import Path

import pytest

from tests.support.models.tiny import write_tiny
from tests.support.oracle.cases import write_model, write_models
from tests.support.ranks import mesh_pairs, mesh_ranks
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration


def test_replicas_train_as_one_model_and_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, tied=False)
    run_ranks(4, mesh_ranks.work, model, tmp_path, seconds=240)


def test_spread_experts_train_as_whole_ones_and_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    run_ranks(4, mesh_ranks.work_of_mixture, write_mixture(tmp_path / "model"), tmp_path, seconds=240)


def test_balancing_biases_move_alike_on_all_ranks_and_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    write_models(tmp_path)
    run_ranks(4, mesh_ranks.work_of_biases, tmp_path / "glm", tmp_path, seconds=240)


def test_adapters_on_spread_experts_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    run_ranks(4, mesh_ranks.work_of_adapters, write_mixture(tmp_path / "model"), tmp_path, seconds=240)


def write_mixture(path: Path) -> Path:
    experts = {"num_experts": mesh_ranks.EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    large = {"initializer_range": 0.2, "tie_word_embeddings": False, "max_position_embeddings": 64}
    return write_tiny(path, 5, model_type="qwen3_moe", norm_topk_prob=True, **experts, **large)


def test_ranks_that_share_lines_train_as_one_model_and_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, tied=False)
    run_ranks(4, mesh_ranks.work_of_context, model, tmp_path, seconds=240)


@pytest.mark.trial
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_the_checkpoint_of_each_mesh_is_loaded_on_each(mixture: bool, tmp_path: Path) -> None:
    model, saved = tmp_path / "model", tmp_path / "saved"
    if mixture:
        write_mixture(model)
    else:
        write_model(model, tied=False)
    saved.mkdir()
    for saves in (True, False):
        for ranks in mesh_pairs.WORLDS:
            run_ranks(ranks, mesh_pairs.work, ranks, model, saved, mixture, saves, seconds=1400)
    assert len([*saved.iterdir()]) == sum(len(mesh_pairs.meshes(ranks, mixture)) for ranks in mesh_pairs.WORLDS)
