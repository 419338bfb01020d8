"""A language model that says what an answer is worth.

Owns the reward function `pipeline.environments.llm_judge:judge`, for `reward.functions`: what is asked of a model
behind an OpenAI-compatible URL, and how its verdict is read. Promises that an answer whose judge cannot be reached,
refuses, or gives no score fails with that reason, and is no 0. Runs in a worker process only, all samples of a prompt
at once.

    reward.functions=[pipeline.environments.llm_judge:judge]
    'reward.options.judge={url: "http://127.0.0.1:8000/v1", model: qwen}'
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

TRIES = 3
PAUSE_SECONDS = 1.0
QUESTION = """Judge an answer.

# The conversation
{prompt}

# The answer
{answer}
{truth}
Say briefly how good the answer is. End with a line `Score: N`, N from 0 (useless) to {best} (could not be better)."""
_SCORE = re.compile(r"Score:\s*\**\s*(\d+(?:\.\d+)?)", re.IGNORECASE)


async def judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    *,
    url: str,
    model: str,
    question: str = QUESTION,
    best: float = 10,
    max_tokens: int = 512,
    seconds: float = 15,
    key_file: str = "",
    **columns: Any,
) -> list[float]:
    """The judge's score of each completion, from 0 to 1.

    Args:
        url: where `/chat/completions` is, as `http://127.0.0.1:8000/v1`; a server of vLLM say.
        model: its name there.
        question: what is asked, with `{prompt}`, `{answer}`, `{truth}` and `{best}`.
        best: the highest score it may give.
        max_tokens: most tokens of a verdict; seconds: most time of one request. What fails for a passing reason is
            asked again, `TRIES` times in all; these fit into nine tenths of `task.seconds`, or the last is cut off.
        key_file: a file with the key that the URL asks for; empty: none.

    Raises whatever keeps a score from being had.
    """
    headers = {"Authorization": f"Bearer {Path(key_file).read_text().strip()}"} if key_file else {}
    truths = [None] * len(prompts) if answer is None else answer
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=seconds)) as http:

        async def verdict(prompt: Any, said: Any, truth: Any) -> float:
            told = "" if truth is None else f"\n# The right answer\n{truth}\n"
            asked = question.format(
                prompt=render_question(prompt), answer=render_question(said), truth=told, best=f"{best:g}"
            )
            body = {
                "model": model,
                "messages": [{"role": "user", "content": asked}],
                "max_tokens": max_tokens,
                "temperature": 0.0,
            }
            return score_in(await _ask(http, f"{url.rstrip('/')}/chat/completions", body), best)

        return list(await asyncio.gather(*map(verdict, prompts, completions, truths)))


def render_question(said: Any) -> str:
    """A text as it is; messages one below the other, each after its role."""
    if isinstance(said, str):
        return said
    return "\n".join(f"[{message['role']}] {message['content']}" for message in said)


def score_in(verdict: str, best: float) -> float:
    """The last score of a verdict, as a fraction of the best one; `ValueError` when there is none within bounds.

    >>> score_in("Good. Score: 7", 10)
    0.7
    """
    found = _SCORE.findall(verdict)
    if not found or float(found[-1]) > best:
        raise ValueError(f"the judge gave no score from 0 to {best:g}: {verdict[-80:]!r}")
    return float(found[-1]) / best


async def _ask(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> str:
    """What the model says; tries again when the server is busy, or the connection breaks."""
    for left in reversed(range(TRIES)):
        try:
            async with http.post(url, json=body) as response:
                if response.status < 500 and response.status != 429:
                    return _reply_text(response.status, await response.text())
                reason = f"the judge answered with status {response.status}"
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            reason = f"the judge at {url} was not reached: {error or 'no answer in time'}"
        if left:
            await asyncio.sleep(PAUSE_SECONDS)
    raise ConnectionError(reason)


def _reply_text(status: int, text: str) -> str:
    if status != 200:
        raise ValueError(f"the judge refused with status {status}: {text[:120]}")
    try:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"what the judge answered is no chat completion: {text[:120]}") from None
