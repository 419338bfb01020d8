"""The actor's process: a real Redis, servers over real HTTP, and the test in the trainer's place."""

import math
import resource
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pipeline.transport import Streams
from pipeline.transport.eval_records import EvalRequest, EvalResult
from pipeline.transport.ledger import Ledger
from pipeline.transport.sample_records import SAMPLED_TOKENS, TASK_CALLS, Group, PreparedGroup, Reissue
from pipeline.transport.shared_state import SharedState
from pipeline.transport.topic_segments import SegmentPosition, walk
from pipeline.utils.subprocesses import Child, tail
from pipeline.utils.waiting import wait_for
from tests.fakes.async_server import ADDRESS
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support.processes import runs
from tests.support.runs.attempts import Attempt, an_attempt
from tests.support.servers.policy_server import (
    PolicyServer,
    ServerProcess,
    a_policy_server,
    broken,
    disconnected,
    refused,
)
from tests.support.servers.redis_attempts import copy_of, go_back, running_redis

pytestmark = pytest.mark.integration

PROMPTS, SAMPLES, MAX_LAG = 4, 4, 1
LIMIT = PROMPTS * (MAX_LAG + 1)
OTHERS = 1 << 16
"""The number before the first token of a second server."""


@dataclass
class Trainer:
    """The test in the trainer's place: posts versions, settles groups."""

    attempt: Attempt
    streams: Streams
    servers: list[PolicyServer]

    def __post_init__(self) -> None:
        self.board, self.ledger, self.version = SharedState(self.streams), Ledger(), 0
        self.reader = self.streams.reader("groups", Group, "preprocessor")

    def begin(self) -> None:
        self.board.post_ledger(self.ledger.snapshot())
        self.update(0)

    def update(self, version: int) -> None:
        """New weights on every server."""
        self.version = version
        self.board.post_progress(version, self.ledger.done_count)
        for server in self.servers:
            server.version = version
            self.board.post_server(f"{ADDRESS}:{server.port}", version)

    def take(self, count: int, *, refused: int | None = None) -> list[Group]:
        """The next `count` groups, given up, and settled but for the one at the position `refused`."""
        groups: list[Group] = []
        while len(groups) < count:
            entries = self.reader.read(count - len(groups), 20)
            assert entries, f"{len(groups)} of {count} groups came"
            self.reader.acknowledge([entry.id for entry in entries])
            groups += [entry.record for entry in entries]
        for group in groups:
            if group.position != refused:
                self.ledger.mark_done(group.position, "trained", self.version)
        return groups

    def numbers(self) -> dict[str, float]:
        """The actor's last report."""
        status = self.attempt.context("actor").status()
        return status.numbers if status else {}

    def wait_for_number(self, name: str, value: float) -> None:
        def arrived() -> bool:
            return abs(self.numbers().get(name, -1.0) - value) < 1e-3

        wait_for(f"{name} = {value}", arrived, 20, missing=lambda: str(self.numbers()))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def a_trainer(
    stack: ExitStack,
    run: Path,
    *,
    servers: int = 2,
    others: Sequence[int] = (),
    task: str | dict[str, Any] = "arithmetic",
    startup_seconds: float = 60,
    **rollout: Any,
) -> Trainer:
    """`others` are the ports of further servers."""
    config = make_config(
        cluster={"scheduler": "local", "startup_seconds": startup_seconds},
        model={"path": "tiny_qwen3", "init": "random", "max_length": 64},
        task=task if isinstance(task, dict) else {"name": task},
        training={"steps": 100, "prompts_per_step": PROMPTS, "max_lag": MAX_LAG},
        rollout={"group_size": SAMPLES, "max_tokens": 8, "concurrency": 16, **rollout},
    )
    running = [stack.enter_context(a_policy_server()) for _ in range(servers)]
    ports = [*(server.port for server in running), *others]
    attempt = stack.enter_context(an_attempt(run, config, tuple((ADDRESS, port) for port in ports)))
    return Trainer(attempt, stack.enter_context(attempt.connect()), running)


@pytest.fixture
def trainer(stack: ExitStack, tmp_path: Path) -> Trainer:
    return a_trainer(stack, tmp_path)


def positions(groups: list[Group]) -> list[int]:
    return sorted(group.position for group in groups)


def test_nothing_is_asked_of_a_server_before_the_trainer_says_that_it_is_current(trainer: Trainer) -> None:
    trainer.attempt.start("actor")
    trainer.board.post_ledger(trainer.ledger.snapshot())
    trainer.board.post_progress(0, 0)
    trainer.board.post_server(f"{ADDRESS}:{trainer.servers[0].port}", 0)
    trainer.take(LIMIT)
    assert trainer.servers[0].requests == LIMIT
    assert trainer.servers[1].requests == 0


def test_groups_come_in_order_and_stop_at_the_staleness_limit(trainer: Trainer) -> None:
    trainer.attempt.start("actor")
    trainer.begin()
    trainer.wait_for_number("groups", LIMIT)
    trainer.wait_for_number("gate_blocked", 1.0)
    first = trainer.take(LIMIT)
    assert positions(first) == list(range(LIMIT))
    assert all(len(group.samples) == SAMPLES and not group.failures for group in first)
    assert {sample.reward for sample in first[0].samples} == {0.0, 1.0}
    # What the trainer reads as progress: a prompt and a reward of each sample, and every token.
    assert trainer.numbers()[TASK_CALLS] == LIMIT * (1 + SAMPLES)
    sampled = [sample.sampled_array().sum() for group in first for sample in group.samples]
    assert trainer.numbers()[SAMPLED_TOKENS] == sum(sampled)
    trainer.update(1)
    second = trainer.take(LIMIT)
    assert positions(second) == list(range(LIMIT, 2 * LIMIT))
    assert {sample.version_min for group in second for sample in group.samples} == {1}


def test_positions_that_the_streams_lost_are_issued_again(trainer: Trainer) -> None:
    actor = trainer.attempt.start("actor")
    place = trainer.attempt.context("redis")
    kept = copy_of(place)
    trainer.begin()
    trainer.wait_for_number("groups", LIMIT)
    trainer.attempt.redis.kill()
    go_back(place, kept)
    with running_redis(place):
        assert positions(trainer.take(LIMIT)) == list(range(LIMIT))
        actor.stop(5)


def test_a_server_that_fails_costs_no_sample(trainer: Trainer) -> None:
    trainer.servers[0].faults += [broken, disconnected, broken]
    trainer.attempt.start("actor")
    trainer.begin()
    groups = trainer.take(LIMIT)
    assert positions(groups) == list(range(LIMIT))
    assert not any(group.failures for group in groups)


def test_a_refused_request_fails_its_group_and_the_next_goes_on(trainer: Trainer) -> None:
    for server in trainer.servers:
        server.faults.append(refused)
    trainer.attempt.start("actor")
    trainer.begin()
    groups = trainer.take(LIMIT)
    failed = [group for group in groups if group.failures]
    assert len(failed) == 2
    assert all(not group.samples and "too long" in group.failures[0] for group in failed)
    trainer.wait_for_number("failed/request refused RolloutError", 2 * SAMPLES)


def test_rewards_that_fail_are_counted_by_reason_and_training_goes_on(stack: ExitStack, tmp_path: Path) -> None:
    trainer = a_trainer(stack, tmp_path, task="tests.support.tasks.failing_tasks:SometimesWrong")
    trainer.attempt.start("actor")
    trainer.begin()
    groups = trainer.take(LIMIT)
    assert all(len(group.samples) + len(group.failures) == SAMPLES for group in groups)
    reasons = Counter(failure.partition(":")[0] for group in groups for failure in group.failures)
    assert reasons.keys() == {"reward is not finite", "reward is no number", "reward raised ZeroDivisionError"}
    for reason, count in reasons.items():
        trainer.wait_for_number(f"failed/{reason}", count)


def test_a_task_that_always_fails_stops_the_run_with_its_reason(stack: ExitStack, tmp_path: Path) -> None:
    trainer = a_trainer(
        stack, tmp_path, task="tests.support.tasks.failing_tasks:AlwaysRaises", max_consecutive_failures=16
    )
    child = trainer.attempt.start("actor")
    trainer.begin()
    assert "16 samples in a row failed" in failure_of(trainer, child)
    last = tail(child.log)[-1]
    assert "16 samples in a row failed" in last
    assert "reward raised ValueError: the verifier is broken" in last


def failure_of(trainer: Trainer, child: Child) -> str:
    """What the actor reported when it ended with code 1."""
    assert wait_for("its end", lambda: None if child.poll() is None else [child.poll()], WAIT_SECONDS) == [1]
    status = trainer.attempt.context("actor").status()
    assert status is not None
    assert status.state == "failed"
    return status.detail


def test_a_foreign_error_ends_the_process_with_its_traceback_while_rewards_hang_and_none_is_left(
    stack: ExitStack, tmp_path: Path
) -> None:
    trainer = a_trainer(stack, tmp_path, task="tests.support.tasks.failing_tasks:HangsThenBreaks")
    child = trainer.attempt.start("actor")
    trainer.begin()
    wait_for("rewards", lambda: sum(server.requests for server in trainer.servers) == LIMIT, WAIT_SECONDS)
    workers = psutil.Process(child.pid).children(recursive=True)
    assert workers
    for position in range(LIMIT):
        trainer.ledger.mark_done(position, "trained", 0)
    trainer.update(1)
    assert failure_of(trainer, child) == "ZeroDivisionError: a foreign error"
    assert "Traceback" in child.log.read_text()
    assert not any(map(runs, workers))


def test_an_actor_whose_trainer_posts_no_ledger_ends_with_what_it_missed(stack: ExitStack, tmp_path: Path) -> None:
    trainer = a_trainer(stack, tmp_path, startup_seconds=5)
    child = trainer.attempt.start("actor")
    assert failure_of(trainer, child).startswith("waited 10.0 s for the trainer's ledger")


def test_what_was_in_flight_when_an_actor_died_is_issued_again(trainer: Trainer) -> None:
    for server in trainer.servers:
        server.hold.clear()
    child = trainer.attempt.start("actor")
    trainer.begin()
    wait_for("requests in flight", lambda: sum(server.in_flight for server in trainer.servers) == LIMIT, WAIT_SECONDS)
    child.kill()
    for server in trainer.servers:
        server.hold.set()
    trainer.attempt.start("actor")
    assert positions(trainer.take(LIMIT)) == list(range(LIMIT))


def test_a_new_actor_gives_each_position_of_a_mix_the_prompt_that_was_chosen_before(
    stack: ExitStack, tmp_path: Path
) -> None:
    """A curriculum over two tasks: the record of the first actor's choice counts for what the second one samples."""
    sums = {"name": "arithmetic", "options": {"size": 5, "held_out": 4}}
    task = {"name": "mix", "tasks": [sums, {**sums, "label": "others", "weight": 3}]}
    trainer = a_trainer(stack, tmp_path, servers=1, task=task, curriculum={"weight": 0.25, "tries": 1})
    child = trainer.attempt.start("actor")
    trainer.begin()
    groups = trainer.take(LIMIT)
    trainer.servers[0].hold.clear()
    trainer.update(1)
    wait_for("requests in flight", lambda: trainer.servers[0].in_flight > 0, WAIT_SECONDS)
    child.kill()
    trainer.servers[0].hold.set()
    # The record as it was: what the second actor learns from other samples changes nothing.
    record = {file.name: file.read_bytes() for file in (tmp_path / "curriculum").iterdir()}
    trainer.board.post_ledger(trainer.ledger.snapshot())
    trainer.attempt.start("actor")
    groups += trainer.take(LIMIT)
    assert positions(groups) == list(range(2 * LIMIT)), "each position of the ledger once"
    (chosen,) = (msgspec.json.decode(data)["body"]["prompts"] for data in record.values())
    assert [group.prompt for group in sorted(groups, key=lambda group: group.position)] == chosen[: 2 * LIMIT]
    assert all(group.task == ("arithmetic" if group.prompt < 5 else "others") for group in groups)
    labels = Counter(group.task for group in groups)
    assert labels == {"arithmetic": LIMIT / 2, "others": 3 * LIMIT / 2}
    assert {file.name: file.read_bytes() for file in (tmp_path / "curriculum").iterdir()} == record


@pytest.mark.parametrize("requeued", [False, True])
def test_episodes_of_a_lost_actor_continue_in_place_and_in_the_next_attempt(
    stack: ExitStack, tmp_path: Path, requeued: bool
) -> None:
    """The second actor samples no turn that the first one had, and each sampled token is in exactly one sample."""
    trainer = a_trainer(stack, tmp_path, servers=1, task="tests.support.tasks.dialogue_tasks:Dialogue")
    (server,) = trainer.servers
    child = trainer.attempt.start("actor")
    server.limit = SAMPLES * 2  # one request fewer than any group needs: none is published
    trainer.begin()
    wait_for("the answers", lambda: server.limit == 0, WAIT_SECONDS)
    recorded = server.sampled
    wait_for("the journal", lambda: recorded_tokens(tmp_path) == recorded, WAIT_SECONDS)
    child.kill()
    wait_for("the end of its connections", lambda: server.in_flight == 0, WAIT_SECONDS)
    server.limit = math.inf
    if requeued:
        trainer.attempt.redis.stop(5)
        trainer = next_attempt(stack, trainer)
    trainer.attempt.start("actor")
    trainer.begin()
    groups = trainer.take(LIMIT)
    trainer.wait_for_number("reused_tokens", recorded)
    trainer.wait_for_number("resampled_tokens", 0)
    sampled = {
        int(-1024 * logprob)
        for group in groups
        for sample in group.samples
        for logprob in sample.logprob_array()[sample.sampled_array() > 0]
    }
    assert sampled == set(range(1, server.sampled + 1))


def test_episodes_continue_on_another_server_when_theirs_is_killed_in_the_middle(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Each token that a server sent is in exactly one sample, also those of the server that was killed."""
    doomed = ServerProcess(limit=SAMPLES)
    stack.callback(doomed.kill)
    task = "tests.support.tasks.dialogue_tasks:Dialogue"
    trainer = a_trainer(stack, tmp_path, servers=1, task=task, others=[doomed.port])
    (server,) = trainer.servers
    server.hold.clear()
    server.sampled = OTHERS
    trainer.attempt.start("actor")
    trainer.board.post_server(f"{ADDRESS}:{doomed.port}", 0)
    trainer.begin()
    sampled = doomed.sampled()
    wait_for("the journal", lambda: recorded_tokens(tmp_path) == sampled, WAIT_SECONDS)
    doomed.kill()
    server.hold.set()
    groups = trainer.take(LIMIT)
    assert not any(group.failures for group in groups)
    numbers = [
        round(-1024 * logprob)
        for group in groups
        for sample in group.samples
        for logprob in sample.logprob_array()[sample.sampled_array() > 0]
    ]
    assert sorted(numbers) == [*range(1, sampled + 1), *range(OTHERS + 1, server.sampled + 1)]


def next_attempt(stack: ExitStack, trainer: Trainer) -> Trainer:
    """The requeued job, with the same servers."""
    before = trainer.attempt
    endpoints = tuple((ADDRESS, server.port) for server in trainer.servers)
    attempt = stack.enter_context(an_attempt(before.paths.run, before.config, endpoints, "7-1"))
    return Trainer(attempt, stack.enter_context(attempt.connect()), trainer.servers)


def recorded_tokens(run: Path) -> int:
    """The tokens in the journal of a run, read as its actor writes it."""
    folder, total = run / "episodes", 0
    for frame in walk(folder, SegmentPosition(0, 0)):
        event = msgspec.msgpack.decode(msgspec.msgpack.decode(frame.data)[3])
        total += len(event.get("completion", {}).get("tokens", ()))
    return total


def test_a_restarted_actor_fills_the_holes_and_doubles_nothing(trainer: Trainer) -> None:
    """Settled: 0, 1, 5. In `prepared`: 2. In `groups`: 7. So 3, 4 and 6 are missing."""
    for position in (0, 1, 5):
        trainer.ledger.mark_done(position, "trained", 1)
    trainer.streams.publish("prepared", PreparedGroup(group=Group(position=2, prompt=0)))
    trainer.streams.publish("groups", Group(position=7, prompt=0))
    trainer.begin()
    trainer.attempt.start("actor")
    room = LIMIT - len((2, 7))
    groups = trainer.take(1 + room)
    assert positions(groups) == [3, 4, 6, 7, 8, 9, 10]


def test_a_refused_position_is_issued_again_and_its_request_outlives_the_actor(trainer: Trainer) -> None:
    child = trainer.attempt.start("actor")
    trainer.begin()
    trainer.take(LIMIT, refused=2)
    for server in trainer.servers:
        server.hold.clear()
    trainer.streams.publish("reissue", Reissue(position=2, reason="older than max_lag"))
    trainer.update(1)
    wait_for("requests in flight", lambda: sum(server.in_flight for server in trainer.servers) >= PROMPTS, WAIT_SECONDS)
    child.kill()
    trainer.board.post_ledger(trainer.ledger.snapshot())
    for server in trainer.servers:
        server.hold.set()
    trainer.attempt.start("actor")
    assert 2 in positions(trainer.take(LIMIT))
    wait_for("the request to be settled", lambda: trainer.streams.depth("reissue").entries == 0, WAIT_SECONDS)


def test_a_position_that_was_refused_twice_is_not_overtaken_again(stack: ExitStack, tmp_path: Path) -> None:
    trainer = a_trainer(stack, tmp_path, servers=1)
    (server,) = trainer.servers
    release = threading.Event()
    trainer.attempt.start("actor")
    trainer.begin()
    trainer.take(LIMIT, refused=2)
    server.faults.append(server.late(release))
    trainer.streams.publish("reissue", Reissue(position=2, reason="older than max_lag", awaited=True))
    wait_for("its request", lambda: not server.faults, WAIT_SECONDS)
    trainer.update(1)
    trainer.wait_for_number("groups", LIMIT + PROMPTS - 1)
    trainer.wait_for_number("gate_blocked", 1.0)
    others = positions(trainer.take(PROMPTS - 1))
    assert others == [LIMIT, LIMIT + 1, LIMIT + 2], "one more, and the trainer could step on without it"
    release.set()
    assert trainer.take(1)[0].position == 2


def test_an_evaluation_is_answered_while_the_gate_is_closed(trainer: Trainer) -> None:
    results = trainer.streams.reader("eval_results", EvalResult, "trainer")
    trainer.attempt.start("actor")
    trainer.begin()
    trainer.wait_for_number("groups", LIMIT)
    trainer.streams.publish("eval_requests", EvalRequest(id="7-0:0", policy_version=0))
    (entry,) = results.read(1, 30)
    assert (entry.record.id, entry.record.accuracy, entry.record.prompts) == ("7-0:0", 1.0, 256)
    assert trainer.streams.depth("eval_requests").entries == 0
    assert all(server.requests > LIMIT for server in trainer.servers), "all servers take part"


def test_an_evaluation_that_an_earlier_attempt_asked_for_is_given_up_unanswered(trainer: Trainer) -> None:
    results = trainer.streams.reader("eval_results", EvalResult, "trainer")
    trainer.streams.publish("eval_requests", EvalRequest(id="6-0:4", policy_version=4))
    trainer.streams.publish("eval_requests", EvalRequest(id="7-0:0", policy_version=0))
    child = trainer.attempt.start("actor")
    trainer.begin()
    (entry,) = results.read(1, 30)
    assert entry.record.id == "7-0:0"
    wait_for("both requests to be settled", lambda: trainer.streams.depth("eval_requests").entries == 0, WAIT_SECONDS)
    assert "evaluation 6-0:4 is of an earlier attempt" in child.log.read_text()


def test_it_stops_when_it_is_told_to_with_requests_in_flight(trainer: Trainer) -> None:
    for server in trainer.servers:
        server.hold.clear()
    child = trainer.attempt.start("actor")
    trainer.begin()
    wait_for("requests in flight", lambda: sum(server.in_flight for server in trainer.servers) > 0, WAIT_SECONDS)
    assert child.stop(20) == 0


def test_it_stops_when_it_is_told_to_before_the_first_weights(trainer: Trainer) -> None:
    child = trainer.attempt.start("actor")
    assert child.stop(5) == 0
    status = trainer.attempt.context("actor").status()
    assert status is not None
    assert status.state == "stopped"


def test_it_may_open_as_many_files_as_the_system_permits_and_programs_of_a_task_as_before(
    stack: ExitStack, tmp_path: Path
) -> None:
    trainer = a_trainer(stack, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        actor = psutil.Process(trainer.attempt.start("actor", {"STARTED_BY": "exec"}).pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert actor.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    workers = wait_for("a worker of the task", actor.children, WAIT_SECONDS)
    wait_for("its command", lambda: "task_worker" in " ".join(workers[0].cmdline()), WAIT_SECONDS)
    assert workers[0].rlimit(psutil.RLIMIT_NOFILE) == (256, hard)
