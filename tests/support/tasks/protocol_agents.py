"""One agent in three protocols, as a service: it asks the policy once and reports whether the answer is right.

python -m tests.support.tasks.protocol_agents chat|messages|responses PORT
"""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

CLIENTS = web.AppKey("clients", tuple)
Ask = Callable[[AsyncOpenAI, AsyncAnthropic, Mapping[str, Any]], Awaitable[str]]


async def chat(openai: AsyncOpenAI, _: AsyncAnthropic, prompt: Mapping[str, Any]) -> str:
    answer = await openai.chat.completions.create(model=prompt["model"], messages=prompt["messages"])
    return answer.choices[0].message.content or ""


async def messages(_: AsyncOpenAI, anthropic: AsyncAnthropic, prompt: Mapping[str, Any]) -> str:
    answer = await anthropic.messages.create(model=prompt["model"], messages=prompt["messages"], max_tokens=1024)
    return "".join(block.text for block in answer.content if block.type == "text")  # none where it ended at once


async def responses(openai: AsyncOpenAI, _: AsyncAnthropic, prompt: Mapping[str, Any]) -> str:
    stream = await openai.responses.create(model=prompt["model"], input=prompt["messages"], stream=True)
    return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


PROTOCOLS: Mapping[str, Ask] = {"chat": chat, "messages": messages, "responses": responses}


def application(ask: Ask) -> web.Application:
    async def episode(request: web.Request) -> web.Response:
        prompt = await request.json()
        openai, anthropic = request.app[CLIENTS]
        key = prompt["api_key"]
        openai = openai.with_options(base_url=prompt["base_url"], api_key=key)
        anthropic = anthropic.with_options(base_url=prompt["anthropic_base_url"], api_key=key)
        text = await ask(openai, anthropic, prompt)
        return web.json_response({"reward": float(text.strip() == str(prompt["columns"]["answer"]))})

    async def clients(served: web.Application) -> AsyncIterator[None]:
        async with AsyncOpenAI(api_key="of each episode") as openai, AsyncAnthropic(api_key="of each") as anthropic:
            served[CLIENTS] = (openai, anthropic)
            yield

    served = web.Application(client_max_size=1 << 26)
    served.cleanup_ctx.append(clients)
    served.router.add_post("/", episode)
    return served


if __name__ == "__main__":
    web.run_app(application(PROTOCOLS[sys.argv[1]]), host="127.0.0.1", port=int(sys.argv[2]), handle_signals=True)
