"""Anthropic's client speaks with the endpoint of an episode, and every call is kept as it was sampled."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anthropic
import pytest
from anthropic import AsyncAnthropic

from pipeline.environments import Episode
from pipeline.environments.agent_task import anthropic_url
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.rollout.agent_endpoint.episode_endpoint import Endpoint
from tests.unit.rollout.test_agent_endpoint import CALL, MAX_LENGTH, Policy, is_what_the_policy_saw_and_said
from tests.unit.rollout.test_agent_endpoint import qwen as qwen

T = TypeVar("T")
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}


def talk(policy: Policy, agent: Callable[[AsyncAnthropic], Awaitable[T]], **settings: Any) -> tuple[T, Episode]:
    """What an agent with Anthropic's client makes of the policy, and the episode."""

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

    async def agent(client: AsyncAnthropic) -> None:
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
    assert qwen.decode(policy.seen[1]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\none<|im_end|>"
    )


def test_tools_over_two_turns_are_one_row(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"<think>hm</think>Let me see. {CALL}{CALL}", "It rains."])

    async def agent(client: AsyncAnthropic) -> None:
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
