"""A reward model as a reward: its scores are those of transformers, and what a bad conversation or process costs."""

import asyncio
import json
import os
import pickle
import resource
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipeline.config import RewardConfig, RewardModelConfig, TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import Completion, Prompt, load_task, user_prompt, worker_process
from pipeline.environments.reward_model_process import RewardModel
from pipeline.environments.reward_model_queue import RewardModelProcess
from pipeline.environments.rewards import Score, check_rewards
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.environments.worker_process import LENGTH_BYTES
from pipeline.errors import ConfigError, TaskError
from pipeline.roles import TRAINER
from pipeline.utils.subprocesses import Leader, start_connected
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.processes import gone
from tests.support.runs.launched import Launches

pytestmark = pytest.mark.integration
PROMPT = user_prompt("2+2", answer="4")
TEXTS = ("4", "5", "1234567890+++---12345", "", "+", "44", "3" * 34)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with random weights and one label, with the tokenizer of the tiny model."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    path = tmp_path_factory.mktemp("reward_model") / "model"
    shutil.copytree(BUILT_IN / "tiny_qwen3", path)
    torch.manual_seed(7)
    settings = Qwen3Config.from_pretrained(path)
    settings.num_labels = 1
    settings.initializer_range = 0.2
    Qwen3ForSequenceClassification(settings).save_pretrained(path)
    return path


def in_pool(model: RewardModelConfig, story: Callable[[WorkerPool], Awaitable[None]], **reward: Any) -> None:
    """`story` with a pool of a task whose reward has this model."""
    task = TaskConfig(name="arithmetic", processes=1, seconds=60)
    setup = Setup(task, 0, BUILT_IN / "tiny_qwen3", RewardConfig(model=model, **reward))

    async def run() -> None:
        async with asyncio.timeout(240), WorkerPool(setup, 120) as pool:
            await story(pool)

    asyncio.run(run())


def said(*texts: str) -> list[Completion]:
    return [Completion(text, ({"role": "assistant", "content": text},)) for text in texts]


async def scores(pool: WorkerPool, prompt: Prompt, texts: Sequence[str]) -> list[float | str]:
    rewards = await pool.rewards(prompt, said(*texts))
    return [one.reward if isinstance(one, Score) else one for one in rewards]


def by_transformers(directory: Path, prompt: str, texts: Sequence[str]) -> list[float]:
    """The logit of each conversation, alone in its batch, by the tokenizer and the class of transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    logits = []
    for text in texts:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        with torch.no_grad():
            logits.append(float(classifier(torch.tensor([tokens])).logits.item()))
    return logits


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[Leader]:
    """The processes of reward models so far, which the tests' server forks: each would import torch and transformers
    again."""
    leaders: list[Leader] = []

    def start(argv: Sequence[str], env: Mapping[str, str], output: int) -> tuple[Leader, socket.socket]:
        if not argv[-1].endswith("reward_model_process"):
            return start_connected(argv, env, output)
        ours, its = socket.socketpair()
        with ExitStack() as opened, its:
            opened.enter_context(ours)
            leaders.append(Leader(argv, env, stdin=its.fileno(), output=output, forks=forks.request(TRAINER)))
            opened.pop_all()
        return leaders[-1], ours

    monkeypatch.setattr(worker_process, "start_connected", start)
    return leaders


def newest(started: Sequence[Leader]) -> psutil.Process:
    """The process of the reward model."""
    wait_for("the process to run", lambda: started[-1].poll() is not None or started[-1].pid, WAIT_SECONDS)
    return psutil.Process(started[-1].pid)


def test_scores_are_those_of_transformers_and_a_lost_process_costs_no_other_sample(
    directory: Path, started: list[Leader]
) -> None:
    model = RewardModelConfig(path=str(directory), weight=2.0, batch_size=4, seconds=8, max_length=40, threads=1)
    expected = by_transformers(directory, "2+2", TEXTS)
    assert len({round(value, 3) for value in expected}) == len(TEXTS)
    rewards = [0.5 * (text == "4") + 2 * logit for text, logit in zip(TEXTS, expected, strict=True)]

    async def story(pool: WorkerPool) -> None:
        first, *_, long = await pool.rewards(PROMPT, said(*TEXTS, "3" * 41))
        assert isinstance(first, Score)
        assert first.metrics == {"rewards/task": 1.0, "rewards/reward_model": pytest.approx(expected[0], abs=1e-5)}
        assert long == "conversation too long for the reward model: 47 tokens, at most 40"
        killed = newest(started)
        killed.suspend()  # the next batch is with the process when it is killed
        scoring = asyncio.create_task(scores(pool, PROMPT, TEXTS))
        await asyncio.sleep(0.2)
        killed.kill()
        assert await scoring == pytest.approx(rewards, abs=2e-5)
        stopped = newest(started)
        stopped.suspend()
        late = await scores(pool, PROMPT, ["4", "5"])
        assert late == ["reward model took too long: more than reward.model.seconds=8"] * 2
        assert await scores(pool, PROMPT, TEXTS) == pytest.approx(rewards, abs=2e-5)
        assert gone(stopped.pid)

    in_pool(model, story, functions=("task",), weights=(0.5,))


def test_a_model_that_can_no_longer_be_loaded_ends_the_run_with_the_reason(
    directory: Path, tmp_path: Path, started: list[Leader]
) -> None:
    copied = Path(shutil.copytree(directory, tmp_path / "model"))

    async def story(pool: WorkerPool) -> None:
        (copied / "model.safetensors").unlink()
        newest(started).kill()
        with pytest.raises(TaskError, match=r"reward\.model\.path"):
            await scores(pool, PROMPT, ["4"])
        with pytest.raises(TaskError, match=r"reward\.model\.path"):
            await scores(pool, PROMPT, ["4"])

    in_pool(RewardModelConfig(path=str(copied), threads=1), story)


def test_samples_of_a_cancelled_group_are_not_scored(
    directory: Path, monkeypatch: pytest.MonkeyPatch, started: list[Leader]
) -> None:
    batches: list[list[str]] = []
    exchange = RewardModelProcess.exchange

    async def noted(process: RewardModelProcess, call: bytes, seconds: float) -> list[float | str]:
        batches.append([str(chat.messages[-1]["content"]) for chat in pickle.loads(call[LENGTH_BYTES:])])
        return await exchange(process, call, seconds)

    monkeypatch.setattr(RewardModelProcess, "exchange", noted)

    async def story(pool: WorkerPool) -> None:
        process = newest(started)
        process.suspend()
        first = asyncio.create_task(scores(pool, PROMPT, ["4"]))
        await asyncio.to_thread(wait_for, "the first batch", lambda: batches, WAIT_SECONDS)
        cancelled = asyncio.create_task(scores(pool, PROMPT, ["5", "6"]))
        last = asyncio.create_task(scores(pool, PROMPT, ["7"]))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        process.resume()
        assert [type(one) for one in (*await first, *await last)] == [float, float]
        assert batches == [["4"], ["7"]]

    in_pool(RewardModelConfig(path=str(directory), threads=1), story)


def test_an_answer_that_is_no_list_of_scores_fails_the_calls(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(process: RewardModelProcess, call: bytes, seconds: float) -> list[float | str]:
        del process, call, seconds
        return []

    monkeypatch.setattr(RewardModelProcess, "exchange", odd)

    async def story(pool: WorkerPool) -> None:
        for _ in range(2):
            with pytest.raises(TaskError, match="reward model: ValueError"):
                await asyncio.wait_for(scores(pool, PROMPT, ["4"]), 60)

    in_pool(RewardModelConfig(path=str(directory), threads=1), story)


@contextmanager
def two_free_descriptors() -> Iterator[None]:
    """This process may open two more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(2)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_cannot_be_started_again_ends_the_run_with_the_reason(
    directory: Path, started: list[Leader]
) -> None:
    async def story(pool: WorkerPool) -> None:
        newest(started).kill()
        with two_free_descriptors(), pytest.raises(TaskError, match="Too many open files"):
            await asyncio.wait_for(scores(pool, PROMPT, ["4"]), 60)

    in_pool(RewardModelConfig(path=str(directory), threads=1), story)


def edited(path: Path, name: str, **changes: Any) -> None:
    tree = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(tree | changes))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda path: shutil.rmtree(path), "there is none; experiment=reward_model trains one"),
    "no config": (lambda path: (path / "config.json").unlink(), "expected a config.json that is JSON"),
    "causal": (
        lambda path: edited(path, "config.json", architectures=["Qwen3ForCausalLM"]),
        "expected a sequence classifier.*Qwen3ForCausalLM",
    ),
    "two labels": (
        lambda path: edited(path, "config.json", id2label={"0": "bad", "1": "good"}),
        "expected a sequence classifier with one label.*has 2",
    ),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), r"expected a tokenizer\.json"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"expected a \*\.safetensors"),
    "no template": (
        lambda path: edited(path, "tokenizer_config.json", chat_template=None),
        "expected a model with one chat template",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_directory_is_refused_in_one_line_before_anything_starts(
    name: str, directory: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(directory, tmp_path / "model"))
    damage, message = BAD[name]
    task = load_task(TaskConfig(name="arithmetic"), 0)
    config = RewardConfig(model=RewardModelConfig(path=str(copied)))
    check_rewards(config, task, "arithmetic")
    damage(copied)
    with pytest.raises(ConfigError, match=message) as error:
        check_rewards(config, task, "arithmetic")
    assert error.value.key == "reward.model.path"
    assert "\n" not in str(error.value)


def test_a_length_beyond_the_positions_and_a_missing_weight_are_refused(directory: Path, tmp_path: Path) -> None:
    task = load_task(TaskConfig(name="arithmetic"), 0)
    config = RewardConfig(model=RewardModelConfig(path=str(directory), max_length=513))
    with pytest.raises(ConfigError, match=r"reward\.model\.max_length.*at most 512"):
        check_rewards(config, task, "arithmetic")
    from safetensors.torch import load_file, save_file

    copied = Path(shutil.copytree(directory, tmp_path / "model"))
    tensors = load_file(copied / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "score.weight"}, copied / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lack score\.weight"):
        RewardModel(RewardModelConfig(path=str(copied)))


RULE = """
def right(completions, chosen, **columns):
    return [float(turns[-1]["content"] == answer) for turns, answer in zip(completions, chosen, strict=True)]
"""
"""The rule that made the preferences of `conf/data/sums.jsonl`, as a reward function: 1 for the right sum."""


@pytest.mark.slow
@pytest.mark.trial
def test_rl_on_a_trained_reward_model_raises_the_true_score_and_resumes_after_a_kill(
    launches: Launches, tmp_path: Path
) -> None:
    (tmp_path / "true_rule.py").write_text(RULE)
    env = {"PYTHONPATH": str(tmp_path)}
    trained = launches.submit_alone("reward_model", "experiment=reward_model", "tracking=none")
    trained.wait("the reward model", trained.run.finished.exists, 900)
    assert trained.end() == 0, trained.output()
    # The rule is measured with weight 0, so only the reward model is trained on.
    keys = (
        "experiment=rlhf",
        "tracking=none",
        f"reward.model.path={trained.run.model}",
        "reward.functions=[true_rule:right]",
        "reward.weights=[0]",
    )
    first = launches.submit_alone("rlhf", *keys, env=env)
    first.wait_for_step(10, 900)
    first.interrupt(signal.SIGKILL)
    first.assert_nothing_left()
    second = launches.submit_alone("rlhf", *keys, env=env)
    second.wait("the end", second.run.finished.exists, 1800)
    assert second.end() == 0, second.output()
    steps = sorted({row["step"] for row in second.rows()})
    assert steps == list(range(1, steps[-1] + 1))
    measured = {row["step"]: row for row in second.rows("eval")}
    before, after = measured[0], measured[max(measured)]
    sampled = [row["rewards/right"] for row in second.rows()]
    first_steps, last_steps = sum(sampled[:10]) / 10, sum(sampled[-10:]) / 10
    held_out = {step: round(row["eval/rewards/right"], 3) for step, row in measured.items()}
    print(f"true score: samples {first_steps:.3f} → {last_steps:.3f}, held out {held_out}")
    assert after["eval/rewards/reward_model"] > before["eval/rewards/reward_model"] + 0.5
    assert last_steps > first_steps + 0.1
    assert after["eval/rewards/right"] > before["eval/rewards/right"]
