"""Checkpoints on a real S3-compatible server, written by real ranks."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config
import pytest
import torch
from moto.s3.models import S3Backend

from pipeline.checkpoints import Checkpoint, Fence, TrainerState, newest_checkpoint, prune, remove_unfinished
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.errors import CheckpointError
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.ranks import checkpoint_processes as ranks
from tests.support.ranks.forked_ranks import end_ranks, run_ranks, start_ranks
from tests.support.servers.s3_server import BUCKET, an_s3_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with an_s3_server() as environment:
        yield environment


@pytest.fixture
def root(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty folder of the bucket."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {})
    fsspec.config.set_conf_env(fsspec.config.conf)
    return f"s3://{BUCKET}/{request.node.name}"


def commit(root: str, step: int) -> Checkpoint:
    return save(root, "1-0", TrainerState(job="rl", step=step), {"w": torch.full((3,), float(step))})


def test_what_two_ranks_saved_is_found_with_its_hashes_and_loaded_by_one(root: str, tmp_path: Path) -> None:
    run_ranks(2, ranks.save_model, root, tmp_path, 5)
    found = newest_checkpoint(root, hashes=True)
    assert found is not None
    assert found.location == f"{root}/rl-5/1-0"
    assert sorted(found.manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.msgpack"]
    run_ranks(1, ranks.load_model, root, tmp_path)


def test_an_upload_that_is_killed_leaves_the_one_before(
    root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(root, 25)
    processes = start_ranks(2, ranks.save_and_stop, root, tmp_path, 50)
    wait_for("rank 0 to be in the middle of its shards", (tmp_path / "reached").exists, WAIT_SECONDS)
    wait_for(
        "rank 1 to have uploaded its own", lambda: "__1_0.distcp" in Storage(root).sizes("rl-50/2-0"), WAIT_SECONDS
    )
    end_ranks(processes)
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(root, hashes=True)
    assert found is not None
    assert found.manifest.step == 25
    assert "rl-50 is skipped: rl-50/2-0 has no COMPLETE" in caplog.text


def test_pruning_removes_old_ones_and_nothing_else(root: str) -> None:
    newest = [commit(root, step) for step in (25, 50, 75)][-1]
    assert prune(newest, keep=2) == ["rl-25/1-0"]
    assert Storage(root).folders() == ["rl-50", "rl-75"]
    into = {"w": torch.zeros(3)}
    found = newest_checkpoint(root, hashes=True)
    assert found is not None
    load_shards(found, into)
    assert into["w"].tolist() == [75.0] * 3


@pytest.fixture
def listed(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The server lists only keys with one of these endings, as a store does which lists new keys later."""
    endings, whole = list[str](), S3Backend.list_objects

    def late(backend: S3Backend, *arguments: Any, **options: Any) -> Any:
        keys, folders, *rest = whole(backend, *arguments, **options)
        return ([key for key in keys if key.name.endswith(tuple(endings))], folders if endings else [], *rest)

    monkeypatch.setattr(S3Backend, "list_objects", late)
    return endings


def test_a_store_that_lists_new_files_late_completes_a_checkpoint_and_loses_none(root: str, listed: list[str]) -> None:
    Fence(root, "1-0").claim()
    commit(root, 25)
    listed.append("/.metadata")
    found = newest_checkpoint(root)
    assert found is not None
    assert found.name == "rl-25"
    Fence(root, "1-1").claim()
    assert remove_unfinished(root, "1-1") == []
    assert found.read("state.msgpack")


def test_what_another_process_commits_after_a_listing_is_found(root: str, tmp_path: Path) -> None:
    commit(root, 1)
    first = newest_checkpoint(root)
    assert first is not None
    assert first.manifest.step == 1
    run_ranks(1, ranks.save_model, root, tmp_path, 5)
    second = newest_checkpoint(root)
    assert second is not None
    assert second.manifest.step == 5


def test_an_attempt_that_was_taken_over_cannot_commit(root: str) -> None:
    Fence(root, "1-0").claim()
    commit(root, 25)
    Fence(root, "2-0").claim()
    with pytest.raises(CheckpointError, match=f"attempt 2-0 has taken over {root}"):
        commit(root, 50)
    assert Storage(root).folders() == ["ancestry", "rl-25"]


def test_a_bucket_that_is_not_there_is_named(root: str) -> None:
    with pytest.raises(CheckpointError, match="cannot write s3://absent/run/"):
        Fence("s3://absent/run", "1-0").claim()


def test_a_server_that_is_not_there_is_named(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.8:9"})
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(CheckpointError, match=r"cannot .* s3://bucket/run"):
        newest_checkpoint("s3://bucket/run")
