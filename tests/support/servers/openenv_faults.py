"""A server that speaks OpenEnv's protocol and goes wrong by the action. `python -m … PORT`."""

import asyncio
import json
import os
import sys
from typing import Any

from aiohttp import WSMsgType, web

SESSIONS: set[int] = set()


def observed(text: str, reward: Any = 0.0, done: Any = False) -> str:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def failed(code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": "not so", "code": code}})


REPLIES = {
    "text": "{not json",
    "list": "[1, 2]",
    "empty": "{}",
    "nan": '{"type": "observation", "data": {"observation": {"text": "?"}, "reward": NaN}}',
    "reward": observed("?", "much"),
    "nothing": '{"type": "observation", "data": {"reward": 1}}',
    "deep": "[" * 100_000,
    "invalid": failed("VALIDATION_ERROR"),
    "raises": failed("EXECUTION_ERROR"),
    "long": observed("x" * 1_000_000),
    "counted": '{"type": "observation", "data": {"observation": {"text": "on", "tries": 3}, "reward": 0.0}}',
    "none": observed("on", None),
    "done": observed("over", 1, True),
}


async def session(request: web.Request) -> web.WebSocketResponse:
    """One session; one at a time with `one` among the server's arguments."""
    channel = web.WebSocketResponse(max_msg_size=1 << 26)
    await channel.prepare(request)
    me = id(channel)
    if "one" in sys.argv and SESSIONS:
        await channel.send_str(failed("CAPACITY_REACHED"))
        await channel.close()
        return channel
    SESSIONS.add(me)
    try:
        async for message in channel:
            if message.type is WSMsgType.TEXT:
                await reply(channel, json.loads(message.data))
    finally:
        await asyncio.sleep(0.3 if "one" in sys.argv else 0)
        SESSIONS.discard(me)
    return channel


async def reply(channel: web.WebSocketResponse, request: dict[str, Any]) -> None:
    word = request.get("data", {}).get("word", "")
    if request["type"] == "close" or word == "leave":
        await channel.close()
    elif request["type"] == "reset":
        await channel.send_str(observed(f"seed {request['data']['seed']}"))
    elif word == "exit":
        os._exit(7)
    elif word == "hang":
        await asyncio.sleep(600)
    else:
        await channel.send_str(REPLIES.get(word, observed(f"said {word}")))


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "healthy"})


if __name__ == "__main__":
    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/ws", session)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
