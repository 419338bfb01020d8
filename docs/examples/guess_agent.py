"""An agent of several turns, as an HTTP service: it guesses a number from 1 to 3 in two guesses.

python docs/examples/guess_agent.py data FOLDER     # games.jsonl, and random-play.jsonl for SFT
python docs/examples/guess_agent.py serve 8123 &
"""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

PROMPT, GUESSES = "1 to 3", 2


def hint(guess: int, number: int) -> str:
    return "higher" if guess < number else "lower"


async def episode(request: web.Request) -> web.Response:
    """Play a game: the policy guesses, the agent answers. Respond with the reward."""
    prompt = await request.json()
    client = request.app[OPENAI].with_options(base_url=prompt["base_url"], api_key=prompt["api_key"])
    number, messages = int(prompt["columns"]["answer"]), prompt["messages"]
    for _ in range(GUESSES):
        reply = await client.chat.completions.create(model=prompt["model"], messages=messages)
        guess = reply.choices[0].message.content or ""
        if guess not in ("1", "2", "3") or int(guess) == number:
            break
        answer = {"role": "assistant", "content": guess}
        messages = [*messages, answer, {"role": "user", "content": hint(int(guess), number)}]
    return web.json_response({"reward": float(guess == str(number))})


async def connections(application: web.Application) -> AsyncIterator[None]:
    """One client for all episodes, because creating a client takes 40 ms."""
    async with AsyncOpenAI(api_key="of each episode") as client:
        application[OPENAI] = client
        yield


OPENAI = web.AppKey("openai", AsyncOpenAI)


def serve(port: int) -> None:
    application = web.Application()
    application.cleanup_ctx.append(connections)
    application.router.add_post("/", episode)
    web.run_app(application, host="127.0.0.1", port=port, handle_signals=True)


def random_play(random: Random) -> dict[str, Any]:
    """A conversation of random guesses."""
    number, text = random.randint(1, 3), PROMPT
    messages: list[dict[str, str]] = []
    for _ in range(GUESSES):
        guess = random.randint(1, 3)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": str(guess)}]
        if guess == number:
            break
        text = hint(guess, number)
    return {"messages": messages}


def write_data(folder: Path) -> None:
    random = Random(0)
    games = [{"prompt": PROMPT, "answer": str(random.randint(1, 3))} for _ in range(500)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("games", games), ("random-play", [random_play(random) for _ in range(2000)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        write_data(Path(sys.argv[2]))
