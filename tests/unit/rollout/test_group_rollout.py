"""Groups: what a failing task costs, how rollouts share a request, and the order of issue."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.config import RunConfig, TaskConfig
from pipeline.environments import Episode, Policy, Prompt, Task, load_task, user_prompt
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.episode import EpisodeBranch
from pipeline.errors import RolloutError, TaskError
from pipeline.rollout.eval_rollouts import Evaluation
from pipeline.rollout.group_rollout import FailureStreak, GroupBuilder
from pipeline.rollout.issue_queue import IssueQueue
from pipeline.rollout.server_pool import InferenceClient
from pipeline.rollout.time_fractions import TimeFraction
from pipeline.transport.eval_records import EvalRequest
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import Group
from tests.fakes.configs import make_config
from tests.fakes.inline_calls import InlineCalls
from tests.unit.environments.test_tasks import TINY, Said

CHAT = ChatTokenizer(TINY)
VOCABULARY = CHAT.vocabulary or 0
FOUR = tuple(CHAT.encode("4$"))


class Sums(Task):
    """Asks for 2+2; the methods of a test replace its own."""

    name = "sums"

    def __len__(self) -> int:
        return 8

    def prompt(self, index: int) -> Prompt:
        return user_prompt("2+2", answer="4")

    def held_out(self) -> list[Prompt]:
        return [user_prompt("2+2", "4"), user_prompt("2+3", "5")]

    def reward(self, prompt: Prompt, text: str) -> Any:
        return float(text == prompt.answer)


class Answering:
    """Servers that say the same to everybody; remembers what they were asked."""

    def __init__(self, turn: Said | None = None) -> None:
        self.turn = turn or Said(FOUR, 5, 6)
        self.asked: list[tuple[tuple[int, ...], int, float, int]] = []

    async def generate(
        self, token_ids: Sequence[int], *, n: int, temperature: float, max_tokens: int, **_: Any
    ) -> list[Said]:
        self.asked.append((tuple(token_ids), n, temperature, max_tokens))
        return [self.turn] * n


class Routing(Answering):
    """Servers that return a record of each token that they read, but of those that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[tuple[bytes, ...]] = []

    async def generate(self, token_ids: Sequence[int], *, n: int, known: tuple[bytes, ...], **_: Any) -> list[Said]:
        self.known.append(known)
        read = len(token_ids) + len(FOUR) - 1
        new = tuple(bytes([min(2, len(self.known)), token]) for token in range(len(known), read))
        return [Said(FOUR, 5, 6, routed_experts=(*known, *new))] * n


class Placing(Answering):
    """Servers of which each response comes from another; remembers which one a request named, and which version."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[str] = []
        self.versions: list[int | None] = []
        self.earlier: list[tuple[int, bool]] = []

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        n: int,
        cached_on: str,
        cached_at: int | None,
        earlier: Sequence[int],
        **_: Any,
    ) -> list[Said]:
        self.named.append(cached_on)
        self.versions.append(cached_at)
        self.earlier.append((len(earlier), list(earlier) == list(token_ids[: len(earlier)])))
        return [Said(FOUR, 5, 6, server=f"server {len(self.named)}")] * n


class Refusing(Answering):
    async def generate(self, token_ids: Sequence[int], **_: Any) -> list[Said]:
        raise RolloutError("400: too long")


def config(**rollout: Any) -> RunConfig:
    return make_config(
        model={"path": "tiny_qwen3", "max_length": 32}, rollout={"group_size": 4, "max_tokens": 8, **rollout}
    )


def a_builder(task: Task, servers: InferenceClient, **rollout: Any) -> GroupBuilder:
    return GroupBuilder(task, InlineCalls(task), CHAT, servers, config(**rollout))


def build(task: Task, servers: Answering | None = None, **rollout: Any) -> Group:
    return asyncio.run(a_builder(task, servers or Answering(), **rollout).build(3))


def a_task(**methods: Callable[..., Any]) -> Task:
    kind: type[Task] = type("Replaced", (Sums,), methods)
    return kind(None, 0)


def raising(*_: Any) -> Any:
    raise ValueError("the verifier\nis broken")


def leaving(*_: Any) -> Any:
    raise SystemExit(3)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def speechless(*_: Any) -> Any:
    raise Speechless


def test_a_group_holds_the_tokens_and_logprobs_that_the_server_gave() -> None:
    group = build(a_task())
    assert (group.position, len(group.samples), group.failures) == (3, 4, ())
    sample = group.samples[0]
    sample.check()
    assert CHAT.decode(sample.token_array().tolist()) == "^2+2=4"
    assert sample.sampled_array().tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert sample.logprob_array().tolist() == [0, 0, 0, 0, 0, -0.5, -0.5]
    assert (sample.reward, sample.version_min, sample.version_max, sample.finish) == (1.0, 5, 6, "stop")
    assert sample.rows()[0].versions.tolist() == [5] * 6 + [6]


def test_the_rollouts_of_a_group_share_one_request() -> None:
    servers = Answering()
    build(a_task(), servers)
    assert [(n, temperature, most) for _, n, temperature, most in servers.asked] == [(4, 1.0, 8)]


def test_a_turn_never_asks_for_more_tokens_than_the_model_has_room_for() -> None:
    servers = Answering()
    builder = a_builder(a_task(), servers, max_tokens=30)
    asyncio.run(builder.build(0))
    assert servers.asked[0][3] == 32 - len("^2+2=")


async def two_turns(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    turn = await policy.sample(policy.prompt)
    episode = (
        Episode.begin(policy.prompt)
        .append_turn(turn, policy.decode(turn.tokens))
        .append_observation(policy.encode("2+2="))
    )
    turn = await policy.sample(episode.tokens)
    return episode.append_turn(turn, policy.decode(turn.tokens))


def test_later_turns_are_asked_for_one_by_one() -> None:
    servers = Answering()
    group = build(a_task(rollout=two_turns), servers)
    assert [n for _, n, _, _ in servers.asked] == [4, 1, 1, 1, 1]
    assert CHAT.decode(group.samples[0].token_array().tolist()) == "^2+2=4$2+2=4"
    assert group.samples[0].turns == 2


def test_a_later_turn_names_the_server_that_has_its_prefix() -> None:
    async def three_turns(self: Task, prompt: Prompt, policy: Policy) -> Episode:
        episode = await two_turns(self, prompt, policy)
        turn = await policy.sample(episode.tokens)
        return episode.append_turn(turn, policy.decode(turn.tokens))

    servers = Placing()
    build(a_task(rollout=three_turns), servers, group_size=2)
    assert servers.named[:3] == ["", "server 1", "server 1"]
    assert sorted(servers.named[3:]) == ["server 2", "server 3"]
    assert servers.versions == [None, 5, 5, 5, 5]  # of the first turn
    assert servers.earlier[:3] == [(0, True), (7, True), (7, True)]  # the prompt and two sampled tokens


def test_a_later_turn_asks_for_the_experts_of_new_tokens_only_and_each_token_keeps_its_first() -> None:
    servers = Routing()
    sample, _ = build(a_task(rollout=two_turns), servers, group_size=2).samples
    tokens, first = len(sample.token_array()), len("^2+2=") + len(FOUR) - 1
    assert [len(known) for known in servers.known] == [0, first, first]
    records = [(1 if token < first else 2, token) for token in range(tokens - 1)]
    assert sample.routed_experts == b"".join(map(bytes, records))


async def nothing(self: Task, prompt: Prompt, policy: Policy) -> Any:
    return "an answer"


async def prompt_only(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    return Episode.begin(policy.prompt)


def observing(token: int) -> Callable[..., Any]:
    async def rollout(self: Task, prompt: Prompt, policy: Policy) -> Episode:
        turn = await policy.sample(policy.prompt)
        return Episode.begin(policy.prompt).append_turn(turn, policy.decode(turn.tokens)).append_observation([token])

    return rollout


async def endless(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    episode = Episode.begin(policy.prompt)
    while True:
        episode = episode.append_turn(await policy.sample(episode.tokens), "4")


async def timing_out(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    raise TimeoutError("the tool did not answer")


async def hanging(self: Task, prompt: Prompt, policy: Policy) -> Episode:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def awaiting_what_is_cancelled(*_: Any) -> Episode:
    """As with a client whose connection another task closed: the error is not the end of this rollout's own task."""
    other = asyncio.create_task(asyncio.Event().wait())
    other.cancel()
    await other
    raise AssertionError("the other task was cancelled")


async def leaving_later(*_: Any) -> Episode:
    await asyncio.sleep(0)
    raise SystemExit(3)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ({"reward": raising}, "reward raised ValueError: the verifier is broken"),
        ({"reward": lambda *_: float("nan")}, "reward is not finite: nan"),
        ({"reward": lambda *_: float("-inf")}, "reward is not finite: -inf"),
        ({"reward": lambda *_: "1.0"}, "reward is no number: str '1.0'"),
        ({"reward": lambda *_: None}, "reward is no number: NoneType None"),
        ({"prompt": raising}, "prompt raised ValueError: the verifier is broken"),
        ({"prompt": lambda *_: user_prompt("a letter")}, "prompt could not be tokenised"),
        ({"prompt": lambda *_: "2+2"}, "prompt raised TypeError: expected a Prompt, found str"),
        ({"prompt": lambda *_: Prompt(None)}, "prompt could not be rendered TemplateError: TypeError"),
        ({"reward": leaving}, "reward raised SystemExit: 3"),
        ({"reward": speechless}, "reward raised Speechless: its message cannot be made"),
        ({"rollout": raising}, "rollout raised ValueError: the verifier is broken"),
        ({"rollout": timing_out}, "rollout raised TimeoutError: the tool did not answer"),
        ({"rollout": awaiting_what_is_cancelled}, "rollout raised CancelledError: "),
        ({"rollout": leaving_later}, "rollout raised SystemExit: 3"),
        ({"rollout": nothing}, "rollout returned no episode: str"),
        ({"rollout": prompt_only}, "rollout sampled nothing"),
        ({"rollout": observing(VOCABULARY)}, f"rollout has a foreign token: id {VOCABULARY} is outside of"),
        ({"rollout": observing(-1)}, "rollout has a foreign token: id -1 is outside of"),
        ({"rollout": endless}, "request refused RolloutError: 33 tokens leave no room"),
    ],
)
def test_what_a_task_does_wrong_is_the_reason_of_each_sample(methods: dict[str, Any], reason: str, extra: int) -> None:
    group = build(a_task(**methods), oversample=extra)
    assert group.samples == ()
    assert len(group.failures) in (4, 4 + extra)
    assert all(failure.startswith(reason) for failure in group.failures), group.failures


def changed(**fields: Any) -> Callable[..., Any]:
    """A rollout of one turn, whose episode has other fields."""

    async def rollout(self: Task, prompt: Prompt, policy: Policy) -> Episode:
        turn = await policy.sample(policy.prompt)
        return replace(Episode.begin(policy.prompt).append_turn(turn, policy.decode(turn.tokens)), **fields)

    return rollout


def sent(group: Group) -> Group:
    """The group as its reader decodes it."""
    return decode_record(encode_record(group), Group)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"metrics": {"x": None}}, "rollout has a wrong metric: metric x is no number: NoneType None"),
        ({"metrics": {"x": "3"}}, "rollout has a wrong metric: metric x is no number: str '3'"),
        ({"metrics": {"x": float("nan")}}, "rollout has a wrong metric: metric x is not finite: nan"),
        ({"metrics": None}, "rollout cannot be recorded AttributeError: "),
        ({"tokens": None}, "rollout cannot be recorded TypeError: "),
        ({"sampled": (0, 1)}, "rollout cannot be recorded IndexError: "),
        ({"logprobs": (float("nan"),) * 7}, "rollout cannot be recorded RecordError: a log-probability or"),
        ({"finish": "eos"}, "rollout cannot be recorded RecordError: "),
        ({"server": None}, "rollout cannot be recorded RecordError: "),
        ({"version_min": None}, "rollout cannot be recorded TypeError: "),
        ({"version_max": 1 << 70}, "rollout cannot be recorded OverflowError: "),
        ({"branches": (EpisodeBranch(5, 1, (3,), (1,), (-0.5,)),)}, "rollout cannot be recorded IndexError: "),
    ],
)
def test_an_episode_that_no_record_can_hold_fails_its_sample_only(
    fields: dict[str, Any], reason: str, extra: int
) -> None:
    group = build(a_task(rollout=changed(**fields)), oversample=extra)
    assert sent(group) == group
    assert group.samples == ()
    assert all(failure.startswith(reason) for failure in group.failures), group.failures


def test_every_kind_of_number_is_a_metric_under_a_name_that_can_be_sent() -> None:
    metrics = {"half \ud83d": 1, "won": True, "small": np.float32(0.5), "large": np.float64(2), 3: np.bool_(True)}
    group = build(a_task(rollout=changed(metrics=metrics)))
    assert sent(group) == group
    expected = {"half \\ud83d": 1.0, "won": 1.0, "small": 0.5, "large": 2.0, "3": 1.0}
    assert [dict(sample.metrics) for sample in group.samples] == [expected] * 4


def half_an_emoji(*_: Any) -> Any:
    raise ValueError("not found: \ud83d")


@pytest.mark.parametrize("method", ["prompt", "rollout", "reward"])
def test_half_an_emoji_in_an_error_is_an_escape_in_its_reason(method: str) -> None:
    group = build(a_task(**{method: half_an_emoji}))
    assert sent(group) == group
    assert group.failures == (f"{method} raised ValueError: not found: \\ud83d",) * 4


def test_an_episode_that_no_record_can_hold_does_not_end_an_evaluation() -> None:
    task = a_task(rollout=changed(metrics={"x": None}))
    evaluation = Evaluation(task, InlineCalls(task), CHAT, Answering(), config())
    result = asyncio.run(evaluation.run(EvalRequest(id="e", policy_version=6)))
    assert (result.accuracy, result.failed, result.prompts) == (None, 2, 2)


def test_the_last_token_of_the_vocabulary_is_no_foreign_one() -> None:
    assert len(build(a_task(rollout=observing(VOCABULARY - 1))).samples) == 4


def test_a_request_that_can_never_work_fails_its_samples_with_the_servers_words() -> None:
    assert build(a_task(), Refusing()).failures == ("request refused RolloutError: 400: too long",) * 4


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.int64(1)])
def test_every_kind_of_number_is_a_reward(value: Any) -> None:
    assert [sample.reward for sample in build(a_task(reward=lambda *_: value)).samples] == [1.0] * 4


def test_one_bad_sample_costs_the_others_nothing() -> None:
    calls = iter(range(4))
    group = build(a_task(reward=lambda *_: raising() if next(calls) == 1 else 1.0))
    assert (len(group.samples), len(group.failures)) == (3, 1)


class Late(Answering):
    """Answers request number n once its event is set; remembers which were cancelled."""

    def __init__(self, requests: int, answered: Sequence[int]) -> None:
        super().__init__()
        self.events = [asyncio.Event() for _ in range(requests)]
        self.cancelled: list[int] = []
        for number in answered:
            self.events[number].set()

    async def generate(self, token_ids: Sequence[int], **asked: Any) -> list[Said]:
        number = len(self.asked)
        turns = await super().generate(token_ids, **asked)
        try:
            await self.events[number].wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return turns


def test_of_more_samples_than_are_wanted_the_first_are_the_group_and_the_others_are_ended() -> None:
    servers = Late(6, answered=(0, 2, 3, 5))
    group = build(a_task(), servers, oversample=2)
    assert [n for _, n, _, _ in servers.asked] == [1] * 6, "each ends on its own"
    assert (len(group.samples), group.failures, len(group.abandoned)) == (4, (), 2)
    assert set(servers.cancelled) == {1, 4}


def test_of_samples_that_end_together_the_first_in_order_are_kept() -> None:
    said = [Said((*FOUR[:1], 7 + place, FOUR[-1])) for place in range(6)]
    servers = Answering()
    servers.generate = lambda *_, **__: asyncio.sleep(0, [said.pop(0)])  # type: ignore[method-assign]
    group = build(a_task(), servers, oversample=2)
    assert [sample.token_array().tolist()[-2] for sample in group.samples] == [7, 8, 9, 10]
    assert len(group.abandoned) == 2


@pytest.mark.parametrize(("bad", "samples", "abandoned"), [(1, 4, 1), (2, 4, 0), (4, 2, 0), (6, 0, 0)])
def test_a_failure_is_neither_kept_nor_abandoned(bad: int, samples: int, abandoned: int) -> None:
    """The failures come first, so as many of the others are kept as there are."""

    async def rollout(self: Task, prompt: Prompt, policy: Policy) -> Episode:
        if next(calls) < bad:
            raise ValueError("the tool is broken")
        turn = await policy.sample(policy.prompt)
        return Episode.begin(policy.prompt).append_turn(turn, "4")

    calls = iter(range(6))
    group = build(a_task(rollout=rollout), oversample=2)
    assert (len(group.samples), len(group.failures), len(group.abandoned)) == (samples, bad, abandoned)


def test_an_evaluation_begins_no_sample_more_than_it_says() -> None:
    servers = Answering()
    evaluation = Evaluation(a_task(), InlineCalls(a_task()), CHAT, servers, config(oversample=3))
    asyncio.run(evaluation.run(EvalRequest(id="e", policy_version=5)))
    assert len(servers.asked) == 2


def test_a_rollout_that_hangs_fails_its_samples_at_its_deadline() -> None:
    group = build(a_task(rollout=hanging), episode_seconds=0.05)
    assert len(group.failures) == 4
    assert all(failure.startswith("rollout took too long") for failure in group.failures), group.failures


def test_a_task_that_always_fails_ends_with_its_reason() -> None:
    builder = a_builder(a_task(reward=raising), Answering(), max_consecutive_failures=8)

    async def three_groups() -> None:
        for position in range(3):
            await builder.build(position)

    with pytest.raises(TaskError, match=r"8 samples in a row failed .*; the last: reward raised ValueError"):
        asyncio.run(three_groups())


def test_one_success_starts_the_count_of_failures_again() -> None:
    patience = FailureStreak(limit=3)
    for _ in range(5):
        patience.note(0, ["reward raised ValueError: one"])
        patience.note(1, ["reward raised ValueError: two"])
    assert patience.counts == {"reward raised ValueError": 10}
    with pytest.raises(TaskError):
        patience.note(0, ["rollout sampled nothing"] * 3)


def test_the_order_of_prompts_is_the_ledgers() -> None:
    from pipeline.transport.ledger import prompt_at

    assert build(a_task()).prompt == prompt_at(3, 8, seed=0)


def test_a_group_of_a_mix_has_the_label_of_its_task_also_when_its_prompt_fails() -> None:
    sums = {"name": "arithmetic", "options": {"held_out": 4, "size": 10}}
    mix = load_task(TaskConfig(name="mix", tasks=(sums, {**sums, "label": "others"})), 0)
    builder = a_builder(mix, Answering())
    groups = [asyncio.run(builder.build(position)) for position in range(4)]
    assert sorted(group.task for group in groups) == ["arithmetic", "arithmetic", "others", "others"]
    assert all(10 * (group.task == "others") <= group.prompt < 10 + 10 * (group.task == "others") for group in groups)
    mix._tasks["arithmetic"] = mix._tasks["others"] = a_task(prompt=raising)  # type: ignore[attr-defined]
    failed = [asyncio.run(builder.build(position)) for position in range(2)]
    assert sorted(group.task for group in failed) == ["arithmetic", "others"]
    assert all("prompt raised ValueError" in group.failures[0] for group in failed)


def evaluate(task: Task, servers: Answering) -> Any:
    evaluation = Evaluation(task, InlineCalls(task), CHAT, servers, config())
    return asyncio.run(evaluation.run(EvalRequest(id="e", policy_version=5)))


def test_an_evaluation_is_greedy_and_over_all_held_out_prompts() -> None:
    servers = Answering()
    result = evaluate(a_task(), servers)
    assert {(n, temperature) for _, n, temperature, _ in servers.asked} == {(1, 0.0)}
    assert (result.id, result.policy_version, result.prompts, result.accuracy) == ("e", 5, 2, 0.5)
    assert (result.version_min, result.version_max) == (5, 6)


def test_half_of_the_held_out_prompts_failing_is_no_accuracy_but_an_error(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter(range(2))
    result = evaluate(a_task(reward=lambda *_: raising() if next(calls) else 1.0), Answering())
    assert (result.prompts, result.accuracy, result.failed) == (2, None, 1)
    assert "1 of 2 samples failed; the first: reward raised ValueError" in caplog.text


def test_an_evaluation_without_failures_tells_none(caplog: pytest.LogCaptureFixture) -> None:
    assert evaluate(a_task(), Answering()).failed == 0
    assert "failed" not in caplog.text


def test_missing_positions_are_issued_before_new_ones() -> None:
    issue = IssueQueue([5, 2], first_new=7)
    assert [issue.take() for _ in range(4)] == [2, 5, 7, 8]


def test_a_refused_position_is_issued_again_once() -> None:
    issue = IssueQueue([], first_new=3)
    assert issue.again(1)
    assert not issue.again(1)
    assert not issue.again(3), "it was never issued"
    assert [issue.take() for _ in range(2)] == [1, 3]


def test_what_was_lost_is_issued_again_but_not_what_waits_or_is_held() -> None:
    issue = IssueQueue([2], first_new=5)
    assert [issue.take() for _ in range(4)] == [2, 5, 6, 7]
    issue.again(6)
    assert issue.lost([2, 4], 6, held={7}) == 2
    assert [issue.take() for _ in range(4)] == [2, 4, 6, 8]


def test_outstanding_counts_what_is_issued_and_not_settled() -> None:
    issue = IssueQueue([4], first_new=10)
    assert issue.outstanding(done=6) == 3
    issue.take()
    assert issue.outstanding(done=6) == 4
    issue.again(9)
    assert issue.outstanding(done=6) == 3
    assert issue.outstanding(done=11) == 0


def test_a_share_is_the_fraction_of_time_in_which_any_block_ran() -> None:
    times = iter([0.0, 1.0, 2.0, 4.0, 5.0, 10.0, 20.0])
    share = TimeFraction(now=lambda: next(times))
    with share, share:
        pass
    assert share.pop() == pytest.approx(0.4)
    assert share.pop() == 0.0
