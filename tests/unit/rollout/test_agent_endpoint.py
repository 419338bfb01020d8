"""The endpoint of an episode: OpenAI's client speaks with it, and every call is kept as it was sampled."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from pipeline.environments import Episode
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.rewards import Score
from pipeline.errors import RolloutError
from pipeline.rollout.agent_endpoint.conversation_tree import ConversationTree
from pipeline.rollout.agent_endpoint.episode_endpoint import Endpoint
from pipeline.rollout.sample_rollout import to_sample
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import Sample, TokenRow
from tests.unit.environments.test_tool_task import TINY_TEXT, bytes_model

T = TypeVar("T")
MAX_LENGTH = 1024
RECORD = 4
"""Bytes of a token's routed experts."""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"town": {}}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'


@dataclass(frozen=True)
class Sampled:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str = "stop"
    version_min: int = 3
    version_max: int = 4
    server: str = "s"
    context: tuple[int, ...] = ()

    @property
    def routed_experts(self) -> tuple[bytes, ...]:
        """All tokens that were read have records."""
        return records_of((*self.context, *self.tokens))

    @property
    def versions(self) -> tuple[int, ...]:
        """The last token is of the newest weights, all others of the oldest."""
        return (*(self.version_min for _ in self.tokens[1:]), self.version_max)


def records_of(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """The record of each token but the last, which follows from all tokens up to it."""
    return tuple(
        blake2b(repr(list(tokens[:end])).encode(), digest_size=RECORD).digest() for end in range(1, len(tokens))
    )


@dataclass
class Policy:
    """Says what it is given to say, with log-probabilities that tell each token of each call; remembers what it saw."""

    chat: ChatTokenizer
    texts: list[str]
    ends: bool = True
    seen: list[tuple[int, ...]] = field(default_factory=list)
    said: list[Sampled] = field(default_factory=list)
    most: list[int | None] = field(default_factory=list)

    async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> list[Any]:
        self.most.append(max_tokens)
        return [self.turn(tokens) for _ in range(n)]

    def turn(self, tokens: Sequence[int]) -> Sampled:
        end = [self.chat.stop_token_ids[0]] if self.ends else []
        ids = (*self.chat.encode(self.texts.pop(0)), *end)
        first = 1000 * len(self.said)
        turn = Sampled(
            ids,
            tuple(-float(first + place) for place in range(len(ids))),
            "stop" if end else "length",
            context=tuple(tokens),
        )
        self.seen.append(tuple(tokens))
        self.said.append(turn)
        return turn


def rows_of(episode: Episode) -> list[TokenRow]:
    """The rows as the trainer has them."""
    sample = to_sample(episode, Score(1.0), 0.0)
    sample.check()
    return decode_record(encode_record(sample), Sample).rows(RECORD)


def is_what_the_policy_saw_and_said(episode: Episode, policy: Policy) -> None:
    """The law of rows: each call is the beginning of one, and each sampled token counts once, with its own number."""
    rows, counted = rows_of(episode), []
    for seen, said in zip(policy.seen, policy.said, strict=True):
        whole = [*seen, *said.tokens]
        assert any(row.tokens[: len(whole)].tolist() == whole for row in rows)
    for row in rows:
        assert row.routed_experts == b"".join(records_of(row.tokens.tolist()))
        counted += row.logprobs[row.sampled == 1].tolist()
        assert not row.logprobs[row.sampled == 0].any()
        for seen, said in zip(policy.seen, policy.said, strict=True):
            begin, end = len(seen), len(seen) + len(said.tokens)
            if row.sampled[begin:end].any() and row.logprobs[begin:end].tolist() == list(said.logprobs):
                assert row.tokens[:end].tolist() == [*seen, *said.tokens]
                assert row.versions[begin:end].tolist() == list(said.versions)
    assert sorted(counted) == sorted(number for said in policy.said for number in said.logprobs)


def talk(policy: Policy, agent: Callable[[AsyncOpenAI], Awaitable[T]], **settings: Any) -> tuple[T, Episode]:
    """What an agent with OpenAI's client makes of the policy, and the episode."""

    async def run() -> tuple[T, Episode]:
        async with Endpoint(policy.chat, policy, MAX_LENGTH, **settings) as endpoint:
            async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
                result = await agent(client)
            return result, endpoint.episode()

    return asyncio.run(asyncio.wait_for(run(), 60))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.fixture
def qwen(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(bytes_model(tmp_path))


def test_a_conversation_is_one_row_of_what_was_sampled(qwen: ChatTokenizer) -> None:
    """`ab` is one token when a text is encoded, two when it was sampled so: nothing is encoded again."""
    policy = Policy(qwen, ["x", "y"])
    a, b, end = (qwen.encode(text)[0] for text in ("a", "b", "<|im_end|>"))
    policy.texts = [f"{qwen.decode([a])}", "done"]

    async def agent(client: AsyncOpenAI) -> None:
        messages = [user("hi")]
        for question in ("more", ""):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message
            messages += [message.model_dump(), user(question)]

    turns = iter([(a, b, end), (b, end)])
    plain = Policy.turn

    def split(self: Policy, tokens: Sequence[int]) -> Sampled:
        ids = next(turns)
        plain(self, tokens)
        self.said[-1] = Sampled(
            ids, tuple(-1.0 - place - 10 * len(self.said) for place in range(len(ids))), context=tuple(tokens)
        )
        return self.said[-1]

    policy.turn = split.__get__(policy)  # type: ignore[method-assign]
    _, episode = talk(policy, agent)
    assert episode.branches == ()
    assert list(episode.tokens) == [*policy.seen[1], b, end]
    assert [a, b, end] == list(episode.tokens)[len(policy.seen[0]) : len(policy.seen[0]) + 3]
    is_what_the_policy_saw_and_said(episode, policy)
    assert (episode.turns, episode.text, episode.version_min, episode.version_max) == (2, "b", 3, 4)


def test_calls_of_tools_come_as_openai_has_them_and_their_answers_are_read(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"<think>hm</think>Let me see. {CALL}", "It rains."])

    async def agent(client: AsyncOpenAI) -> str | None:
        messages: list[Any] = [user("Weather in Ulm?")]
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Ulm"})
        assert choice.message.content == "<think>hm</think>Let me see."
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
        return answer.choices[0].message.content

    said, episode = talk(policy, agent)
    assert said == "It rains."
    assert episode.branches == ()
    is_what_the_policy_saw_and_said(episode, policy)
    assert "<tool_response>\nrain\n</tool_response>" in qwen.decode(episode.tokens)
    assert [message["role"] for message in episode.conversation] == ["assistant", "tool", "assistant"]


def test_a_stream_says_the_same_as_a_whole_answer(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"Hm {CALL}"] * 2)

    async def agent(client: AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "policy", "messages": [user("Ulm?")], "tools": [WEATHER]}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        content, name, arguments, finish, usage = "", "", "", None, None
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
        assert (content, finish) == (whole.message.content, whole.finish_reason)
        made = whole.message.tool_calls[0].function
        assert (name, arguments) == (made.name, made.arguments)
        assert usage is not None
        assert usage.completion_tokens == len(policy.said[1].tokens)

    _, episode = talk(policy, agent)
    is_what_the_policy_saw_and_said(episode, policy)
    assert len(episode.branches) == 1


def test_what_is_sampled_in_parallel_are_rows_that_share_the_prompt(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one", "one", "three"])

    async def agent(client: AsyncOpenAI) -> list[str | None]:
        answer = await client.chat.completions.create(model="policy", messages=[user("?")], n=3, logprobs=True)
        told = [[token.logprob for token in choice.logprobs.content] for choice in answer.choices]
        assert told == [list(said.logprobs) for said in policy.said]
        return [choice.message.content for choice in answer.choices]

    said, episode = talk(policy, agent)
    assert said == ["one", "one", "three"]
    assert [branch.shared for branch in episode.branches] == [len(policy.seen[0])] * 2
    is_what_the_policy_saw_and_said(episode, policy)


def test_a_context_that_is_shortened_makes_a_row_that_shares_its_beginning(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one", "two", "three"])
    system = {"role": "system", "content": "Be brief."}

    async def agent(client: AsyncOpenAI) -> None:
        messages: list[Any] = [system, user("first")]
        for question in ("second", "third"):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, user(question)]
        short = [system, user("summary: one, two"), user("third")]
        await client.chat.completions.create(model="policy", messages=short)

    _, episode = talk(policy, agent)
    (branch,) = episode.branches
    beginning = qwen.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert episode.tokens[: branch.shared] == tuple(beginning)
    is_what_the_policy_saw_and_said(episode, policy)


def test_a_stop_text_ends_an_answer_and_what_came_after_it_is_no_part_of_the_row(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["Thought: x\nObservation: made up", "end"])

    async def agent(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("?")]
        answer = await client.chat.completions.create(model="policy", messages=messages, stop=["Observation:"])
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Thought: x\n", "stop")
        messages += [choice.message, user("go on")]
        await client.chat.completions.create(model="policy", messages=messages)

    _, episode = talk(policy, agent)
    text = qwen.decode(episode.tokens)
    assert "Thought: x\nObservation:<|im_end|>\n<|im_start|>user\ngo on" in text
    assert "made up" not in text
    assert episode.branches == ()
    assert episode.logprobs[len(policy.seen[0])] == policy.said[0].logprobs[0]


def test_a_cut_turn_is_ended_before_the_conversation_goes_on(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["cut of", "end"], ends=False)

    async def agent(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("?")]
        answer = await client.chat.completions.create(model="policy", messages=messages, max_completion_tokens=5)
        assert answer.choices[0].finish_reason == "length"
        messages += [answer.choices[0].message, user("go on")]
        await client.chat.completions.create(model="policy", messages=messages)

    _, episode = talk(policy, agent)
    assert policy.most == [5, None]
    assert "cut of<|im_end|>\n<|im_start|>user\ngo on" in qwen.decode(episode.tokens)
    is_what_the_policy_saw_and_said(episode, policy)
    assert episode.finish == "length"


def test_plain_completions_go_on_from_text_and_from_tokens() -> None:
    policy = Policy(ChatTokenizer(TINY_TEXT), ["b", "d", "f"], ends=False)
    prompt = [*policy.chat.encode("zz")]

    async def agent(client: AsyncOpenAI) -> None:
        first = await client.completions.create(model="policy", prompt="a", logprobs=1)
        assert first.choices[0].text == "b"
        assert first.choices[0].logprobs.token_logprobs == list(policy.said[0].logprobs)
        await client.completions.create(model="policy", prompt="abc")
        answers = [event async for event in await client.completions.create(model="policy", prompt=prompt, stream=True)]
        assert "".join(event.choices[0].text for event in answers) == "f"

    _, episode = talk(policy, agent)
    assert [policy.chat.decode(row.tokens.tolist()) for row in rows_of(episode)] == ["abcd", "zzf"]
    is_what_the_policy_saw_and_said(episode, policy)


def test_whoever_has_no_key_and_whatever_cannot_be_answered_is_told_so(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [])

    async def refused(client: AsyncOpenAI, **asked: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(model="policy", **asked)
        return error.value

    async def agent(client: AsyncOpenAI) -> None:
        stranger = client.with_options(api_key="sk-wrong")
        assert (await refused(stranger, messages=[user("?")])).status_code == 401
        long = await refused(client, messages=[user("long " * MAX_LENGTH)])
        assert (long.status_code, long.code) == (400, "context_length_exceeded")
        seen = [{"type": "image_url", "image_url": {"url": "data:"}}]
        assert "text alone can be trained" in (await refused(client, messages=[user(seen)])).message  # type: ignore[arg-type]
        assert "expected 1 to" in (await refused(client, messages=[user("?")], n=1000)).message
        assert (await client.models.list()).data[0].id == "policy"

    _, episode = talk(policy, agent)
    assert episode.turns == 0


def test_what_can_never_be_sampled_is_an_error_of_the_agent(qwen: ChatTokenizer) -> None:
    class Refusing(Policy):
        async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> list[Any]:
            raise RolloutError("token id 9 is outside of the vocabulary")

    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="outside of the vocabulary"):
            await client.chat.completions.create(model="policy", messages=[user("?")])

    talk(Refusing(qwen, []), agent)


def test_an_answer_that_nobody_waits_for_is_no_part_of_the_episode(qwen: ChatTokenizer) -> None:
    asked, cancelled = asyncio.Event(), []

    class Slow(Policy):
        async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> list[Any]:
            asked.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return []

    async def agent(client: AsyncOpenAI) -> None:
        call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[user("?")]))
        await asked.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    _, episode = talk(Slow(qwen, []), agent)
    assert cancelled == [True]
    assert episode.turns == 0


def test_an_agent_tells_its_reward_by_a_call(qwen: ChatTokenizer) -> None:
    async def agent(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(model="policy", messages=[user("?")])
        with pytest.raises(openai.BadRequestError, match="expected a number, or"):
            await client.post("/reward", cast_to=object, body={"score": 1})
        await client.post("/reward", cast_to=object, body={"reward": 0.5, "metrics": {"steps": 7}})

    _, episode = talk(Policy(qwen, ["hi"]), agent)
    assert (episode.reward, episode.metrics["steps"], episode.metrics["agent/calls"]) == (0.5, 7.0, 1.0)


choices = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=12)


@given(choices)
def test_however_an_agent_branches_every_sampled_token_counts_once(steps: list[tuple[int, int]]) -> None:
    """It goes on, goes back and asks anew, drops its beginning, or edits what was said, in any order."""
    policy = Policy(CHAT, [])
    dialogue, histories = ConversationTree(CHAT), [[user("start")]]
    for step, (move, pick) in enumerate(steps):
        history = list(histories[pick % len(histories)])
        if move == 1 and len(history) > 2:
            history = history[2:] if history[2]["role"] == "user" else history
        elif move == 2:
            history = [
                message if message["role"] == "user" else {**message, "content": "edited"} for message in history
            ]
        policy.texts = ["ab" * (pick % 3) + str(step % 2)]
        policy.ends = move != 3
        place = dialogue.match_prefix(history)
        text = policy.texts[0]
        reply = {"role": "assistant", "content": text}
        dialogue.add(place, policy.turn(place.tokens), text, reply)  # type: ignore[arg-type]
        histories += [history, [*history, reply, user(f"next {pick % 2}")]]
    is_what_the_policy_saw_and_said(dialogue.episode(), policy)


CHAT = ChatTokenizer(TINY_TEXT)
