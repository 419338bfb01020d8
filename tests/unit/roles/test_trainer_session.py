"""What the controller does as it begins and while it waits: real commits of a policy that is one tensor."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.checkpoints import Fence, TrainerState, newest_checkpoint, sharded_state
from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.errors import CheckpointError, StreamError, TrainingError
from pipeline.roles.rl_services import RlServices
from pipeline.roles.role_context import RoleContext
from pipeline.roles.trainer_session import RunSession
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.train_jobs import jobs_of
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

COVERED = ("1-0", "2-0")


class OneRank:
    """A dispatch whose only rank is this process."""

    patience, broken = Deadlines(), False

    def __init__(self) -> None:
        self.saver = AsyncSaver()

    def run_on_all_models(self, function: Callable[..., Any], *args: Any, needs: object = None) -> list[Any]:
        worker = SimpleNamespace(state=lambda: {"model": {"w": torch.ones(2)}})
        return [function(SimpleNamespace(worker=lambda name: worker, background=None, saver=self.saver), *args)]

    def keepalive(self) -> None:
        pass


class Waiting:
    """A session of attempt 12-0 with a commit under way; `durable` is what it may give up."""

    def __init__(self, root: Path) -> None:
        run = FakeRun(root / "run", make_config(model={"path": "tiny_qwen3", "init": "random"}))
        attempt = run.attempt("12-0")
        world = attempt.meet()
        self.context = RoleContext(attempt.paths, run.config, world, world.of_role("trainer")[0])
        self.dispatch = OneRank()
        session = RunSession(self.context, cast(RankGroup, self.dispatch))
        self.root, self.commits, self.pulse = str(run.paths.checkpoints), session._commits, session._pulse
        self.give_up = session._release_covered
        self.finish, self.warming_up = session._finish_commits, session._warming_up
        self.durable: list[tuple[str, ...]] = []
        self.commits.on_durable = self.durable.append
        self.commits.fence.claim()

    def commit(self) -> None:
        """It is over, well or badly, when this returns; nobody has looked at it yet."""
        self.commits.save_checkpoint(jobs_of(self.context.config)[0], 1, COVERED)
        wait_for("the save to be over", lambda: self.dispatch.saver.idle, 30)


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    return Waiting(tmp_path)


def overtaken_while_it_is_written(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: Any) -> Any:
        Fence(waiting.root, "12-1").claim()
        return complete_checkpoint(*arguments)

    monkeypatch.setattr(sharded_state, "complete_checkpoint", late)
    waiting.commit()


def test_a_checkpoint_of_another_version_ends_the_attempt_and_is_not_skipped(waiting: Waiting) -> None:
    older = TrainerState(job="rl", step=7, version=1)
    complete_checkpoint(Storage(waiting.root), older, "12-0", {}, 1)
    with pytest.raises(
        CheckpointError, match=r"rl-7.* has version 1; this code reads version 2; use the version of Rollcall"
    ):
        waiting.commits.restore()


def test_what_a_commit_covers_is_given_up_while_the_trainer_waits(waiting: Waiting) -> None:
    waiting.commit()
    assert newest_checkpoint(waiting.root) is not None
    waiting.pulse()
    waiting.pulse()
    assert waiting.durable == [COVERED]


def test_a_trainer_that_was_replaced_learns_it_while_it_waits(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken_while_it_is_written(waiting, monkeypatch)
    with pytest.raises(CheckpointError, match="attempt 12-1 has taken over"):
        waiting.pulse()
    assert waiting.durable == []


def test_an_attempt_that_is_ending_says_so_rather_than_that_a_commit_failed(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken_while_it_is_written(waiting, monkeypatch)
    waiting.context.events.publish("draining", "agent")
    with pytest.raises(Interrupted, match="draining by agent"):
        waiting.pulse()


def test_an_attempt_that_is_ending_leaves_what_a_commit_covers_to_the_next_one_while_streams_are_away(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    def away(_: object) -> None:
        raise StreamError("redis does not answer")

    peers = cast(RlServices, SimpleNamespace(release_covered=away))
    waiting.commits.on_durable = partial(waiting.give_up, peers)
    waiting.commit()
    with pytest.raises(StreamError):
        waiting.commits.collect()
    waiting.context.events.publish("draining", "agent")
    waiting.commits.save_checkpoint(jobs_of(waiting.context.config)[0], 2, COVERED, wait=True)
    assert "the next attempt acknowledges the entries of the last checkpoint: redis does not answer" in caplog.text


def test_a_commit_under_way_that_fails_does_not_hide_the_error_that_came_before(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(sharded_state, "complete_checkpoint", fail)
    waiting.commit()
    waiting.finish(None, TrainingError("a rank is lost"), None)
    assert "the checkpoint in progress failed too: the disk is gone" in caplog.text
    waiting.commit()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        waiting.finish(None, None, None)


def test_a_warm_up_is_reported_while_it_goes_on_and_the_first_one_ever_after(waiting: Waiting) -> None:
    def status() -> tuple[str, list[float]]:
        status = waiting.context.status()
        assert status is not None
        return status.detail, list(status.numbers.values())

    with waiting.warming_up():
        assert status() == ("warming up", [])
    detail, first = status()
    assert detail == "warmed up"
    assert len(first) == 2
    assert first == sorted(first)
    with waiting.warming_up():
        assert status() == ("warming up", first)
    assert status() == ("warmed up", first)
