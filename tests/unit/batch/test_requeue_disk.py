"""The requeue on a disk that shows things late, or fails for a while."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, DeadlineError
from pipeline.run.events import Events
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files
from slurm.batch import requeue
from slurm.batch.requeue import conclude_attempt
from tests.fakes.clock import FakeClock
from tests.fakes.requeued_job import LATE_SECONDS, Cluster, fail

T = TypeVar("T")


class LateDisk(FakeClock):
    """A clock on which something appears after so many seconds, as on a disk that shows things late."""

    def __init__(self, seconds: float, appear: Callable[[], object]) -> None:
        super().__init__()
        self._seconds, self._appear = seconds, appear

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.time >= self._seconds:
            self._seconds = float("inf")
            self._appear()


def test_a_run_whose_end_is_seen_late_is_finished(cluster: Cluster) -> None:
    paths = cluster.attempt()
    finished = Finished(time=0.0, steps=1, attempt=paths.attempt)
    cluster.clock = LateDisk(60.0, lambda: shared_files.write_document(cluster.run.paths.finished, finished))
    assert cluster.end(0).decision == "finished"
    assert not cluster.scheduler.requeued
    assert 60.0 <= cluster.clock.time < LATE_SECONDS


def test_a_draining_that_is_seen_late_is_no_failure(cluster: Cluster) -> None:
    paths = cluster.attempt()
    cluster.clock = LateDisk(30.0, lambda: Events(paths).publish("draining", "agent.0", "SIGTERM"))
    outcome = cluster.end(0)
    assert (outcome.decision, outcome.failures) == ("requeued", 0)
    assert outcome.reason == "stop requested (SIGTERM, agent.0): it resumes from its newest checkpoint"


def test_agents_that_left_without_a_reason_are_not_waited_for_twice(cluster: Cluster) -> None:
    cluster.leave(cluster.attempt())
    outcome = cluster.end(0)
    assert (outcome.decision, sum(cluster.clock.slept)) == ("stopped", pytest.approx(LATE_SECONDS))
    assert "without a recorded reason" in outcome.reason


def test_a_failure_is_decided_without_waiting(cluster: Cluster) -> None:
    paths = cluster.attempt()
    fail(paths)
    cluster.leave(paths)
    assert cluster.end(1).decision == "stopped"
    assert not cluster.clock.slept


EIO = OSError(errno.EIO, "Input/output error")


def failing(times: int, really: Callable[..., T], error: Exception = EIO) -> Callable[..., T]:
    """The function, after a disk that failed so many times."""
    left = iter(range(times))

    def call(*arguments: Any) -> T:
        if next(left, None) is not None:
            raise error
        return really(*arguments)

    return call


@pytest.mark.parametrize("what", ["read_document", "write_document"])
def test_a_disk_that_fails_for_a_while_is_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)
    monkeypatch.setattr(shared_files, what, failing(5, getattr(shared_files, what)))
    assert cluster.end().decision == "requeued"
    assert 0 < sum(cluster.clock.slept) < requeue.ANSWER_SECONDS


def test_a_job_whose_outcome_cannot_be_written_is_requeued_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)
    monkeypatch.setattr(shared_files, "write_document", failing(10_000, shared_files.write_document))
    outcome = conclude_attempt(cluster.run.paths, cluster.scheduler, cluster.job, 0, 0, cluster.clock)
    assert outcome.decision == "requeued"
    assert cluster.scheduler.requeued == [cluster.job]
    assert sum(cluster.clock.slept) < 30, "KillWait is over before the requeue is asked for"
    assert not paths.outcome.exists()
    said = capsys.readouterr().out
    assert str(paths.outcome) in said
    assert "Input/output error" in said


def test_checkpoints_that_cannot_be_listed_for_a_while_are_looked_at_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)
    monkeypatch.setattr(Storage, "folders", failing(5, Storage.folders, CheckpointError("Input/output error")))
    assert cluster.end().decision == "requeued"


def test_a_run_directory_that_stays_unreadable_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.attempt()
    monkeypatch.setattr(shared_files, "read_document", failing(10_000, shared_files.read_document))
    with pytest.raises(DeadlineError, match="Input/output error"):
        conclude_attempt(cluster.run.paths, cluster.scheduler, cluster.job, 0, 0, cluster.clock)
    assert not cluster.scheduler.requeued


@pytest.mark.parametrize("name", ["config.json", "run.json", "finished.json"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ECONNRESET])
def test_a_file_server_that_fails_over_for_a_while_is_no_missing_file(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    paths = cluster.attempt()
    cluster.leave(paths)
    finished = Finished(time=0.0, steps=1, attempt=paths.attempt)
    shared_files.write_document(cluster.run.paths.finished, finished)
    read, left = Path.read_bytes, iter(range(20))

    def failing_over(path: Path) -> bytes:
        if path.name == name and next(left, None) is not None:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing_over)
    assert cluster.end(1).decision == "finished"
    assert not cluster.scheduler.requeued
    assert 0 < sum(cluster.clock.slept) < requeue.ANSWER_SECONDS
