"""A replay of recorded samples, killed wherever it hurts: the real rank 0, as each attempt's only rank or of two."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.config import RunConfig, load_config
from pipeline.observability.run_check import check_run
from pipeline.roles.role_context import RoleContext
from pipeline.roles.trainer_session import RunSession
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import RunPaths
from pipeline.train.controller.lead_or_serve import run_role_of_rank
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.train_jobs import Job
from tests.fakes.run_directory import FakeRun
from tests.patience import WAIT_SECONDS
from tests.support.ranks.forked_ranks import end_ranks, run_ranks, start_ranks
from tests.support.runs.recorded import STEPS, write_recorded

pytestmark = pytest.mark.integration
KILLS = ("optim_step 3", "note 3", "on_save 4", "on_durable 4", "export 6")
"""Five kill points: within a step, before the first checkpoint; after a step that no checkpoint has; while a checkpoint
is being written; once it is durable; and at the end, before the model is exported. The number is the step."""


def config_of(recorded: FakeRun, **training: int) -> RunConfig:
    changed = {"name": "replay", "replay": str(recorded.root)}
    tree = recorded.config.model_dump(mode="json") | changed
    tree["training"] |= training
    return load_config(tree)


def attempt(rank: int, root: Path, tree: Mapping[str, Any], name: str, kill: str) -> None:
    """One attempt of the replay, which kills its rank 0 at the moment that `kill` names; empty: it does not."""
    config = load_config(dict(tree))
    run_role_of_rank(config, "", partial(lead, root, config, name, kill))


def lead(root: Path, config: RunConfig, name: str, kill: str, dispatch: RankGroup) -> None:
    """Rank 0 of an attempt, which it alone creates."""
    made = FakeRun(root, config).attempt(name)
    world = made.meet()
    context = RoleContext(made.paths, config, world, world.of_role("trainer")[0])
    at, _, step = kill.partition(" ")

    class Killed(RunSession):
        started = 0

        def note(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
            super().note(job, step, metrics)
            self.reach("note", step)
            self.started = step

        def _open(self, opened: ExitStack) -> None:
            super()._open(opened)
            self._commits.on_durable = lambda covered: self.reach("on_durable", step_of(self._commits._durable))

        def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
            self._commits.on_save = lambda *_: self.reach("on_save", done)
            super().save_checkpoint(job, done, wait)

        def reach(self, moment: str, now: int) -> None:
            if kill and (moment, now) == (at, int(step)):
                os.kill(os.getpid(), signal.SIGKILL)

    session = Killed(context, dispatch)
    optim_step, export = dispatch.optim_step, session._commits.export
    calls = iter(range(10_000))

    def counted(*arguments: Any) -> Any:
        if next(calls) % 2:  # the second of the two mini-batches: half of the step's update is done
            session.reach("optim_step", session.started + 1)
        return optim_step(*arguments)

    def exported(*arguments: Any) -> None:
        session.reach("export", STEPS)
        export(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "optim_step", counted)
        patch.setattr(session._commits, "export", exported)
        session.run()


def step_of(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2])


def killed(ranks: int, root: Path, config: RunConfig, name: str, kill: str) -> None:
    """An attempt whose rank 0 is killed."""
    processes = start_ranks(ranks, attempt, root, config.model_dump(mode="json"), name, kill)
    try:
        processes[0].join(WAIT_SECONDS)
        assert processes[0].exitcode == -signal.SIGKILL, f"{kill} was never reached"
    finally:
        end_ranks(processes)


def finish(ranks: int, root: Path, config: RunConfig, name: str = "9-0") -> Path:
    run_ranks(ranks, attempt, root, config.model_dump(mode="json"), name, "", seconds=WAIT_SECONDS)
    return root


def weights(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = load_file(run / "model" / "model.safetensors")
    return loaded


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    return write_recorded(tmp_path_factory.mktemp("runs") / "recorded")


@pytest.fixture(scope="module")
def whole(recorded: FakeRun) -> Path:
    """An uninterrupted replay."""
    return finish(1, recorded.root.with_name("whole"), config_of(recorded))


@pytest.mark.parametrize("kills", [KILLS[2:3], pytest.param(KILLS, marks=pytest.mark.trial)], ids=len)
def test_a_replay_that_is_killed_ends_with_the_same_bits(recorded: FakeRun, whole: Path, kills: Sequence[str]) -> None:
    run, config = recorded.root.with_name(f"killed-{len(kills)}"), config_of(recorded)
    for number, kill in enumerate(kills):
        killed(1, run, config, f"{number}-0", kill)
    finish(1, run, config)
    assert same(run, whole)
    assert [row["step"] for row in read_rows(RunPaths(run).metrics)] == list(range(1, STEPS + 1))
    for name in ("loss", "reward/mean", "grad_norm"):
        assert [row[name] for row in read_rows(RunPaths(run).metrics)] == [
            row[name] for row in read_rows(RunPaths(whole).metrics)
        ]


def test_the_ledger_of_a_replay_is_the_recorded_one(recorded: FakeRun, whole: Path) -> None:
    assert RunPaths(whole).ledger.read_bytes() == recorded.paths.ledger.read_bytes()
    check = check_run(whole)
    assert (check.problems, check.steps, check.positions) == ((), STEPS, 13)


def test_a_replay_trains(recorded: FakeRun, whole: Path) -> None:
    """Equality would prove nothing of a replay without an effect."""
    fewer = finish(1, recorded.root.with_name("fewer"), config_of(recorded, steps=1))
    assert not same(fewer, whole)


@pytest.mark.trial
def test_a_replay_by_two_then_one_then_two_ranks_is_the_same_within_rounding(recorded: FakeRun, whole: Path) -> None:
    config, by_two = config_of(recorded), recorded.root.with_name("by-two")
    finish(2, by_two, config)
    mixed = recorded.root.with_name("mixed")
    killed(2, mixed, config, "1-0", "on_durable 2")
    killed(1, mixed, config, "2-0", "on_durable 4")
    finish(2, mixed, config)
    for one in (by_two, mixed):
        mine, theirs = weights(one), weights(whole)
        largest = max(float(np.abs(mine[name] - theirs[name]).max()) for name in theirs)
        print(f"{one.name}: largest difference of a weight {largest:.2g}, of an update about {config.optim.lr:.2g}")
        assert (
            largest < 0.1 * config.optim.lr
        )  # AdamW normalizes: the rounding of a gradient near 0 can change its update
