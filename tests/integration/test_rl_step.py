"""An optimizer step of RL whose streams are lost at the worst moment."""

from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec import structs

from pipeline.errors import StreamError, TrainingError
from pipeline.run.paths import AttemptPaths
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch
from pipeline.train.controller.batch_staging import ShardedBatch, Staged
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.batch_metrics import batch_metrics, zero_variance
from pipeline.train.loop.evaluations import Evaluations, schedules_of
from pipeline.train.loop.group_batches import GroupBatches
from pipeline.train.loop.logprob_agreement import Agreement
from pipeline.train.loop.rl import ReinforcementLearning, rows_of
from pipeline.train.loop.train_loop import CheckpointCadence, TrainLoop
from pipeline.train.train_jobs import Job, RlJob, jobs_of
from pipeline.transport.eval_records import EvalResult
from pipeline.transport.file_streams import FileStreams
from pipeline.transport.ledger import Ledger
from pipeline.transport.sample_records import Group, PreparedGroup, Sample
from pipeline.transport.shared_state import SharedState
from pipeline.transport.staleness import StalenessGate
from tests.fakes.composed_config import compose_cached

PROMPTS, STEPS = 2, 5


class LostBoard(SharedState):
    """Cannot be reached any more once the model of `lost_after` steps exists."""

    def __init__(self, streams: FileStreams, optimizer: "CountingDispatch", lost_after: int) -> None:
        super().__init__(streams)
        self._optimizer, self._lost_after = optimizer, lost_after

    def post_progress(self, version: int, done: int) -> None:
        if self._optimizer.steps >= self._lost_after:
            raise StreamError("the connection is lost")
        super().post_progress(version, done)


class CountingDispatch:
    """A model that is the number of its optimizer steps."""

    steps, broken = 0, False

    def __init__(self, metrics: dict[str, float] | None = None) -> None:
        self.metrics, self.levels = metrics or {}, []

    levels: list[str]

    def stage(self, batches: list[Batch]) -> Staged:
        return Staged(0, tuple(ShardedBatch.shard(batch, [1], Budget(1024)) for batch in batches))

    def unstage(self, staged: Staged) -> None:
        """Nothing is held."""

    def reset_optimizer(self, *_: object, **__: object) -> None:
        self.steps = 0

    def forward_backward(self, *_: object, level: str) -> dict[str, float]:
        self.levels.append(level)
        return dict(self.metrics)

    def optim_step(self, *_: object) -> dict[str, float]:
        self.steps += 1
        return {"skipped": 0.0}


class Book:
    """Keeps what was committed: the step's number, the model, and how much the ledger has settled."""

    is_checkpointable = True
    is_near_budget = is_saving = False
    checkpoint_seconds = 0.0

    def __init__(self, dispatch: CountingDispatch, ledger: Ledger) -> None:
        self._dispatch, self._ledger = dispatch, ledger
        self.commits: list[tuple[int, int, int]] = []

    def save_checkpoint(self, job: Job, done: int, wait: bool) -> None:
        self.commits.append((done, self._dispatch.steps, self._ledger.done_count))

    def note(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.mark.parametrize("lost_after", [1, 3])
def test_a_commit_after_lost_streams_has_the_number_of_steps_that_model_and_ledger_made(
    tmp_path: Path, lost_after: int
) -> None:
    sizes = [f"training.prompts_per_step={PROMPTS}", f"training.steps={STEPS}", "training.eval_every=0"]
    config = compose_cached(["experiment=demo", *sizes])
    dispatch, ledger = CountingDispatch(), Ledger()
    publisher: Any = Mock(**{"wait_until_synced.return_value": {}, "start.return_value": {}})
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as streams:
        streams.publish_many("prepared", [prepared(position) for position in range(PROMPTS * STEPS)])
        board = LostBoard(streams, dispatch, lost_after)
        batches = GroupBatches(streams, board, ledger, config, lambda: None, vocabulary=17)
        job = cast(RlJob, jobs_of(config)[-1])
        algorithm = ReinforcementLearning(job, config, cast(RankGroup, dispatch), batches, publisher, Mock(), Mock())
        book = Book(dispatch, ledger)
        with pytest.raises(StreamError):
            TrainLoop(book, CheckpointCadence(100)).run(algorithm, 0)
    assert book.commits == [(lost_after, lost_after, PROMPTS * lost_after)]


def test_samples_that_were_cut_off_count_no_token_when_they_are_masked() -> None:
    groups = [prepared(0, "stop"), prepared(1, "length")]
    assert [row.counted for row in rows_of(groups, masked="length")] == [1, 0]
    assert [row.counted for row in rows_of(groups)] == [1, 1]


def test_a_step_whose_samples_were_all_cut_off_is_over_like_any_other(tmp_path: Path) -> None:
    sizes = [f"training.prompts_per_step={PROMPTS}", "training.steps=2", "training.eval_every=0"]
    config = compose_cached(["experiment=demo", "training.mask_truncated=true", *sizes])
    dispatch, ledger, job = CountingDispatch(), Ledger(), cast(RlJob, jobs_of(config)[-1])
    publisher: Any = Mock(**{"wait_until_synced.return_value": {}, "start.return_value": {}})
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as streams:
        groups = [prepared(position, "length" if position < PROMPTS else "stop") for position in range(2 * PROMPTS)]
        streams.publish_many("prepared", groups)
        batches = GroupBatches(streams, SharedState(streams), ledger, config, lambda: None, vocabulary=17)
        book = Book(dispatch, ledger)
        algorithm = ReinforcementLearning(job, config, cast(RankGroup, dispatch), batches, publisher, Mock(), Mock())
        TrainLoop(book, CheckpointCadence(1)).run(algorithm, 0)
    assert ledger.outcomes == {"filtered: no token counts": PROMPTS, "trained": PROMPTS}
    assert book.commits == [(1, 0, PROMPTS), (2, 1, 2 * PROMPTS)]


@pytest.mark.parametrize("mismatch", [0.2, 0.3])
def test_a_run_whose_servers_do_not_compute_with_the_trainers_weights_ends(tmp_path: Path, mismatch: float) -> None:
    sizes = [f"training.prompts_per_step={PROMPTS}", "training.steps=3", "training.eval_every=0"]
    config = compose_cached(["experiment=demo", "training.metrics=none", *sizes])
    dispatch, ledger, job = CountingDispatch({"mismatch": mismatch}), Ledger(), cast(RlJob, jobs_of(config)[-1])
    publisher: Any = Mock(**{"wait_until_synced.return_value": {}, "start.return_value": {}})
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as streams:
        streams.publish_many("prepared", [prepared(position) for position in range(3 * PROMPTS)])
        batches = GroupBatches(streams, SharedState(streams), ledger, config, lambda: None, vocabulary=17)
        algorithm = ReinforcementLearning(job, config, cast(RankGroup, dispatch), batches, publisher, Mock(), Mock())
        runner = TrainLoop(Book(dispatch, ledger), CheckpointCadence(1))
        if mismatch == 0.2:
            runner.run(algorithm, 0)
        else:
            with pytest.raises(TrainingError, match=f"differ from the trainer's by {mismatch:.2f} nats a token"):
                runner.run(algorithm, 0)
    assert dispatch.levels == (["basic", "none", "none"] if mismatch == 0.2 else ["basic"])
    assert ledger.done_count == (3 * PROMPTS if mismatch == 0.2 else 0)


def test_a_batch_with_lag_says_nothing_of_the_servers() -> None:
    agreement = Agreement()
    agreement.check({"mismatch": 2.0, "staleness/max": 1.0})
    agreement.check({"mismatch": float("nan"), "staleness/max": 0.0})
    assert not agreement.known
    with pytest.raises(TrainingError, match=r"by 2\.00 nats"):
        agreement.check({"log_ratio": 2.0, "staleness/max": 0.0})
    agreement.check({"mismatch": 0.01, "log_ratio": 9.0, "staleness/max": 0.0})
    assert agreement.known
    agreement.check({"mismatch": 2.0, "staleness/max": 0.0})


def prepared(position: int, finish: Literal["stop", "length"] = "stop") -> PreparedGroup:
    sample = Sample(
        tokens=np.array([1, 2], "<i4").tobytes(),
        sampled=bytes([0, 1]),
        logprobs=np.zeros(2, "<f4").tobytes(),
        reward=1.0,
        version_min=position // PROMPTS,
        version_max=position // PROMPTS,
        finish=finish,
    )
    group = Group(position=position, prompt=position, samples=(sample,))
    return PreparedGroup(group=group, advantages=(0.0,), outcome="train")


def test_models_are_warmed_up_while_servers_start() -> None:
    config, told = compose_cached(["experiment=demo"]), Mock()
    told.wait_until_synced.return_value = {}
    dispatch: Any = CountingDispatch()
    job = cast(RlJob, jobs_of(config)[-1])
    ReinforcementLearning(job, config, dispatch, Mock(), told, Mock(), told).begin(5)
    assert [call[0] for call in told.mock_calls] == ["start", "run", "wait_until_synced"]


class BaselineAfter(CountingDispatch):
    """The baseline's result arrives with optimizer step `arrives`; 0: when somebody waits for it."""

    def __init__(self, streams: FileStreams, arrives: int) -> None:
        super().__init__()
        self._streams, self._arrives = streams, arrives

    def optim_step(self, *_: object) -> dict[str, float]:
        metrics = super().optim_step()
        if self.steps == self._arrives:
            self.arrive()
        return metrics

    def arrive(self) -> None:
        self._streams.publish("eval_results", evaluated(0))


def evaluated(version: int) -> EvalResult:
    return EvalResult(
        id=f"a-0:{version}",
        policy_version=version,
        accuracy=0.5,
        prompts=4,
        version_min=version,
        version_max=version,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("max_lag", "steps", "arrives", "every", "published"),
    [
        (2, 5, 1, 0, [0, 1, 2, 3, 4, 5]),  # at once
        (2, 5, 2, 0, [0, 2, 3, 4, 5]),  # during the second step: version 1 is never sent
        (2, 5, 0, 0, [0, 3, 4, 5]),  # after max_lag + 1 steps the trainer waits
        (0, 3, 0, 0, [0, 1, 2, 3]),
        (2, 2, 0, 0, [0, 2]),  # the last version is always sent
        (2, 4, 0, 1, [0, 1, 2, 3, 4]),  # version 1 must be evaluated too
    ],
)
def test_servers_keep_the_first_weights_until_these_are_evaluated_while_steps_train(
    tmp_path: Path, max_lag: int, steps: int, arrives: int, every: int, published: list[int]
) -> None:
    sizes = [f"training.prompts_per_step={PROMPTS}", f"training.steps={steps}", f"training.eval_every={every}"]
    config = compose_cached(["experiment=demo", f"training.max_lag={max_lag}", *sizes])
    publisher: Any = Mock(**{"wait_until_synced.return_value": {}, "start.return_value": {}})
    logged: list[int] = []
    with FileStreams(AttemptPaths(tmp_path, "r", "a-0"), 1 << 20) as streams:
        dispatch = BaselineAfter(streams, arrives)
        streams.publish_many("prepared", [prepared(position) for position in range(PROMPTS * steps)])
        batches = GroupBatches(streams, SharedState(streams), Ledger(), config, lambda: None, vocabulary=17)
        trained_at_wait: list[int] = []

        def answer_open_requests() -> None:
            """The pulse of a wait: only now the actor answers."""
            trained_at_wait.append(dispatch.steps)
            dispatch.arrive()
            for version in range(1, steps + 1):
                streams.publish("eval_results", evaluated(version))

        evaluations = Evaluations(
            streams,
            "a-0",
            schedules_of(config),
            (),
            lambda version, metrics, eval_set: logged.append(version),
            answer_open_requests,
        )
        job = cast(RlJob, jobs_of(config)[-1])
        algorithm = ReinforcementLearning(
            job, config, cast(RankGroup, dispatch), batches, publisher, evaluations, Mock()
        )
        TrainLoop(Book(dispatch, Ledger()), CheckpointCadence(100)).run(algorithm, 0)
    assert [call.args[0] for call in publisher.start.mock_calls] == published
    assert logged[0] == 0
    assert logged.count(0) == 1
    if not arrives:
        assert trained_at_wait[0] == published[1], "steps were trained before anybody waited"


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_the_gate_admits_the_steps_for_which_servers_keep_the_first_weights(max_lag: int) -> None:
    gate = StalenessGate(PROMPTS, max_lag)
    for version in range(max_lag + 2):
        gate.advance(version, slowest=0)
        assert (gate.room(0) >= PROMPTS) == (version <= max_lag)


def test_the_lengths_of_what_was_sampled_are_measured() -> None:
    """Of sampled tokens alone, over all rows of a sample."""

    def sample(tokens: int, sampled: list[int]) -> Sample:
        return Sample(
            tokens=np.arange(1, tokens + 1, dtype="<i4").tobytes(),
            sampled=np.array(sampled, "u1").tobytes(),
            logprobs=np.zeros(tokens, "<f4").tobytes(),
            reward=0.0,
            finish="stop",
            version_min=0,
            version_max=0,
        )

    short, long = sample(3, [0, 1, 1]), sample(6, [0, 1, 1, 0, 1, 1])
    group = structs.replace(prepared(0).group, samples=(short, long))
    found = batch_metrics([structs.replace(prepared(0), group=group, advantages=(0.0, 0.0))], version=0)
    assert (found["completion_length/mean"], found["completion_length/max"]) == (3.0, 4.0)


def test_groups_without_a_signal_are_counted_with_those_that_were_dropped_for_it() -> None:
    def group(*rewards: float) -> PreparedGroup:
        one = prepared(0)
        samples = tuple(structs.replace(one.group.samples[0], reward=reward) for reward in rewards)
        return structs.replace(one, group=structs.replace(one.group, samples=samples))

    groups = [group(1.0, 1.0), group(1.0, 0.0), group(0.0, 0.5)]
    assert zero_variance(groups, dropped=0) == pytest.approx(1 / 3)
    assert zero_variance(groups, dropped=2) == pytest.approx(3 / 5)
