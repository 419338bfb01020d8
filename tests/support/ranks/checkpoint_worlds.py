"""What the ranks of `test_resume` run: a trainer of three models that commits, is killed, and goes on in other worlds.

Each world leaves what it computed in its folder: `steps.json` with the metrics of each step, `state.pt` with every
tensor of every model and optimizer, whole.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from pipeline.checkpoints import TrainerState, newest_checkpoint
from pipeline.checkpoints.async_save import AsyncSaver
from pipeline.checkpoints.sharded_state import complete_checkpoint as real_commit
from pipeline.config import ModelConfig, OptimConfig, RunConfig
from pipeline.errors import CheckpointError, TrainingError
from pipeline.run.paths import RunPaths
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.model_saving import await_save, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines, RankState
from pipeline.train.loop.run_recorder import FINAL_SAVE_SECONDS, RunRecorder
from pipeline.train.loss_specs import SFT, ValueLoss
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.train_jobs import Job, jobs_of
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support.models.tiny import VOCABULARY
from tests.support.ranks.checkpoint_processes import Stop, Unsaveable

SAVED, STEPS = 3, 6
TINY = Path(__file__).parents[3] / "conf" / "models" / "tiny_qwen3"
NAMES = ("policy", "reference", "critic")
PATIENCE = Deadlines(operation=30, control=30, grace=2)
SLOW = Deadlines(operation=6, control=30, grace=2)
"""A collective of training has less time than the commit of `commit_slowly` takes."""
Algorithm = Callable[[RankGroup, RunRecorder, Path], None]


def config_of(model: Path) -> RunConfig:
    return make_config(
        model={"path": str(model), "init": "random", "max_length": 16},
        loss={"name": "ppo", "kl": 0.1, "advantage_estimator": "gae"},
        optim={"lr": 1e-2, "schedule": "cosine"},
        training={"steps": 9, "prompts_per_step": 2},
    )


def world(
    rank: int,
    algorithm: Algorithm,
    run: Path,
    attempt: str,
    out: Path,
    colocated: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
) -> None:
    """One attempt of the run in this world; the controller runs `algorithm`, its models perhaps taking turns."""
    config, paths = config_of(run / "model"), RunPaths(run).attempt("resume-1", attempt)

    def lead(dispatch: RankGroup) -> None:
        algorithm(dispatch, RunRecorder(paths, config, dispatch), out)

    run_controller_or_worker(lead, Budget(tokens=64), device=device, patience=PATIENCE, colocated=colocated)


def train_and_export(rank: int, model: Path) -> None:
    """Make the demo's tiny model, take some large steps, and save it as `model`."""

    def lead(dispatch: RankGroup) -> None:
        tiny = ModelConfig(path=str(TINY), init="random")
        dispatch.init_model("policy", ModelSpec("policy", tiny, OptimConfig(lr=3e-2), steps=3))
        for step in range(3):
            dispatch.forward_backward("policy", Batch.of(rows(step), "token"), SFT)
            dispatch.optim_step("policy")
        dispatch.save_hf_model("policy", model)

    run_controller_or_worker(lead, Budget(tokens=64), patience=PATIENCE)


def logprobs_of(rank: int, model: Path, tokens: list[list[int]], out: Path) -> None:
    """Write the log-probabilities of all tokens but the first, by the model in that directory."""
    masks = [np.arange(len(row)) > 0 for row in tokens]
    batch = Batch.of(
        [TrainSequence(np.array(row, np.int32), mask) for row, mask in zip(tokens, masks, strict=True)], "token"
    )

    def lead(dispatch: RankGroup) -> None:
        dispatch.init_model("policy", ModelSpec("policy", ModelConfig(path=str(model)), None))
        out.write_text(json.dumps([row.tolist() for row in dispatch.forward("policy", batch)]))

    run_controller_or_worker(lead, Budget(tokens=64), patience=PATIENCE)


def first(dispatch: RankGroup, commits: RunRecorder, out: Path) -> None:
    """Train all steps; the commit after some of them is held up until the steps after it are done."""
    job, release, durable = start(commits, 0), hold_commits(), []
    commits.on_durable = durable.append
    train(dispatch, 0, SAVED)
    settle(commits, SAVED)
    commits.save_checkpoint(job, SAVED, ("entry",))
    steps = train(dispatch, SAVED, STEPS)
    commits.collect()
    assert newest_checkpoint(commits._root) is None
    assert (dispatch.saver.idle, durable) == (False, []), "steps were done while it was under way"
    release.set()
    commits.finish()
    assert durable == [("entry",)]
    leave(dispatch, steps, out)
    stop_in_the_next_save(out / "reached")
    settle(commits, STEPS)
    commits.save_checkpoint(job, STEPS, ())
    for step in range(STEPS, STEPS + 1000):
        train(dispatch, step, step + 1)  # until it is killed


def resume(dispatch: RankGroup, commits: RunRecorder, out: Path) -> None:
    """Go on from the commit, to the same step as `first`, and commit that."""
    job = start(commits, SAVED)
    assert commits.covered == ("entry",)
    assert settled(commits) == list(range(SAVED))
    steps = train(dispatch, SAVED, STEPS)
    settle(commits, STEPS)
    commits.save_checkpoint(job, STEPS, (), wait=True)
    leave(dispatch, steps, out)


def fall_back(dispatch: RankGroup, commits: RunRecorder, out: Path) -> None:
    """Step 6 was damaged since, in what only rank 1 reads: go on from step 3, and from that alone."""
    start(commits, SAVED)
    assert settled(commits) == list(range(SAVED))
    newest = newest_checkpoint(commits._root)
    assert newest is not None
    assert newest.name == f"rl-{SAVED}", "the other counts no more, although its sizes are right"
    leave(dispatch, [], out)


def copy(dispatch: RankGroup, commits: RunRecorder, out: Path) -> None:
    """Restore, say what is there, and commit it again as a step of this world."""
    job = start(commits, STEPS)
    leave(dispatch, [], out)
    commits.save_checkpoint(job, STEPS, (), wait=True)


def fail(dispatch: RankGroup, commits: RunRecorder, out: Path) -> None:
    """A commit whose shard one rank cannot write is reported by the next look, and the one after it is made."""
    job = start(commits, STEPS)
    leave(dispatch, [], out)
    dispatch.run_on_ranks("policy", unsaveable_on_rank_1)
    commits.save_checkpoint(job, STEPS + 1, ())
    wait_for("the commit to fail", lambda: dispatch.saver.idle, WAIT_SECONDS)
    with pytest.raises(CheckpointError, match=r"cannot save .* rank 1: OSError.*No space left"):
        commits.collect()
    commits.collect()
    newest = newest_checkpoint(commits._root)
    assert newest is not None
    assert newest.manifest.step == STEPS
    train(dispatch, STEPS, STEPS + 1)
    commits.save_checkpoint(job, STEPS + 1, (), wait=True)


def commit_slowly(rank: int, root: str) -> None:
    """Rank 0 writes its last files for longer than a collective of training may take, while rank 1 waits for it."""

    def commit(*arguments: Any) -> Any:
        time.sleep(SLOW.operation + 0.5)
        return real_commit(*arguments)

    def lead(dispatch: RankGroup) -> None:
        _patch.setattr("pipeline.checkpoints.sharded_state.complete_checkpoint", commit)
        dispatch.run_on_all_models(stage_numbers)
        start_save(dispatch, root, "1-0", TrainerState(job="rl", step=1), ["numbers"], 2)
        await_save(dispatch, "the slow commit")
        assert set(dispatch.run_on_all_models(saved)) == {"rl-1"}

    run_controller_or_worker(lead, Budget(tokens=64), patience=SLOW)


def stage_numbers(site: RankState) -> None:
    site.saver.stage("numbers", {"w": torch.ones(3)})


def saved(site: RankState) -> str:
    wait_for("this rank's part of the save", lambda: site.saver.idle, WAIT_SECONDS)
    return site.saver.result().name


def lose_a_rank(dispatch: RankGroup, commits: RunRecorder, out: Path) -> None:
    """Rank 1 is lost while it has its part of a commit to write: what is told is that, soon, and nothing is durable."""
    job, durable = start(commits, SAVED), []
    commits.on_durable = durable.append
    dispatch.run_on_ranks("policy", stop_on_rank_1, out)
    commits.save_checkpoint(job, STEPS, ())
    with pytest.raises(TrainingError):
        dispatch.run_on_ranks("policy", leave_on_rank_1)
    assert dispatch.broken
    began = time.monotonic()
    commits.finish()
    assert time.monotonic() - began < FINAL_SAVE_SECONDS + 2
    assert durable == []
    newest = newest_checkpoint(commits._root)
    assert newest is not None
    assert newest.manifest.step == SAVED
    out.write_text("told")


def start(commits: RunRecorder, done: int) -> Job:
    """Restore, which must find `done` steps."""
    position = commits.restore()
    assert position.done == done
    return jobs_of(commits._config)[0]


def train(dispatch: RankGroup, begin: int, end: int) -> list[dict[str, float]]:
    """The steps `begin` … `end` − 1, each of rows that its number names; their metrics."""
    return [one_step(dispatch, step) for step in range(begin, end)]


def one_step(dispatch: RankGroup, step: int) -> dict[str, float]:
    loss = config_of(Path("model")).loss
    batch = Batch.of(rows(step), "token")
    reference = dispatch.forward("reference", batch)
    metrics = dispatch.forward_backward("policy", batch, loss) | dispatch.optim_step("policy")
    critic = dispatch.forward_backward("critic", batch, ValueLoss(0.2)) | dispatch.optim_step("critic")
    dispatch.run_on_ranks("reference", follow)
    metrics |= {f"critic/{name}": value for name, value in critic.items()}
    return metrics | {"reference": float(sum(float(row.sum()) for row in reference))}


def follow(worker: ModelWorker) -> None:
    """Change the reference model, so that it, too, has something to lose."""
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.mul_(1.01)


def rows(step: int) -> list[TrainSequence]:
    draw = np.random.default_rng(step)
    return [row(draw, length, index // 2) for index, length in enumerate((5, 9, 16, 7, 3, 12))]


def row(draw: np.random.Generator, length: int, prompt: int) -> TrainSequence:
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    numbers = draw.normal(size=(5, length)).astype(np.float32)
    return TrainSequence(
        tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
        mask=mask,
        advantages=numbers[0],
        sampler_logprobs=numbers[1] - 3,
        reference=numbers[2] - 3,
        values=numbers[3],
        returns=numbers[4],
        prompt=prompt,
    )


def settle(commits: RunRecorder, done: int) -> None:
    """As if each step had trained one prompt."""
    for position in range(done):
        if not commits.ledger.is_done(position):
            commits.ledger.mark_done(position, "trained", position)


def settled(commits: RunRecorder) -> list[int]:
    """The positions in `ledger.jsonl`."""
    return [json.loads(line)["position"] for line in commits._run.ledger.read_text().splitlines()]


def leave(dispatch: RankGroup, steps: list[dict[str, float]], out: Path) -> None:
    """Write what this world computed."""
    state = {name: dispatch.run_on_ranks(name, whole_state)[0] for name in NAMES}
    out.mkdir(parents=True, exist_ok=True)
    torch.save(state, out / "state.pt")
    (out / "steps.json").write_text(json.dumps(steps))


def whole_state(worker: ModelWorker) -> dict[str, Any]:
    """Every tensor and value of a model and its optimizer by its place, unsharded."""
    return dict(_flat("", worker.state()))


def _flat(place: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in _flat(f"{place}.{name}", inner)]
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return [(place, whole.cpu() if isinstance(whole, torch.Tensor) else whole)]


def hold_commits() -> Event:
    """Commits of this process wait from now on, shards written, until the event is set."""
    release = Event()

    def held(*arguments: Any) -> Any:
        assert release.wait(60)
        return real_commit(*arguments)

    _patch.setattr("pipeline.checkpoints.sharded_state.complete_checkpoint", held)
    return release


_patch = pytest.MonkeyPatch()


def stop_in_the_next_save(mark: Path) -> None:
    _replace_staging(lambda: {"stop": Stop(mark)})


def stop_on_rank_1(worker: ModelWorker, out: Path) -> None:
    if torch.distributed.get_rank() == 1:
        stop_in_the_next_save(out.with_name("reached"))


def leave_on_rank_1(worker: ModelWorker) -> None:
    if torch.distributed.get_rank() == 1:
        os._exit(9)


def unsaveable_on_rank_1(worker: ModelWorker) -> None:
    if torch.distributed.get_rank() == 1:
        _replace_staging(lambda: {"own": Unsaveable()})


def _replace_staging(more: Callable[[], dict[str, Any]]) -> None:
    """The next model that is staged in this process has `more` in its tree."""
    stage = AsyncSaver.stage

    def staged(self: AsyncSaver, name: str, tensors: dict[str, Any]) -> None:
        _patch.setattr(AsyncSaver, "stage", stage)
        stage(self, name, tensors)
        self._staged[name] |= more()

    _patch.setattr(AsyncSaver, "stage", staged)
