"""The client of a teacher: a served model that computes log-probabilities of the policy's tokens.

Owns the requests to the server behind `teacher.url`, and the parsing of its responses. Promises for every token of
every row the teacher's log-probability given the tokens before it, and with `teacher.top_k` the teacher's likeliest
tokens where the policy sampled, or one reason why a group has none; that a busy or
temporarily unreachable teacher is waited for; that a teacher which was never reachable is reported separately; and that
the caller can stop waiting at any time. Must not know the use of the numbers.

Any server works that answers `/completions` with `prompt_logprobs`, as `vllm serve` does. It receives token ids, so it
must have the policy's tokenizer.

    teacher = Teacher(config.teacher)
    teacher.meet(seconds=240, should_stop=should_stop)
    references = teacher.references(groups, should_stop)

Notation: T tokens of a row, n of them sampled; k = `teacher.top_k`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.config import TeacherConfig
from pipeline.errors import RolloutError
from pipeline.rollout.server_client import BUSY_STATUS
from pipeline.transport.sample_records import Group
from pipeline.transport.top_tokens import ABSENT, TopTokens
from pipeline.utils.backoff import pause_after
from pipeline.utils.http_errors import error_text
from pipeline.utils.waiting import Deadline

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class RowScores(NamedTuple):
    """The teacher's numbers of one row: float32[T] log-probabilities as bytes, and the likeliest tokens at the sampled
    ones; None with k = 0."""

    logprobs: bytes
    top_tokens: TopTokens | None = None


References = tuple[RowScores, ...]
"""The scores of each row of a group's samples, in order."""


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """The client of one teacher."""

    def __init__(self, config: TeacherConfig) -> None:
        key = Path(config.key_file).read_text().strip() if config.key_file else ""
        self._config, self._headers = config, {"Authorization": f"Bearer {key}"} if key else {}
        self._trouble = "no answer"

    def meet(self, seconds: float, should_stop: Callable[[], bool]) -> None:
        """Wait until the teacher has scored two tokens, or until `should_stop()`, which is polled.

        Raises `RolloutError` if the teacher refuses, and `DeadlineError` with its last error if it does not answer
        within `seconds`.
        """
        asyncio.run(self._meet(Deadline(f"the teacher at teacher.url={self._config.url}", seconds), should_stop))

    def references(self, groups: Sequence[Group], should_stop: Callable[[], bool]) -> list[References | str] | None:
        """The teacher's log-probabilities of each group, or the reason why it refuses them; None once `should_stop()`,
        which is polled."""
        return asyncio.run(self._all(groups, should_stop))

    async def _meet(self, deadline: Deadline, should_stop: Callable[[], bool]) -> None:
        async with self._session() as http:
            probe = asyncio.create_task(self._of_row(http, [0, 0], np.array([0, 1], np.uint8), every=True))
            try:
                while not probe.done() and not should_stop():
                    if deadline.passed:
                        raise deadline.error(f"{self._trouble}; start it, or fix teacher.url")
                    await asyncio.wait([probe], timeout=LOOK_SECONDS)
                if probe.done():
                    probe.result()
            except RolloutError as error:
                named = f"teacher.url={self._config.url} with teacher.model={self._config.model}"
                reason = (
                    f"the teacher refuses a request like a run's: {error}; fix these, teacher.key_file or teacher.top_k"
                )
                raise RolloutError(f"{named}: {reason}") from None
            finally:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    def _session(self) -> aiohttp.ClientSession:
        limit = aiohttp.ClientTimeout(total=self._config.seconds)
        # Not the connector's limit, whose wait for a free connection would count in the timeout of the request.
        self._slots = asyncio.Semaphore(self._config.concurrency)
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(headers=self._headers, timeout=limit, connector=connector)

    async def _all(self, groups: Sequence[Group], should_stop: Callable[[], bool]) -> list[References | str] | None:
        async with self._session() as http:
            tasks = [asyncio.create_task(self._of_group(http, group)) for group in groups]
            left = set(tasks)
            try:
                while left:
                    _, left = await asyncio.wait(left, timeout=LOOK_SECONDS)
                    if should_stop():
                        return None
            finally:
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
            return [task.result() for task in tasks]

    async def _of_group(self, http: aiohttp.ClientSession, group: Group) -> References | str:
        rows = [(row.tokens.tolist(), row.sampled) for sample in group.samples for row in sample.rows()]
        try:
            return tuple(await asyncio.gather(*(self._of_row(http, tokens, sampled) for tokens, sampled in rows)))
        except RolloutError as error:
            return f"teacher refused: {error}"

    async def _of_row(
        self, http: aiohttp.ClientSession, tokens: list[int], sampled: NDArray[np.uint8], every: bool = False
    ) -> RowScores:
        """The scores of one row; the first token has no log-probability, and gets 0. With `every`, a teacher that
        returns fewer than k likely tokens is refused."""
        top_k = self._config.top_k
        body = {
            "model": self._config.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
        }
        answer = await self._answer(http, body)
        try:
            (choice,) = msgspec.json.decode(answer, type=_Answer).choices
            # Entry t maps token ids to log-probabilities given the tokens before t; token 0 has no entry.
            after = zip(tokens[1:], choice.prompt_logprobs[1:], strict=True)
            logprobs = [0.0, *(scores[str(token)].logprob for token, scores in after if scores)]
            top_tokens = _top_tokens(tokens, sampled, choice.prompt_logprobs, top_k) if top_k else None
        except (msgspec.DecodeError, ValueError, KeyError):
            logprobs = []
        if len(logprobs) != len(tokens):
            raise RolloutError(f"its answer has no log-probability for each token: {answer[:120]!r}")
        if every and min((len(scores) for scores in choice.prompt_logprobs[1:] if scores), default=0) < top_k:
            raise RolloutError(f"its answer has fewer likely tokens than teacher.top_k={top_k}: {answer[:120]!r}")
        return RowScores(np.asarray(logprobs, "<f4").tobytes(), top_tokens)

    async def _answer(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
        """The body of a successful response; waits for a teacher that is busy or unreachable."""
        url = f"{self._config.url.rstrip('/')}/completions"
        failures = 0
        while True:
            try:
                async with self._slots, http.post(url, json=body, allow_redirects=False) as response:
                    answer = await response.read()
                if response.status == 200:
                    return answer
                reason = f"status {response.status}: {error_text(answer)}"
                if 300 <= response.status < 400:
                    location = response.headers.get("Location", "another address")
                    raise RolloutError(f"status {response.status}: redirected to {location}; set teacher.url to it")
                if response.status < 500 and response.status not in BUSY_STATUS:
                    raise RolloutError(reason)
            except (aiohttp.ClientError, OSError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            self._trouble = reason
            if failures in (0, 10, 100):
                log.warning("the teacher at %s is retried: %s", url, reason)

            await asyncio.sleep(pause_after(failures))
            failures += 1


def _top_tokens(
    tokens: Sequence[int],
    sampled: NDArray[np.uint8],
    entries: Sequence[Mapping[str, _TokenLogprob] | None],
    top_k: int,
) -> TopTokens:
    """The k likeliest tokens at each sampled token, without that token, whose log-probability is separate.

    A server returns the k likeliest tokens, and the token of the row if that is not among them. So one entry is absent
    where it is; more are, where the server has fewer tokens.
    """
    positions = np.flatnonzero(sampled)
    ids = np.zeros((len(positions), top_k), "<i4")
    logprobs = np.full((len(positions), top_k), ABSENT, "<f4")
    for row, position in enumerate(positions.tolist()):
        scores = entries[position] or {}
        others = [(score.logprob, int(token)) for token, score in scores.items() if int(token) != tokens[position]]
        likeliest = sorted(others, key=lambda pair: (-pair[0], pair[1]))[:top_k]
        for column, (logprob, token) in enumerate(likeliest):
            ids[row, column], logprobs[row, column] = token, logprob
    return TopTokens(ids.tobytes(), logprobs.tobytes())
