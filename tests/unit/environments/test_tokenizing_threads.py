"""Tokenizing of long texts beside an event loop."""

import asyncio
import time
from pathlib import Path

import pytest

from pipeline.environments.chat_tokenizer import LONG_TEXT, ChatTokenizer
from tests.unit.environments.test_tool_task import bytes_model


@pytest.fixture
def chat(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(bytes_model(tmp_path))


def test_an_event_loop_runs_while_a_thread_tokenizes_a_long_text(chat: ChatTokenizer) -> None:
    """In one call of a few, since other processes pause both: no pause of the loop is as long as half of the call."""

    async def story() -> tuple[float, float]:
        began = time.monotonic()
        encoding = asyncio.create_task(asyncio.to_thread(chat.encode, "hello world " * (1 << 15)))
        longest, last = 0.0, began
        while not encoding.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest, last - began

    calls = (asyncio.run(story()) for _ in range(10))
    assert any(longest < whole / 2 for longest, whole in calls)


@pytest.mark.parametrize("size", [LONG_TEXT - 1, LONG_TEXT, LONG_TEXT + 1])
def test_a_long_text_has_the_tokens_and_offsets_of_a_short_one(chat: ChatTokenizer, size: int) -> None:
    text = ("ab ü<|im_end|>" * LONG_TEXT)[:size]
    tokens, offsets = chat.encode_with_offsets(text)
    parts = [text[at : at + 14] for at in range(0, size, 14)]
    assert chat.encode(text) == tokens == [token for part in parts for token in chat.encode(part)]
    assert (offsets[0][0], offsets[-1][1]) == (0, size)
