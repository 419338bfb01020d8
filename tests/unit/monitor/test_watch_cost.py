"""What looking at a run costs its filesystem, and how soon it sees what changed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.observability.run_history import PER_LOOK
from slurm.monitor.run_watcher import Watcher
from tests.fakes.run_directory import FakeRun


def a_run(root: Path, ranks: int, attempts: int) -> FakeRun:
    """Attempts of a server a rank, the last of which goes on."""
    run = FakeRun(root / "run")
    run.submit("7")
    for number in range(attempts):
        attempt = run.attempt(f"7-{number}")
        attempt.paths.timeline.mkdir()
        for rank in range(ranks):
            line = {"time": run.now, "role": f"inference.{rank}", "rank": rank, "state": "ready"}
            attempt.paths.timeline_of(rank).write_text(json.dumps(line) + "\n")
        if number == attempts - 1:
            attempt.live(ranks, run.now)
            attempt.leave(0)
        run.now += 100
    return run


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every open, stat and listing from now on."""
    seen: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(f"{function.__name__} {arguments[0]}")
            return function(*arguments, **options)

        return call

    for module, name in ((os, "stat"), (os, "scandir"), (os, "listdir"), (os, "open")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    monkeypatch.setattr("io.open", counted(open))
    return seen


@pytest.mark.parametrize(("ranks", "attempts"), [(4, 1), (64, 5), (512, 5)])
def test_a_look_costs_little_however_many_ranks_and_attempts(
    tmp_path: Path, operations: list[str], ranks: int, attempts: int
) -> None:
    watcher = Watcher(a_run(tmp_path, ranks, attempts).root)
    watcher.look()
    operations.clear()
    for _ in range(4):
        watcher.look()
    assert 4 * 5 < len(operations) <= 4 * (PER_LOOK + 24)


def test_every_change_of_every_rank_is_seen_within_a_few_looks(tmp_path: Path) -> None:
    run = a_run(tmp_path, 512, 1)
    watcher = Watcher(run.root)
    watcher.look()
    paths = run.paths.attempt(run.identity.run_id, "7-0")
    for rank in range(512):
        with paths.timeline_of(rank).open("a") as timeline:
            timeline.write(json.dumps({"time": run.now, "role": f"inference.{rank}", "rank": rank, "state": "stopped"}))
    for _ in range(2 * 512 // PER_LOOK):
        seen = watcher.look()
    assert {role.state for role in seen.roles} == {"stopped"}


def test_a_small_run_is_seen_as_it_is_at_every_look(tmp_path: Path) -> None:
    run = a_run(tmp_path, PER_LOOK // 2, 1)
    watcher = Watcher(run.root)
    watcher.look()
    paths = run.paths.attempt(run.identity.run_id, "7-0")
    for rank in range(PER_LOOK // 2):
        paths.timeline_of(rank).write_text(
            json.dumps({"time": run.now, "role": f"inference.{rank}", "rank": rank, "state": "stopped"})
        )
    assert {role.state for role in watcher.look().roles} == {"stopped"}


def test_an_attempt_that_is_over_is_read_as_it_ended(tmp_path: Path) -> None:
    run = a_run(tmp_path, 128, 1)
    watcher = Watcher(run.root)
    watcher.look()
    paths, ended = run.paths.attempt(run.identity.run_id, "7-0"), run.now + 50
    with paths.timeline_of(127).open("a") as timeline:
        timeline.write(json.dumps({"time": ended, "role": "inference.127", "rank": 127, "state": "stopped"}))
    began = run.now - 100
    run.now += 100
    run.attempt("7-1")
    (past,) = watcher.look().past
    assert (past.name, past.seconds) == ("7-0", ended - began)
