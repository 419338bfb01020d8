"""Environments behind servers of OpenEnv: a real one where the library is installed, and servers that go wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.config import TaskConfig
from pipeline.environments import load_task
from pipeline.environments.games.game_protocol import GameStep
from pipeline.environments.games.open_games import digest
from pipeline.environments.games.openenv_server import LocalServer, OpenEnvError, Session
from pipeline.errors import ConfigError, TaskError
from tests.support.tasks.players import group_of, turns_after
from tests.unit.environments.test_games import play_texts

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
FAULTS = [sys.executable, "-m", "tests.support.servers.openenv_faults", "{port}"]
EXAMPLE = [PYTHON, str(ROOT / "docs" / "examples" / "openenv_guess.py"), "{port}"]


def _installed() -> bool:
    probe = [PYTHON, "-c", "import openenv.core.env_server.http_server"]
    return subprocess.run(probe, capture_output=True, timeout=300, check=False).returncode == 0


needs_openenv = pytest.mark.skipif(
    not _installed(), reason="no openenv: pip install it into a venv and set OPENENV_PYTHON to that one's python"
)


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def options_of(command: list[str], **options: Any) -> dict[str, Any]:
    return {"command": command, "action": {"word": "{action}"}, "observation": "text", "held_out": 2, **options}


def openenv_task(command: list[str] = FAULTS, **options: Any) -> Any:
    return load_task(TaskConfig(name="openenv", options=options_of(command, **options)), 0)


@pytest.fixture(scope="module")
def faulty() -> Iterator[LocalServer]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    server = LocalServer(FAULTS, 120)
    yield server
    server.end()


def replied(server: LocalServer, word: str, **options: Any) -> GameStep:
    """The reply to one word, on a server that runs already."""
    settings = {"url": server.url, "command": [], **options}
    task = load_task(TaskConfig(name="openenv", options={**options_of([]), **settings}), 0)
    try:
        (step,) = play_texts(task, task.prompt(0), [word])
    finally:
        task._games.close()
    return step


@needs_openenv
def test_a_real_server_is_started_played_and_ended(tmp_path: Path) -> None:
    options = options_of(EXAMPLE, action={"number": "{action}"}, max_turns=3)

    def bisect(text: str) -> str:
        hint = turns_after(text)[-1]
        return {"higher": "3", "lower": "1"}.get(hint, "2" if "2" not in turns_after(text) else "no number")

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    group, players = group_of(tmp_path, "openenv", options, bisect, samples=4, processes=2, seconds=120)
    assert group.failures == ()
    assert {sample.reward for sample in group.samples} == {1.0}
    assert turns_after(players.seen[0])[-1] == "1 to 3"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "servers end with the workers"


@needs_openenv
@pytest.mark.parametrize("text", ["", "two", "99999999999999999999x", "\x00", "[1]", "9" * 5000])
def test_a_real_server_refuses_hostile_actions(text: str) -> None:
    task = openenv_task(EXAMPLE, action={"number": "{action}"}, invalid_reward=-0.5)
    first, second = play_texts(task, task.prompt(0), [text, "2"])
    assert (first.valid, first.reward, first.observation) == (False, -0.5, "Invalid action.")
    assert second.valid, "the environment is as before"
    task._games.close()
    task._server.end()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("text", "the server's reply to step is no JSON"),
        ("list", "the server's reply to step has no data"),
        ("empty", "the server's reply to step has no data"),
        ("deep", "the server's reply to step is no JSON"),
        ("nan", "the environment's reward is nan, no finite number"),
        ("reward", "could not convert string to float: 'much'"),
        ("nothing", "task.options.observation=text: no text; there is NoneType"),
        ("raises", "step: EXECUTION_ERROR: not so"),
        ("leave", "step failed: the server closed the connection"),
        ("hang", "no reply to step after 1 s"),
    ],
)
def test_a_faulty_reply_is_the_samples_reason(word: str, reason: str, faulty: LocalServer) -> None:
    with pytest.raises((OpenEnvError, ValueError), match=re.escape(reason)):
        replied(faulty, word, step_seconds=1 if word == "hang" else 50)
    assert replied(faulty, "hello").observation == "said hello", "other sessions go on"


def test_replies_become_steps(faulty: LocalServer) -> None:
    assert replied(faulty, "none") == GameStep("on")
    assert replied(faulty, "done") == GameStep("over", 1.0, done=True)
    assert replied(faulty, "invalid", invalid_reward=-1) == GameStep("Invalid action.", -1.0, valid=False)
    assert replied(faulty, "counted", metrics=["tries", "absent"]) == GameStep("on", metrics={"tries": 3.0})
    assert len(replied(faulty, "long").observation) == 20_000
    assert replied(faulty, '{"word": "x"}', action={}) == GameStep("said x")
    assert not replied(faulty, "[" * 5000, action={}).valid
    whole = replied(faulty, "x", observation="")
    assert whole.observation == '{"text": "said x"}'


def test_a_server_that_ended_is_started_again_and_its_games_are_played_again() -> None:
    task = openenv_task()
    prompt = task.prompt(0)
    with pytest.raises(OpenEnvError, match=r"the server closed the connection|step failed"):
        play_texts(task, prompt, ["exit"])
    dead = task._server
    dead._process.kill_all()
    (step,) = play_texts(task, prompt, ["hello"])
    assert step.observation == "said hello"
    assert task._server is not dead
    task._games.close()
    process = task._server._process
    task._server.end()
    assert process.group_is_gone()


def test_the_games_of_a_server_that_was_killed_are_played_again() -> None:
    task = openenv_task()
    prompt = task.prompt(0)
    (first,) = play_texts(task, prompt, ["one"])
    killed = task._server._process
    killed.kill_all()
    seen = digest(digest("", prompt.columns["observation"]), first.to_json())
    reply = task.use(prompt, "step", {"actions": ["one", "two"], "seen": seen})
    assert GameStep.from_json(reply) == GameStep("said two")
    assert task._server._process is not killed
    task._games.close()
    task._server.end()


def test_a_server_that_hangs_is_replaced_by_the_next_game() -> None:
    task = openenv_task(step_seconds=1)
    prompt = task.prompt(0)
    task._games.close()
    hung = task._server._process
    os.kill(hung.pid, signal.SIGSTOP)
    with pytest.raises(OpenEnvError, match=r"no reply to the connection to .* after 1 s"):
        task.prompt(1)
    assert hung.group_is_gone()
    task.options = task.options.model_copy(update={"step_seconds": 50})
    (step,) = play_texts(task, prompt, ["hello"])
    assert step.observation == "said hello"
    task._games.close()
    task._server.end()


def test_a_server_that_starts_for_longer_than_a_call_may_take_serves_its_worker(tmp_path: Path) -> None:
    module = "'tests.support.servers.openenv_faults', run_name='__main__'"
    code = f"import runpy, time; time.sleep(4); runpy.run_module({module})"
    options = options_of([sys.executable, "-c", code, "{port}"])
    group, _ = group_of(tmp_path, "openenv", options | {"max_turns": 1}, lambda _: "hello", processes=1, seconds=3)
    assert group.failures == ()


def test_a_worker_whose_server_does_not_start_reports_the_reason(tmp_path: Path) -> None:
    options = options_of([sys.executable, "-c", "raise SystemExit('no openenv here')", "{port}"])
    with pytest.raises(TaskError, match=r"expected a server with an environment that opens; .*: no openenv here"):
        group_of(tmp_path, "openenv", options, lambda _: "hello", processes=1)


def test_a_server_of_one_session_serves_one_game_after_another() -> None:
    task = openenv_task([*FAULTS, "one"], open_games=1)
    prompts = [task.prompt(index) for index in range(3)]
    steps = [play_texts(task, prompt, ["a", "b"])[-1].observation for prompt in prompts]
    assert steps == ["said b"] * 3
    assert len(task._games) == 1
    task._games.close()
    task._server.end()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-program", "{port}"], "no program no-such-program"),
        (
            [sys.executable, "-c", "print('no library'); raise SystemExit(3)", "{port}"],
            "exited with code 3: no library",
        ),
        ([sys.executable, "-c", "import time; time.sleep(600)", "{port}"], "was not healthy after 2 s"),
    ],
)
def test_a_server_that_does_not_start_is_one_clear_error(command: list[str], words: str) -> None:
    began = time.monotonic()
    with pytest.raises(OpenEnvError) as raised:
        LocalServer(command, 2 if "healthy" in words else 60)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 60
    assert not [child for child in psutil.Process().children() if "{port}" in " ".join(child.cmdline())]


def test_an_address_without_a_server_is_the_reason() -> None:
    with pytest.raises(OpenEnvError, match=r"the connection to http://127\.0\.0\.1:9 failed: Client"):
        Session("http://127.0.0.1:9", 5)


def test_the_launcher_reports_a_server_that_does_not_start() -> None:
    task = openenv_task([sys.executable, "-c", "raise SystemExit('no openenv here')", "{port}"])
    with pytest.raises(ConfigError, match="exited with code 1: no openenv here") as raised:
        task.held_out()
    assert raised.value.key == "task.options.command"
    with pytest.raises(ConfigError, match=r"connection to http://127\.0\.0\.1:9 failed") as raised:
        openenv_task([], url="http://127.0.0.1:9").held_out()
    assert raised.value.key == "task.options.url"


def test_the_launcher_refuses_demonstrations_that_are_all_invalid_actions() -> None:
    """Such as those with the wrong name of a field in task.options.action."""
    task = openenv_task(demonstration_actions=["invalid", "invalid"])
    with pytest.raises(
        ConfigError, match=r"accepts none of .*demonstration_actions .*: step: VALIDATION_ERROR: not so"
    ):
        task.demonstration(0)
    assert openenv_task(demonstration_actions=["invalid", "hello"]).demonstration(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a command, or the URL of a server"),
        ({"command": ["x", "{port}"], "url": "http://a"}, "a command, or the URL of a server"),
        ({"command": ["x"]}, "command with {port}"),
        ({"url": "http://a", "action": {"word": "x"}}, "{action} in one of its fields"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_task(TaskConfig(name="openenv", options=options), 0)
