"""Replicas of a model (HSDP) on four real ranks: they train as one model does, and stay equal to the last bit."""

from pathlib import Path

import pytest

from tests.support.oracle.cases import write_model
from tests.support.ranks import mesh_ranks
from tests.support.ranks.forked_ranks import run_ranks

pytestmark = pytest.mark.integration


def test_replicas_train_as_one_model_and_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, tied=False)
    run_ranks(4, mesh_ranks.work, model, tmp_path, seconds=240)
