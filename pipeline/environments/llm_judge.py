"""A reward function that asks a language model for a score.

Owns the reward function `pipeline.environments.llm_judge:judge`, for `reward.functions`: the question for a model
behind an OpenAI-compatible URL, and the parsing of its verdict. Promises that an answer whose judge is unreachable,
refuses, or gives no score fails with that reason instead of a score of 0. Runs in a worker process only, on all samples
of a prompt at once.

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
        url: base of `/chat/completions`, such as `http://127.0.0.1:8000/v1` of a vLLM server.
        model: name of the model there.
        question: template of the question, with `{prompt}`, `{answer}`, `{truth}` and `{best}`.
        best: the highest score.
        max_tokens: limit of a verdict, in tokens.
        seconds: timeout of one request. Transient failures are retried, `TRIES` requests in all. They must fit into
            nine tenths of `task.seconds`; otherwise the last request is cut off.
        key_file: a file with the API key of the URL; empty: none.

    Any failure to get a score is raised.
    """
    headers = {"Authorization": f"Bearer {Path(key_file).read_text().strip()}"} if key_file else {}
    truths = [None] * len(prompts) if answer is None else answer
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=seconds)) as http:

        async def verdict(prompt: Any, completion: Any, truth: Any) -> float:
            truth_text = "" if truth is None else f"\n# The right answer\n{truth}\n"
            content = question.format(
                prompt=render_question(prompt), answer=render_question(completion), truth=truth_text, best=f"{best:g}"
            )
            body = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": max_tokens,
                "temperature": 0.0,
            }
            return score_in(await _ask(http, f"{url.rstrip('/')}/chat/completions", body), best)

        return list(await asyncio.gather(*map(verdict, prompts, completions, truths)))


def render_question(content: Any) -> str:
    """A text unchanged; messages as lines, each after its role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"[{message['role']}] {message['content']}" for message in content)


def score_in(verdict: str, best: float) -> float:
    """The last score of a verdict as a fraction of the best one; `ValueError` if the verdict has none within bounds.

    >>> score_in("Good. Score: 7", 10)
    0.7
    """
    scores = _SCORE.findall(verdict)
    if not scores or float(scores[-1]) > best:
        raise ValueError(f"the judge gave no score from 0 to {best:g}: {verdict[-80:]!r}")
    return float(scores[-1]) / best


async def _ask(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> str:
    """The model's response. Retries when the server is busy or the connection breaks."""
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
