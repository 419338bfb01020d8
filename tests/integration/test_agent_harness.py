"""The library openai-agents drives the policy through the Responses API and through chat completions."""

from typing import Any, Literal

import pytest
from openai import AsyncOpenAI

from pipeline.environments.chat_tokenizer import ChatTokenizer
from tests.unit.rollout.test_agent_endpoint import CALL, Policy, talk
from tests.unit.rollout.test_agent_endpoint import qwen as qwen
from tests.unit.rollout.test_anthropic_messages import is_one_row_of

pytestmark = [pytest.mark.integration, pytest.mark.trial]

agents: Any = pytest.importorskip("agents", reason="pip install openai-agents")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("protocol", ["responses", "chat"])
def test_a_harness_with_a_tool_is_one_row(
    protocol: Literal["responses", "chat"], streams: bool, qwen: ChatTokenizer
) -> None:
    policy, towns = Policy(qwen, [f"Let me see. {CALL}", "It rains."]), []
    kind = agents.OpenAIResponsesModel if protocol == "responses" else agents.OpenAIChatCompletionsModel
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(town: str) -> str:
        """The weather of a town."""
        towns.append(town)
        return "rain"

    async def agent(client: AsyncOpenAI) -> str:
        model = kind(model="policy", openai_client=client)
        seat = agents.Agent(name="a", instructions="Be brief.", tools=[weather], model=model)
        if not streams:
            return str((await agents.Runner.run(seat, "Weather in Ulm?")).final_output)
        streamed = agents.Runner.run_streamed(seat, "Weather in Ulm?")
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    answer, episode = talk(policy, agent)
    assert (answer, towns) == ("It rains.", ["Ulm"])
    is_one_row_of(episode, policy)
