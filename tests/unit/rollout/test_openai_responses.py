"""OpenAI's client speaks the Responses API with the endpoint of an episode; every call is kept as it was sampled."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from pipeline.environments.chat_tokenizer import ChatTokenizer
from tests.unit.rollout.test_agent_endpoint import CALL, Policy, is_what_the_policy_saw_and_said, talk
from tests.unit.rollout.test_agent_endpoint import qwen as qwen
from tests.unit.rollout.test_anthropic_messages import is_one_row_of

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": False,
}


def test_a_response_that_is_continued_by_its_id_is_one_row(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one", "two", "three"])

    async def agent(client: AsyncOpenAI) -> None:
        first = await client.responses.create(model="policy", input="first", instructions="Be brief.")
        assert (first.object, first.status, first.output_text) == ("response", "completed", "one")
        assert (first.usage.input_tokens, first.usage.output_tokens) == (len(policy.seen[0]), 4)
        previous = first.id
        for text in ("second", "third"):
            continued: dict[str, Any] = {"previous_response_id": previous, "instructions": "Be brief."}
            answer = await client.responses.create(model="policy", input=text, max_output_tokens=9, **continued)
            assert answer.previous_response_id == previous
            previous = answer.id

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)
    assert policy.most == [None, 9, 9]
    assert qwen.decode(policy.seen[0]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfirst")
    assert episode.metrics["agent/rows"] == 1.0


def test_items_that_are_sent_back_are_one_row(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one", "two"])

    async def agent(client: AsyncOpenAI) -> None:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "first"}]}]
        answer = await client.responses.create(model="policy", input=items, store=False)
        items += [*answer.output, {"role": "user", "content": "second", "type": "message"}]
        await client.responses.create(model="policy", input=items, store=False)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="policy", input="?", previous_response_id=answer.id)
        assert refused.value.code == "previous_response_not_found"

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)


@pytest.mark.parametrize("by_id", [True, False])
def test_tools_over_two_turns_are_one_row(by_id: bool, qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"<think>hm</think>Let me see. {CALL}{CALL}", "It rains."])

    async def agent(client: AsyncOpenAI) -> None:
        items: list[Any] = [{"role": "user", "content": "Weather in Ulm?"}]
        answer = await client.responses.create(model="policy", input=items, tools=[WEATHER])
        text, first, second = answer.output
        assert (text.type, answer.output_text) == ("message", "<think>hm</think>Let me see.")
        assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "weather", {"town": "Ulm"})
        assert first.call_id != second.call_id
        results = [
            {"type": "function_call_output", "call_id": first.call_id, "output": "rain"},
            {"type": "function_call_output", "call_id": second.call_id, "output": "snow"},
        ]
        more: dict[str, Any] = {"input": [*items, *answer.output, *results]}
        if by_id:
            more = {"input": results, "previous_response_id": answer.id}
        answer = await client.responses.create(model="policy", tools=[WEATHER], **more)
        assert answer.output_text == "It rains."

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)
    assert "<tool_response>\nrain\n</tool_response>" in qwen.decode(episode.tokens)
    assert [message["role"] for message in episode.conversation] == ["assistant", "tool", "tool", "assistant"]


def test_a_stream_has_the_events_of_responses_and_says_the_same_as_a_whole_answer(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, [f"Hm {CALL}"] * 3)

    async def agent(client: AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "policy", "input": "Ulm?", "tools": [WEATHER]}
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
        for streamed in (events[-1].response, final):
            assert streamed.output_text == whole.output_text == "Hm"
            assert streamed.output[1].arguments == whole.output[1].arguments
            assert streamed.usage.output_tokens == len(policy.said[0].tokens)

    _, episode = talk(policy, agent)
    is_what_the_policy_saw_and_said(episode, policy)
    assert len(episode.branches) == 2


def test_a_cut_response_is_incomplete_and_goes_on(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["cut of", "end"], ends=False)

    async def agent(client: AsyncOpenAI) -> None:
        stream = await client.responses.create(model="policy", input="?", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        await client.responses.create(model="policy", input="go on", previous_response_id=last.response.id)

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)
    assert "cut of<|im_end|>\n<|im_start|>user\ngo on" in qwen.decode(episode.tokens)


def test_log_probabilities_are_those_that_were_sampled(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["one"])

    async def agent(client: AsyncOpenAI) -> None:
        include: Any = ["message.output_text.logprobs"]
        answer = await client.responses.create(model="policy", input="?", include=include)
        told = [token.logprob for token in answer.output[0].content[0].logprobs]
        assert told == list(policy.said[0].logprobs)

    talk(policy, agent)


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "'input_image'; text alone can be trained"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]}, "'input_image'"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "an item of type 'reasoning'"),
        ({"input": [{"type": "item_reference", "id": "r"}]}, "an item of type 'item_reference'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search': only functions"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "'file_search': only functions"),
        ({"background": True}, "background is not served"),
        ({"conversation": "conv_1"}, "conversation is not served"),
        ({"previous_response_id": "resp_other"}, "is no stored response of this episode"),
        ({"max_output_tokens": 0}, "max_output_tokens=0: expected at least 1"),
        ({"input": ""}, "input: expected a text, or a list of items"),
        ({"input": "long " * 1024}, "prompt is too long"),
    ],
)
def test_what_cannot_be_served_is_an_error_as_openai_has_it(
    change: dict[str, Any], reason: str, qwen: ChatTokenizer
) -> None:
    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**{"model": "policy", "input": "?"} | change)
        assert reason in refused.value.body["message"]
        assert refused.value.type == "invalid_request_error"

    _, episode = talk(Policy(qwen, []), agent)
    assert episode.turns == 0


def test_a_wrong_key_is_refused_and_unknown_fields_are_ignored(qwen: ChatTokenizer) -> None:
    policy = Policy(qwen, ["hi"])

    async def agent(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong").responses.create(model="policy", input="?")
        extra = {"novel": [1], "temperature": 0.1, "reasoning": {"effort": "low"}}
        assert (await client.responses.create(model="policy", input="?", extra_body=extra)).output_text == "hi"

    _, episode = talk(policy, agent)
    is_one_row_of(episode, policy)


def test_a_stream_that_the_agent_leaves_counts_only_if_it_was_sampled(qwen: ChatTokenizer) -> None:
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

    policy = Slow(qwen, ["one", "two"])

    async def agent(client: AsyncOpenAI) -> None:
        left = asyncio.create_task(client.responses.create(model="policy", input="?", stream=True))
        await waiting.wait()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        while not cancelled:
            await asyncio.sleep(0.01)
        policy.slow = False
        stream = await client.responses.create(model="policy", input="?", stream=True)
        created = await anext(aiter(stream))
        assert created.type == "response.created"
        await stream.close()
        await client.responses.create(model="policy", input="more", previous_response_id=created.response.id)

    _, episode = talk(policy, agent)
    assert episode.turns == 2
    is_one_row_of(episode, policy)
