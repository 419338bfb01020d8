"""An event loop whose clock the test moves on, so that hours pass without waiting."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop with a clock that `pass_time` moves."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


async def pass_time(seconds: float) -> None:
    """Let whatever has happened be noticed, `seconds` pass at once, and whatever is due then happen."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    await _turns()
    loop.skipped += seconds
    await _turns()


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in which time may jump."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)
