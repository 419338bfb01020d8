"""Reward functions that do wrong in groups of samples: all are counted, none is a 0, and nothing is left."""

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest

from pipeline.config import RewardConfig, TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.rollout.sample_rollout import failure_kind
from pipeline.transport.sample_records import Group
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support.tasks.hostile_functions import FINE, HUNDRED, Provoking, reason_of

pytestmark = pytest.mark.integration

TINY_TEXT = BUILT_IN / "tiny_text"
SAMPLES = 10


async def groups_of(count: int, notes: Path, seconds: float) -> list[Group]:
    """So many groups of ten samples, as an actor makes them, with real processes; `seconds` is what a call may take."""
    task = TaskConfig(name="arithmetic", seconds=seconds, memory_bytes=1 << 31, processes=4)
    name = "tests.support.tasks.hostile_functions:hostile"
    reward = RewardConfig(functions=(name,), options={"hostile": {"notes": str(notes)}})
    config = make_config(
        model={"path": str(TINY_TEXT), "max_length": 64}, rollout={"group_size": SAMPLES, "max_tokens": 16}
    )
    chat, slots = ChatTokenizer(TINY_TEXT), asyncio.Semaphore(16)
    servers, setup = Provoking(chat), Setup(task, 0, TINY_TEXT, reward)
    async with WorkerPool(setup, WAIT_SECONDS) as pool:
        builder = GroupBuilder(load_task(task, 0), pool, chat, servers, config)

        async def one(position: int) -> Group:
            async with slots:
                return await builder.build(position)

        return list(await asyncio.gather(*map(one, range(count))))


def children() -> set[psutil.Process]:
    """Of this process, which other tests may have left some, such as a tracker of multiprocessing."""
    return set(psutil.Process().children(recursive=True))


def all_are_counted(groups: list[Group], seconds: float) -> None:
    hundreds = len(groups) * SAMPLES // 100
    rewards = Counter(sample.reward for group in groups for sample in group.samples)
    assert rewards == Counter({reward: HUNDRED[text] * hundreds for text, reward in FINE.items()})
    assert all(sample.metrics == {"rewards/hostile": sample.reward} for group in groups for sample in group.samples)
    reasons = Counter(failure_kind(reason) for group in groups for reason in group.failures)
    expected: Counter[str] = Counter()
    for text, count in HUNDRED.items():
        if text not in FINE:
            expected[failure_kind(reason_of(text, seconds))] += count * hundreds
    assert reasons == expected


def nothing_is_left(before: set[psutil.Process], notes: Path) -> None:
    wait_for("no new process to be left", lambda: children() <= before, WAIT_SECONDS)
    wait_for("who hung to be gone, daemons too", lambda: not any(map(lives, notes.iterdir())), WAIT_SECONDS)


def lives(note: Path) -> bool:
    """Whether the process that left a note under its pid still runs, and not a later one with this pid."""
    try:
        return psutil.Process(int(note.name)).create_time() <= note.stat().st_mtime + 1
    except psutil.NoSuchProcess:
        return False


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_hundred_hostile_functions_cost_their_samples_and_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, there = open_files(), children()
    groups = asyncio.run(groups_of(100 // SAMPLES, tmp_path, 10))
    all_are_counted(groups, 10)
    nothing_is_left(there, tmp_path)
    assert open_files() == before
    assert len(capfd.readouterr().err) < 1 << 20, "what is printed is held back"


@pytest.mark.trial
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_functions_leave_an_actor_as_it_was(tmp_path: Path) -> None:
    asyncio.run(groups_of(100 // SAMPLES, tmp_path, 2))
    files, there, memory = open_files(), children(), psutil.Process().memory_info().rss
    groups = asyncio.run(groups_of(10_000 // SAMPLES, tmp_path, 2))
    all_are_counted(groups, 2)
    nothing_is_left(there, tmp_path)
    assert open_files() == files
    assert psutil.Process().memory_info().rss < memory + (1 << 27)
