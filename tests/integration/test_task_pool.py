"""Worker processes of a task: what a hostile reward costs, and what it leaves. Hours pass at once (`jumping_loop`)."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.config import TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import Completion, Prompt, user_prompt
from pipeline.environments.rewards import Score
from pipeline.environments.task_calls import RenderedPrompt
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.environments.worker_process import WorkerProcess
from pipeline.errors import TaskError
from pipeline.utils.waiting import wait_for
from tests.fakes.jumping_loop import pass_time, run_jumping
from tests.patience import WAIT_SECONDS
from tests.support.processes import gone
from tests.support.tasks.hostile_task import HANGING_PROMPT, LOCAL_PROMPT, REASONS

pytestmark = pytest.mark.integration

DEADLINE = 3600.0
PROMPT = user_prompt("2+2")


def a_setup(notes: Path, processes: int = 2, name: str = "tests.support.tasks.hostile_task:Hostile") -> Setup:
    task = TaskConfig(
        name=name, options={"notes": str(notes)}, processes=processes, seconds=DEADLINE, memory_bytes=1 << 31
    )
    return Setup(task, 0, BUILT_IN / "tiny_qwen3")


def in_pool(notes: Path, story: Callable[[WorkerPool], Awaitable[None]], processes: int = 2) -> None:
    """`story` with a pool of workers."""

    async def told() -> None:
        async with WorkerPool(a_setup(notes, processes), 10 * DEADLINE) as pool:
            await story(pool)

    run_jumping(asyncio.wait_for(told(), 1000 * DEADLINE))


async def hanging(notes: Path, count: int) -> list[int]:
    """The pids of those that hang, once there are `count`. Waits in real time, of which the pool knows nothing."""
    return await asyncio.to_thread(
        wait_for,
        f"{count} that hang",
        lambda: pids if len(pids := [int(note.name) for note in notes.iterdir()]) == count else None,
        60,
    )


async def rewards(pool: WorkerPool, prompt: Prompt, texts: Sequence[str]) -> list[float | str]:
    """The rewards of single turns without their metrics."""
    scores = await pool.rewards(prompt, [Completion(text) for text in texts])
    return [score.reward if isinstance(score, Score) else score for score in scores]


def test_each_bad_reward_fails_its_own_sample_with_its_reason_and_the_others_are_scored(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        texts = [text for bad in REASONS for text in ("ok", bad, "ok")]
        expected = [value for bad in REASONS for value in (1.0, REASONS[bad], 1.0)]
        assert await rewards(pool, PROMPT, texts) == expected
        assert pool.finished_calls == len(texts)

    in_pool(tmp_path, story)


@pytest.mark.parametrize("what", ["hang", "print", "leave", "close"])
def test_a_reward_that_never_ends_is_ended_with_all_it_started(
    tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story(pool: WorkerPool) -> None:
        scoring = asyncio.create_task(rewards(pool, PROMPT, ["ok", what, "ok"]))
        pids = await hanging(tmp_path, 2 if what == "leave" else 1)
        if what != "close":
            await pass_time(DEADLINE + 1)
        first, failed, last = await scoring
        why = "ended its process: closed its connection" if what == "close" else "took too long: more than task.seconds"
        assert (first, last) == (1.0, 1.0)
        assert str(failed).startswith(f"reward {why}")
        for pid in pids:
            await asyncio.to_thread(wait_for, f"{pid} to be gone", lambda pid=pid: gone(pid), 20)

    in_pool(tmp_path, story)
    assert len(capfd.readouterr().err) < 1 << 20, "what it prints is held back"


def test_rewards_that_hang_in_every_process_disable_nothing(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        stuck = [asyncio.create_task(rewards(pool, PROMPT, ["hang"])) for _ in range(3)]
        healthy = asyncio.create_task(rewards(pool, PROMPT, ["ok"]))
        for count in (1, 2, 3):
            await hanging(tmp_path, count)
            await pass_time(DEADLINE + 1)
        assert await healthy == [1.0]
        for failed in await asyncio.gather(*stuck):
            assert str(failed[0]).startswith("reward took too long")
        assert await rewards(pool, PROMPT, ["ok"] * 3) == [1.0] * 3

    in_pool(tmp_path, story, processes=1)


def test_while_one_process_is_busy_another_starts_and_the_loop_runs_on(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        slow = asyncio.create_task(pool.prompt(HANGING_PROMPT))
        await hanging(tmp_path, 1)
        other = await pool.prompt(3)
        assert other == RenderedPrompt(user_prompt("3+1", answer=4), "^3+1=")
        assert not slow.done()
        await pass_time(DEADLINE + 1)
        assert str(await slow).startswith("prompt took too long: more than task.seconds=3600")

    in_pool(tmp_path, story)


def test_a_copy_that_a_reward_forks_never_answers(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        assert await rewards(pool, PROMPT, ["fork", "fork", "ok"] * 3) == [0.5, 0.5, 1.0] * 3

    in_pool(tmp_path, story, processes=1)


def test_a_worker_whose_rewards_leave_processes_behind_is_replaced_before_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.environments.worker_pool.MAX_CHILDREN", 4)

    async def story(pool: WorkerPool) -> None:
        before = await rewards(pool, PROMPT, ["pid"])
        assert await rewards(pool, PROMPT, ["fork"] * 4 + ["pid"]) == [0.5] * 4 + before
        await rewards(pool, PROMPT, ["fork"])
        assert await rewards(pool, PROMPT, ["pid"]) != before

    in_pool(tmp_path, story, processes=1)


def test_a_worker_is_small_and_reads_nothing_of_ours(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        asked = await pool.prompt(3)
        assert isinstance(asked, RenderedPrompt)
        assert await rewards(pool, asked.prompt, ["heavy", "read"]) == [0.0, 0.0]

    in_pool(tmp_path, story)


def test_a_call_that_is_cancelled_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        cancelled = asyncio.create_task(rewards(pool, PROMPT, ["hang", "pid"]))
        (pid,) = await hanging(tmp_path, 1)
        cancelled.cancel()
        assert await rewards(pool, PROMPT, ["ok"]) == [1.0]
        assert gone(pid)

    in_pool(tmp_path, story, processes=1)


def test_a_worker_that_dies_between_calls_costs_no_sample(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        (pid,) = await rewards(pool, PROMPT, ["pid"])
        process = psutil.Process(int(pid))
        process.kill()
        await asyncio.to_thread(wait_for, "its end", lambda: process.status() == psutil.STATUS_ZOMBIE, 20)
        assert await rewards(pool, PROMPT, ["ok"]) == [1.0]

    in_pool(tmp_path, story)


def test_a_process_that_has_ended_reads_no_file_that_got_the_number_of_its_output() -> None:
    async def story() -> None:
        process = WorkerProcess("pipeline.environments.task_worker", "a process", {})
        number = process._printed
        assert number is not None
        await process.ended()
        process.pass_on_print()
        source, target = os.pipe()
        os.dup2(source, number)
        os.write(target, b"of another file")
        process.pass_on_print()
        assert os.read(number, 64) == b"of another file"
        for other in {source, target, number}:
            os.close(other)

    asyncio.run(story())


def test_a_prompt_that_cannot_travel_says_so_and_costs_no_worker(tmp_path: Path) -> None:
    async def story(pool: WorkerPool) -> None:
        before = await rewards(pool, PROMPT, ["pid"])
        assert str(await pool.prompt(LOCAL_PROMPT)).startswith("prompt cannot be pickled")
        there: Prompt = user_prompt("2+2", answer=lambda: 0)
        (failed,) = await rewards(pool, there, ["ok"])
        assert str(failed).startswith("prompt cannot be pickled")
        assert await rewards(pool, PROMPT, ["pid"]) == before

    in_pool(tmp_path, story)


def test_a_task_that_a_worker_cannot_load_ends_the_actor_with_the_reason(tmp_path: Path) -> None:
    async def start() -> None:
        async with WorkerPool(a_setup(tmp_path, name="tests.unit.environments.user_tasks:Raises"), 60):
            raise AssertionError("it was loaded")

    with pytest.raises(TaskError, match="cannot load it"):
        asyncio.run(start())


def test_workers_die_with_the_actor(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom tests.integration import test_task_pool as tests\n"
        "async def main():\n"
        "    async with tests.WorkerPool(tests.a_setup(Path(sys.argv[1])), 60) as pool:\n"
        "        await tests.rewards(pool, tests.PROMPT, ['hang'])\n"
        "asyncio.run(main())"
    )
    actor = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=dict(os.environ))
    try:
        (pid,) = asyncio.run(hanging(tmp_path, 1))
    finally:
        actor.send_signal(signal.SIGKILL)
        actor.wait()
    wait_for("the worker to be gone", lambda: gone(pid), WAIT_SECONDS)


@pytest.mark.trial
@pytest.mark.timeout(3600)
def test_ten_thousand_rewards_half_of_them_hostile_are_all_accounted_for(tmp_path: Path) -> None:
    bad = [*REASONS, *(["raise", "nan", "text"] * 40), "fork"]
    texts = [bad[index // 2 % len(bad)] if index % 2 else "ok" for index in range(10_000)]
    expected = {"ok": 1.0, "fork": 0.5} | REASONS

    async def story(pool: WorkerPool) -> None:
        groups = [texts[start : start + 8] for start in range(0, len(texts), 8)]
        scored: list[Any] = await asyncio.gather(*(rewards(pool, PROMPT, group) for group in groups))
        assert [value for group in scored for value in group] == [expected[text] for text in texts]

    in_pool(tmp_path, story)
