"""An agent as an HTTP service: many episodes in one process.

python docs/examples/agent_service.py 8123 &
python launchers/submit.py experiment=agent 'task.options.command=[]' task.options.service=http://127.0.0.1:8123 …
"""

import sys
from collections.abc import AsyncIterator

from aiohttp import web
from openai import AsyncOpenAI


async def episode(request: web.Request) -> web.Response:
    """Call the policy once, and respond with the reward."""
    prompt = await request.json()
    client = request.app[OPENAI].with_options(base_url=prompt["base_url"], api_key=prompt["api_key"])
    reply = await client.chat.completions.create(model=prompt["model"], messages=prompt["messages"])
    answer = reply.choices[0].message.content or ""
    return web.json_response({"reward": float(answer.strip() == str(prompt["columns"]["answer"]))})


async def connections(application: web.Application) -> AsyncIterator[None]:
    """One client for all episodes, because creating a client takes 40 ms."""
    async with AsyncOpenAI(api_key="of each episode") as client:
        application[OPENAI] = client
        yield


OPENAI = web.AppKey("openai", AsyncOpenAI)
application = web.Application(client_max_size=1 << 26)
application.cleanup_ctx.append(connections)
application.router.add_post("/", episode)

if __name__ == "__main__":
    web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), handle_signals=True)
