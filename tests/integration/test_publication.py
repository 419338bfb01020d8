"""Ranks that publish their own rows: servers get what one rank would gather, on every mesh and through faults."""

from pathlib import Path

import pytest

from tests.integration.test_trainer_mesh import write_mixture
from tests.support.oracle.cases import write_model
from tests.support.ranks import forked_ranks, publication_ranks

pytestmark = pytest.mark.integration


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", tied=False)
    return tmp_path / "model"


def test_servers_get_what_is_gathered_of_a_dense_model_on_each_mesh(dense: Path) -> None:
    meshes = [{}, {"dp_replicate": 2}, {"cp": 2}]
    forked_ranks.run_ranks(4, publication_ranks.publish_on_meshes, dense, meshes, True)


def test_one_rank_and_three_publish_what_is_gathered(dense: Path) -> None:
    for ranks in (1, 3):
        forked_ranks.run_ranks(ranks, publication_ranks.publish_on_meshes, dense, [{}], True)


@pytest.mark.parametrize("stacks", [True, False], ids=["own experts", "experts made whole"])
def test_servers_get_what_is_gathered_of_a_mixture_on_each_mesh(tmp_path: Path, stacks: bool) -> None:
    meshes = [{}, {"ep": 2}, {"ep": 4}, {"ep": 2, "dp_replicate": 2}]
    forked_ranks.run_ranks(4, publication_ranks.publish_on_meshes, write_mixture(tmp_path / "model"), meshes, stacks)


def test_servers_get_adapters_merged_into_the_weights(tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "model")
    forked_ranks.run_ranks(2, publication_ranks.publish_on_meshes, model, [{}, {"ep": 2}], True, 2)


def test_servers_get_the_rows_of_two_ranks_from_the_server_that_has_them(dense: Path) -> None:
    forked_ranks.run_ranks(2, publication_ranks.publish_by_relays, dense)


def test_servers_that_were_lost_get_every_ranks_rows_again(dense: Path) -> None:
    forked_ranks.run_ranks(2, publication_ranks.lose_and_find_servers, dense)


def test_a_rank_that_dies_while_it_publishes_leaves_servers_with_the_version_before(
    dense: Path, tmp_path: Path
) -> None:
    ranks = forked_ranks.start_ranks(2, publication_ranks.lose_a_rank, dense, tmp_path / "out")
    ranks[0].join(forked_ranks.JOIN_SECONDS)
    forked_ranks.end_ranks(ranks)
    assert (tmp_path / "out").read_text() == "done"
