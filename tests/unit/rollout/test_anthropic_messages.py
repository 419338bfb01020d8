"""Anthropic's client speaks with the endpoint of an episode, and every call is kept as it was sampled."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pipeline.environments import Episode
from pipeline.environments.agent_task import anthropic_url
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.rollout.agent_endpoint.episode_endpoint import Endpoint
from tests.unit.rollout.test_agent_endpoint import CALL, MAX_LENGTH, Policy, is_what_the_policy_saw_and_said
from tests.unit.rollout.test_agent_endpoint import qwen as qwen

if TYPE_CHECKING:  # the library takes two CPU seconds to import, in each worker that collects this file
    from anthropic import AsyncAnthropic

T = TypeVar("T")
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}


def talk(policy: Policy, agent: "Callable[[AsyncAnthropic], Awaitable[T]]", **settings: Any) -> tuple[T, Episode]:
    """What an agent with Anthropic's client makes of the policy, and the episode."""
    from anthropic import AsyncAnthropic

    async def run() -> tuple[T, Episode]:
        async with Endpoint(policy.chat, policy, MAX_LENGTH, **settings) as endpoint:
            url = anthropic_url(endpoint.url)
            async with AsyncAnthropic(base_url=url, api_key=endpoint.key, max_retries=0) as client:
                result = await agent(client)
            return result, endpoint.episode()

    return asyncio.run(asyncio.wait_for(run(), 60))


def asked(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 100, "messages": messages, **more}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def is_one_row_of(episode: Episode, policy: Policy) -> None:
    """The episode is one row: the last input and the last turn, and each turn stands in it as it was sampled."""
    assert episode.branches == ()
    assert episode.tokens == (*policy.seen[-1], *policy.said[-1].tokens)
    for seen, said in zip(policy.seen, policy.said, strict=True):
        begin, end = len(seen), len(seen) + len(said.tokens)
        assert episode.tokens[:end] == (*seen, *said.tokens)
        assert episode.logprobs[begin:end] == said.logprobs
        assert episode.sampled[begin:end] == (1,) * (end - begin)
    assert sum(episode.sampled) == sum(len(said.tokens) for said in policy.said)
    is_what_the_policy_saw_and_said(episode, policy)


def test_a_conversation_is_one_row_of_what_was_sampled(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one", "two"])

    async def agent(client: "AsyncAnthropic") -> None:
        messages = [user("first")]
        answer = await client.messages.create(**asked(messages, system="Be brief."))
        assert (answer.type, answer.role, answer.stop_reason, answer.stop_sequence) == (
            "message",
            "assistant",
            "end_turn",
            None,
        )
        (block,) = answer.content
        assert (block.type, block.text) == ("text", "one")
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(policy.seen[0]), 4)
        messages += [{"role": "assistant", "content": answer.content}, user([{"type": "text", "text": "second"}])]
        await client.messages.create(**asked(messages, system=[{"type": "text", "text": "Be brief."}], max_tokens=7))

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)
    assert policy.most == [100, 7]
    begun = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n"
    assert qwen.decode(policy.seen[1]).startswith(f"{begun}<|im_start|>assistant\none<|im_end|>")


def test_a_call_with_half_an_emoji_stays_text_and_its_echo_is_accepted(qwen: ChatTokenizer) -> None:
    odd = '<tool_call>{"name": "weather", "arguments": {"town": "\\ud83d"}}</tool_call>'
    policy = Policy(qwen, [odd, "Which town?"])

    async def agent(client: "AsyncAnthropic") -> None:
        messages = [user("Ulm?")]
        answer = await client.messages.create(**asked(messages, tools=[WEATHER]))
        (block,) = answer.content
        assert (block.type, block.text, answer.stop_reason) == ("text", odd, "end_turn")
        messages += [{"role": "assistant", "content": answer.content}, user("again")]
        await client.messages.create(**asked(messages, tools=[WEATHER]))

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)


def test_tools_over_two_turns_are_one_row(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"<think>hm</think>Let me see. {CALL}{CALL}", "It rains."])

    async def agent(client: "AsyncAnthropic") -> None:
        messages = [user("Weather in Ulm?")]
        answer = await client.messages.create(**asked(messages, tools=[WEATHER]))
        text, first, second = answer.content
        assert (answer.stop_reason, text.type, text.text) == ("tool_use", "text", "<think>hm</think>Let me see.")
        assert (first.type, first.name, first.input) == ("tool_use", "weather", {"town": "Ulm"})
        assert first.id != second.id
        results = [
            {"type": "tool_result", "tool_use_id": first.id, "content": "rain"},
            {"type": "tool_result", "tool_use_id": second.id, "content": [{"type": "text", "text": "snow"}]},
            {"type": "text", "text": "So?"},
        ]
        messages += [{"role": "assistant", "content": answer.content}, user(results)]
        answer = await client.messages.create(**asked(messages, tools=[WEATHER]))
        assert answer.stop_reason == "end_turn"

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)
    text = qwen.decode(episode.tokens)
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert "<tool_response>\nsnow\n</tool_response><|im_end|>\n<|im_start|>user\nSo?" in text
    assert '"parameters": {"type": "object", "properties": {"town"' in text
    assert [message["role"] for message in episode.conversation] == ["assistant", "tool", "tool", "user", "assistant"]


def test_a_stream_has_anthropic_s_events_and_says_the_same_as_a_whole_answer(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"Hm {CALL}"] * 2)

    async def agent(client: "AsyncAnthropic") -> None:
        request = asked([user("Ulm?")], tools=[WEATHER])
        whole = await client.messages.create(**request)
        raw = [event async for event in await client.messages.create(**request, stream=True)]
        assert [event.type for event in raw] == [
            "message_start",
            *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
            "message_delta",
            "message_stop",
        ]
        assert [event.delta.type for event in raw if event.type == "content_block_delta"] == [
            "text_delta",
            "input_json_delta",
        ]
        assert raw[0].message.usage.input_tokens == len(policy.seen[1])
        assert raw[-2].delta.stop_reason == "tool_use"
        assert raw[-2].usage.output_tokens == len(policy.said[1].tokens)
        policy.texts = [f"Hm {CALL}"]
        async with client.messages.stream(**request) as stream:
            final = await stream.get_final_message()
        left_out = {"id": True, "content": {"__all__": {"id"}}}
        shown = [each.model_dump(exclude=left_out, exclude_unset=True) for each in (whole, final)]
        for each in shown:
            each["content"] = [{key: value for key, value in block.items() if value} for block in each["content"]]
        assert shown[0]["content"] == shown[1]["content"]
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)

    _, episode = talk(policy, agent)
    is_what_the_policy_saw_and_said(episode, policy)
    assert len(episode.branches) == 2


def test_a_streamed_conversation_is_one_row(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"Hm {CALL}", "rain"])

    async def agent(client: "AsyncAnthropic") -> None:
        messages = [user("Ulm?")]
        async with client.messages.stream(**asked(messages, tools=[WEATHER])) as stream:
            first = await stream.get_final_message()
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "wet", "is_error": False}
        messages += [{"role": "assistant", "content": first.content}, user([result])]
        async with client.messages.stream(**asked(messages, tools=[WEATHER])) as stream:
            assert [text async for text in stream.text_stream] == ["rain"]

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)


def test_a_stop_sequence_and_a_limit_are_reasons_to_stop(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["Thought: x\nObservation: made up", "cut of"])

    async def agent(client: "AsyncAnthropic") -> None:
        messages = [user("?")]
        answer = await client.messages.create(**asked(messages, stop_sequences=["END", "Observation:"]))
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Observation:")
        assert answer.content[0].text == "Thought: x\n"
        policy.ends = False
        messages += [{"role": "assistant", "content": answer.content}, user("go on")]
        answer = await client.messages.create(**asked(messages))
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)

    _, episode = talk(policy, agent)
    text = qwen.decode(episode.tokens)
    assert "Thought: x\nObservation:<|im_end|>\n<|im_start|>user\ngo on" in text
    assert episode.branches == ()


def test_tokens_are_counted_without_sampling(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one"])

    async def agent(client: "AsyncAnthropic") -> None:
        said: dict[str, Any] = {"system": "Be brief.", "tools": [WEATHER]}
        counted = await client.messages.count_tokens(model="policy", messages=[user("Ulm?")], **said)
        assert policy.seen == []
        answer = await client.messages.create(**asked([user("Ulm?")], **said))
        assert counted.input_tokens == answer.usage.input_tokens == len(policy.seen[0])

    _, episode = talk(policy, agent)
    assert episode.turns == 1


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"messages": [user([IMAGE])]}, "messages.0: a block of type 'image': text alone can be trained"),
        (
            {"messages": [user([{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}])]},
            "tool_result: a block of type 'image'",
        ),
        ({"messages": [user("?"), {"role": "assistant", "content": [THOUGHT]}, user("?")]}, "'thinking'"),
        ({"messages": [user("?"), {"role": "assistant", "content": "The"}]}, "cannot continue a given beginning"),
        ({"messages": []}, "a list of messages was expected"),
        ({"messages": [{"role": "critic", "content": "?"}]}, "messages.0: the role 'critic'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305': only tools with"),
        ({"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ({"max_tokens": None}, "max_tokens: field required"),
        ({"messages": [user("long " * MAX_LENGTH)]}, "prompt is too long"),
    ],
)
def test_what_cannot_be_served_is_an_error_as_anthropic_has_it(
    change: dict[str, Any], reason: str, qwen: ChatTokenizer
) -> None:
    import anthropic

    async def agent(client: "AsyncAnthropic") -> None:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked([user("?")]) | change, timeout=30)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        assert reason in refused.value.body["error"]["message"]

    _, episode = talk(Policy(qwen, []), agent)
    assert episode.turns == 0


def test_a_wrong_key_and_a_route_that_is_not_served_are_errors_of_anthropic_s(qwen: ChatTokenizer) -> None:
    import anthropic

    async def agent(client: "AsyncAnthropic") -> None:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.with_options(api_key="sk-ant-wrong").messages.create(**asked([user("?")]))
        assert refused.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as refused:
            await client.messages.batches.list()
        assert refused.value.body["error"]["type"] == "not_found_error"

    _, episode = talk(Policy(qwen, []), agent)
    assert episode.turns == 0


def test_the_key_may_be_a_token_and_unknown_fields_are_ignored(qwen: ChatTokenizer) -> None:
    from anthropic import AsyncAnthropic

    policy = Policy(qwen, ["hi"])

    async def run() -> Episode:
        async with Endpoint(qwen, policy, MAX_LENGTH) as endpoint:
            url = anthropic_url(endpoint.url)
            async with AsyncAnthropic(base_url=url, auth_token=endpoint.key, max_retries=0) as client:
                thinking = {"type": "enabled", "budget_tokens": 1024}
                extra = {"temperature": 0.1, "thinking": thinking, "novel": [1]}
                answer = await client.messages.create(**asked([user("?")]), extra_body=extra)
                assert answer.content[0].text == "hi"
            return endpoint.episode()

    is_one_row_of(asyncio.run(run()), policy)


def test_a_stream_that_the_agent_leaves_counts_only_if_it_was_sampled(qwen: ChatTokenizer) -> None:
    """Before it is sampled a call is cancelled; after its first event it is part of the episode, and can go on."""
    waiting, cancelled = asyncio.Event(), []

    class Slow(Policy):
        slow = True

        async def __call__(self, tokens: Sequence[int], n: int, max_tokens: int | None) -> list[Any]:
            if self.slow:
                waiting.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.append(True)
                    raise
            return await super().__call__(tokens, n, max_tokens)

    policy = Slow(qwen, ["one " * 50, "two"])

    async def agent(client: "AsyncAnthropic") -> None:
        left = asyncio.create_task(client.messages.create(**asked([user("?")]), stream=True))
        await waiting.wait()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        while not cancelled:
            await asyncio.sleep(0.01)
        policy.slow = False
        stream = await client.messages.create(**asked([user("?")]), stream=True)
        assert (await anext(aiter(stream))).type == "message_start"
        await stream.close()
        messages = [user("?"), {"role": "assistant", "content": "one " * 50}, user("more")]
        await client.messages.create(**asked(messages))

    _, episode = talk(policy, agent)
    assert episode.turns == 2
    is_one_row_of(episode, policy)
