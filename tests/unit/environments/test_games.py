"""Games of Gymnasium and TextArena: the same start again, actions as text, what goes wrong, and no game left open."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import TaskConfig
from pipeline.environments import Prompt, load_task
from pipeline.environments.games import game_process, game_task
from pipeline.environments.games.game_process import GameProcess
from pipeline.environments.games.game_protocol import GameStep, read_action
from pipeline.environments.games.open_games import NOT_OPEN, NOT_SAME, OpenGames, digest
from pipeline.errors import ConfigError, DeadlineError, TaskError
from tests.support.tasks.players import group_of, turns_after

ROOT = Path(__file__).parents[3]
GAMES = "tests.support.tasks.text_games"
needs_gymnasium = pytest.mark.skipif(find_spec("gymnasium") is None, reason="pip install -e '.[gymnasium]'")
needs_textarena = pytest.mark.skipif(find_spec("textarena") is None, reason="pip install -e '.[textarena]'")


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find the environments of the tests."""
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.fixture
def closed() -> Iterator[list[str]]:
    from tests.support.tasks.text_games import CLOSED

    CLOSED.clear()
    yield CLOSED
    CLOSED.clear()


def gymnasium_task(name: str = "Guess", seed: int = 0, **options: Any) -> Any:
    environment = name if "-v" in name else f"{GAMES}:Rollcall{name}-v0"
    return load_task(TaskConfig(name="gymnasium", options={"id": environment, "held_out": 3, **options}), seed)


def guess_options(name: str = "Guess", **options: Any) -> dict[str, Any]:
    return {"id": f"{GAMES}:Rollcall{name}-v0", "prompt": "{observation}", "held_out": 3, **options}


def bisect(text: str) -> str:
    """The next guess of a digit after the hints so far."""
    low, high = 0, 9
    turns = turns_after(text)[1:] or turns_after(text)
    for guess, hint in re.findall(r"(\d)\n(higher|lower)", "\n".join(turns)):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


@needs_gymnasium
def test_an_episode_has_the_games_rewards_and_its_turns(tmp_path: Path) -> None:
    options = guess_options(metrics=["guesses", "absent"])
    group, players = group_of(tmp_path, "gymnasium", options, bisect)
    assert group.failures == ()
    sample = group.samples[0]
    sample.check()
    turns = sample.turns
    assert turns > 1
    assert sample.reward == 1.0 - 0.125 * (turns - 1)
    assert sample.metrics == {"game/guesses": turns, "game/invalid": 0.0, "game/finished": 1.0}
    row = players.chat.decode(sample.token_array().tolist())
    assert row.startswith(players.seen[-1]), "each observation follows the turns before it"
    assert turns_after(players.seen[0])[-1] == "Guess."


@needs_gymnasium
def test_the_last_reward_alone_counts_if_so_configured(tmp_path: Path) -> None:
    group, _ = group_of(tmp_path, "gymnasium", guess_options(reward="last"), bisect)
    assert {sample.reward for sample in group.samples} == {1.0}


@needs_gymnasium
def test_worker_processes_play_what_this_process_plays(tmp_path: Path) -> None:
    inline, _ = group_of(tmp_path, "gymnasium", guess_options(), bisect)
    workers, _ = group_of(tmp_path, "gymnasium", guess_options(), bisect, processes=2)
    for one, other in zip(inline.samples, workers.samples, strict=True):
        assert one.token_array().tolist() == other.token_array().tolist()
        assert one.reward == other.reward


@needs_gymnasium
def test_prompts_start_the_same_and_held_out_games_are_never_trained() -> None:
    first, again, other = gymnasium_task(), gymnasium_task(), gymnasium_task(seed=1)
    assert first.prompt(5) == again.prompt(5)
    assert len({first.prompt(index).answer for index in range(50)}) == 50
    assert first.prompt(5).answer != other.prompt(5).answer
    assert [prompt.answer for prompt in first.held_out()] == [0, 1, 2]
    assert first.held_out() == other.held_out()
    assert min(first.prompt(index).answer for index in range(50)) >= game_task.HELD_OUT_SEEDS
    assert first.can_replay(first.prompt(0))
    assert not gymnasium_task(deterministic=False).can_replay(first.prompt(0))


@needs_gymnasium
@pytest.mark.parametrize("limit", [1, 8])
def test_a_game_that_is_not_open_is_played_again(limit: int, closed: list[str]) -> None:
    task = gymnasium_task(open_games=limit)
    prompts = [task.prompt(index) for index in range(4)]
    games = [play(task, prompt, "55667788") for prompt in prompts]
    fresh = gymnasium_task()
    for prompt, steps in zip(prompts, games, strict=True):
        seen = digest("", prompt.columns["observation"])
        for number in range(len(steps)):
            actions = list("55667788")[: number + 1]
            reply = fresh.use(prompt, "step", {"actions": actions, "seen": seen})
            assert reply == steps[number]
            fresh.__dict__.pop("_games", None)  # another process makes the next call
            seen = digest(seen, reply)
    assert len(task._games) <= limit


def play(task: Any, prompt: Prompt, actions: str) -> list[str]:
    """The replies to actions of one character, in order, until the game is over."""
    seen, replies = digest("", prompt.columns["observation"]), list[str]()
    for number in range(len(actions)):
        replies.append(task.use(prompt, "step", {"actions": list(actions[: number + 1]), "seen": seen}))
        seen = digest(seen, replies[-1])
        if GameStep.from_json(replies[-1]).done:
            break
    return replies


@needs_gymnasium
def test_a_game_that_differs_when_played_again_is_refused(tmp_path: Path) -> None:
    task = gymnasium_task("Dice")
    prompt = task.prompt(0)
    replies = play(task, prompt, "12")
    task.__dict__.pop("_games")
    seen = digest(digest(digest("", "Guess."), replies[0]), replies[1])
    with pytest.raises(RuntimeError, match=re.escape(NOT_SAME)):
        task.use(prompt, "step", {"actions": ["1", "2", "3"], "seen": seen})
    stays = gymnasium_task("Dice", deterministic=False)
    assert len(play(stays, prompt, "123")) == 3, "in its own process it goes on"
    with pytest.raises(RuntimeError, match=re.escape(NOT_OPEN)):
        stays.use(prompt, "step", {"actions": ["1", "2", "3"], "seen": seen})


@needs_gymnasium
def test_games_that_share_the_global_generators_do_not_disturb_each_other() -> None:
    task = gymnasium_task("GlobalDice")
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    one, other = task.prompt(0), task.prompt(1)
    alone = play(gymnasium_task("GlobalDice"), one, "1234")
    seen = {0: digest("", one.columns["observation"]), 1: digest("", other.columns["observation"])}
    mixed = list[str]()
    for number in range(4):
        for which, prompt in enumerate((one, other)):
            reply = task.use(prompt, "step", {"actions": list("1234")[: number + 1], "seen": seen[which]})
            seen[which] = digest(seen[which], reply)
            mixed += [reply] * (which == 0)
    assert mixed == alone
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@needs_gymnasium
def test_every_game_is_closed(closed: list[str]) -> None:
    task = gymnasium_task(open_games=2)
    for index in range(6):
        task.prompt(index)
    assert len(closed) == 4, "the oldest ones make room"
    task._games.close()
    assert len(closed) == 6
    closed.clear()
    ends = gymnasium_task()
    play(ends, ends.prompt(0), "0123456789")
    assert len(closed) == 1, "it is over"
    closed.clear()
    faulty = gymnasium_task("Faulty")
    with pytest.raises(ValueError, match="the board is gone"):
        play(faulty, faulty.prompt(0), "0")
    with pytest.raises(OSError, match="no such"):
        gymnasium_task("Closed").prompt(0)
    assert closed == ["Faulty", "Closed"]


@needs_gymnasium
def test_idle_games_are_closed(closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    task = gymnasium_task()
    task.prompt(0)
    monkeypatch.setattr("pipeline.environments.games.open_games.IDLE_SECONDS", -1.0)
    task.prompt(1)
    assert len(closed) == 2


@needs_gymnasium
@pytest.mark.parametrize(
    ("digit", "reason"),
    [
        ("0", "environment failed: tool step raised ValueError: the board is gone"),
        ("1", "environment failed: tool step raised ValueError: the environment's reward is nan"),
        ("2", "environment failed: tool step ended its process: exited with code 3"),
        ("3", "environment failed: tool step took too long: more than task.seconds=3"),
    ],
)
def test_a_failing_environment_fails_its_sample_and_is_never_a_zero(digit: str, reason: str, tmp_path: Path) -> None:
    group, _ = group_of(tmp_path, "gymnasium", guess_options("Faulty"), lambda text: digit, processes=1, seconds=3)
    assert group.samples == ()
    assert group.failures[0].startswith(reason)


@needs_gymnasium
def test_a_long_observation_ends_the_game_in_time(tmp_path: Path) -> None:
    group, _ = group_of(tmp_path, "gymnasium", guess_options("Faulty"), lambda text: "9", max_length=300)
    sample = group.samples[0]
    assert (sample.turns, sample.metrics["game/finished"]) == (1, 0.0)
    assert len(sample.token_array()) < 300


HOSTILE = [
    "", " ", "up", "9" * 5000, "-" * 100, "٣", "1e999", "NaN", "null", "true", "[]", "{}", "[" * 5000, '{"x": 1}',
    "[1, 2, 3]", "[0.5]", '["a", "b"]', "[NaN, 1]", "[1e999, 0]", "\x00", "\ud800", '{"x": {"y": []}}', "[[[[1]]]]",
    "9" * 20, "[1.5, 1]", "[true, true]",
    '["1", "1"]', "[99999999999999999999, 1]", '[1, {"a": 2}]', "\\N{BELL}", "__import__('os')", "-2", "2",
    "0.5", "1_0",
]  # fmt: skip


@needs_gymnasium
@pytest.mark.parametrize("space", ["discrete", "box", "multi", "dict", "tuple"])
def test_a_hostile_action_costs_the_penalty_and_gets_the_message(space: str) -> None:
    task = gymnasium_task("Spaces", kwargs={"space": space}, invalid_reward=-0.5)
    prompt = task.prompt(0)
    game = task.open_game()
    for text in HOSTILE:
        game.reset(0)
        step = game.step(text)
        assert not step.valid, text
        assert (step.reward, step.done) == (-0.5, False)
        assert step.observation.startswith("Invalid action. Actions:")
        json.dumps(step.observation).encode()
    assert GameStep.from_json(play(task, prompt, "?")[0]).reward == -0.5


@needs_gymnasium
@pytest.mark.parametrize(
    ("space", "text", "echo"),
    [
        ("discrete", "-1", "-1"),
        ("discrete", " 1\n", "1"),
        ("box", "[0.5, -1]", "[0.5, -1.0]"),
        ("multi", "[1, 2]", "[1, 2]"),
        ("dict", '{"x": 1, "y": [0.25]}', '{"x": 1, "y": [0.25]}'),
        ("tuple", '[1, "ab"]', '[1, "ab"]'),
    ],
)
def test_an_action_of_each_space_is_read_and_its_observation_is_json(space: str, text: str, echo: str) -> None:
    game = gymnasium_task("Spaces", kwargs={"space": space}).open_game()
    game.reset(0)
    step = game.step(text)
    assert step.valid
    assert json.loads(step.observation) == {"action": json.loads(echo), "at": 0.1235}
    for seed in range(20):
        assert game.step(game.random_action(random.Random(seed))).valid


@pytest.mark.parametrize(
    ("pattern", "text", "action"),
    [
        ("", " up\n", "up"),
        (r"\[(\w+)\]", "I go [left], no, [up].", "up"),
        (r"\d+", "3 or 12", "12"),
        (r"\[(\w+)\]", "nowhere", ""),
        (r"<(a)?>", "<>", ""),
    ],
)
def test_the_action_is_the_last_match_of_the_pattern(pattern: str, text: str, action: str) -> None:
    assert read_action(text, pattern) == action


@needs_gymnasium
def test_a_rendered_map_marks_the_position_with_brackets() -> None:
    task = gymnasium_task("FrozenLake-v1", observation="render", actions=["left", "down", "right", "up"])
    prompt = task.prompt(0)
    assert prompt.messages[-1]["content"].splitlines() == [
        "[S]FFF", "FHFH", "FFFH", "HFFG", "Actions: left, down, right, up"
    ]  # fmt: skip
    assert GameStep.from_json(
        task.use(prompt, "step", {"actions": ["UP"], "seen": digest("", "[S]FFF\nFHFH\nFFFH\nHFFG")})
    ).valid


@needs_gymnasium
def test_demonstrations_are_valid_random_play() -> None:
    task = gymnasium_task(
        "FrozenLake-v1", actions=["l", "d", "r", "u"], action_format="[{action}]", prompt="{observation}"
    )
    shown = [task.demonstration(index) for index in range(40)]
    assert {demonstration.answer for demonstration in shown} == {"[l]", "[d]", "[r]", "[u]"}
    assert {len(demonstration.prompt.messages) for demonstration in shown} == {1, 3, 5, 7}
    assert shown[3:5] == [
        gymnasium_task("FrozenLake-v1", **task.options.model_dump(exclude={"id"})).demonstration(3),
        shown[4],
    ]
    task._process.end()


@needs_gymnasium
@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"id": ""}, "task.options.id", "an environment of gymnasium"),
        ({"id": "NoSuchGame-v0"}, "task.options.id", "NameNotFound"),
        ({"id": "no_such_module:Game-v0"}, "task.options.id", "no_such_module"),
        ({"id": f"{GAMES}:RollcallClosed-v0"}, "task.options.id", "OSError: no such board"),
        ({"id": "FrozenLake-v1", "kwargs": {"ice": 1}}, "task.options.id", "unexpected keyword argument 'ice'"),
        ({"id": "FrozenLake-v1", "actions": ["up"]}, "task.options.id", "has 1 names, but FrozenLake-v1 has 4 actions"),
        ({"id": "CartPole-v1", "observation": "render", "kwargs": {"render_mode": None}}, "task.options.id", "no text"),
        ({"id": "FrozenLake-v1", "action_pattern": "("}, "task.options.action_pattern", "a regular expression"),
        ({"id": "FrozenLake-v1", "held_out": 1 << 20}, "task.options.held_out", "less than 1048576"),
        ({"id": "FrozenLake-v1", "invalid_reward": float("nan")}, "task.options.invalid_reward", "finite"),
        ({"id": "FrozenLake-v1", "turns": 3}, "task.options.turns", "a known option"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_task(TaskConfig(name="gymnasium", options={"held_out": 2, **options}), 0).held_out()
    assert raised.value.key == key
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gymnasium", "textarena"])
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(game_task, "find_spec", lambda library: None)
    with pytest.raises(ConfigError, match=f"No module named '{name}'.*pip install.*{name}") as raised:
        load_task(TaskConfig(name=name, options={"id": "Any-v0"}), 0)
    assert raised.value.key == "task.name"


@needs_gymnasium
def test_the_launchers_process_imports_no_library_of_games() -> None:
    code = (
        "import sys; from pipeline.config import RewardConfig, TaskConfig\n"
        "from pipeline.environments import load_task\n"
        "from pipeline.environments.rewards import check_rewards\n"
        "task = load_task(TaskConfig(name='gymnasium', options={'id': 'FrozenLake-v1', 'held_out': 2}), 0)\n"
        "assert len(task.held_out()) == 2\n"
        "task.demonstration(0)\n"
        "check_rewards(RewardConfig(), task, 'gymnasium')\n"
        "print('gymnasium' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout.strip() == "False"


@needs_gymnasium
def test_a_process_of_games_that_hangs_or_ends_is_reported_and_gone() -> None:
    config = TaskConfig(name="gymnasium", options=guess_options("Faulty"))
    process = GameProcess(config, 0)
    prompt = gymnasium_task("Faulty").prompt(0)
    arguments = {"actions": ["3"], "seen": digest("", "Guess.")}
    with pytest.raises(DeadlineError):
        process.call("use", (prompt, "step", arguments), 5)
    assert process._process.group_is_gone()
    ends = GameProcess(config, 0)
    with pytest.raises(TaskError, match="exited with code 3 during use"):
        ends.call("use", (prompt, "step", {**arguments, "actions": ["2"]}), 60)
    assert ends._process.group_is_gone()


@needs_gymnasium
def test_checks_share_one_process_which_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[GameProcess]()
    stock = GameProcess.__init__

    def start(process: GameProcess, task: TaskConfig, seed: int) -> None:
        stock(process, task, seed)
        started.append(process)

    monkeypatch.setattr(GameProcess, "__init__", start)
    with game_process.shared_games():
        with game_process.shared_games():
            prompts = gymnasium_task().held_out()
        task = gymnasium_task()
        assert (task.held_out(), len(task.first_prompts())) == (prompts, 1)
        shown = [task.demonstration(index) for index in (0, 1)]
        assert len(started) == 1
        started[0].call("prompts", ((),), 60)
        started[0].end()
        assert gymnasium_task().held_out() == prompts, "another process replaces one that has ended"
    assert [process._process.group_is_gone() for process in started] == [True, True]
    assert [task.demonstration(index) for index in (0, 1)] == shown
    assert gymnasium_task().held_out() == prompts
    assert len(started) == 3, "a separate process without the block"


@needs_textarena
def test_a_game_of_textarena_gives_only_what_is_new(tmp_path: Path) -> None:
    for environment in ("GuessTheNumber-v0-raw", "GuessTheNumber-v0-train"):
        options = {"id": environment, "kwargs": {"max_number": 9}, "held_out": 3, "metrics": ["turn_count"]}
        group, players = group_of(tmp_path, "textarena", options, lambda text: f"I say [{bisect_hints(text)}]")
        assert group.failures == ()
        sample = group.samples[0]
        assert sample.reward == 1.0
        assert sample.metrics["game/turn_count"] == sample.turns > 1
        messages = turns_after(players.seen[-1])
        assert "You are playing Guess The Number." in messages[0]
        assert all(re.fullmatch(r"The target number is (higher|lower)\.", text) for text in messages[2::2])


def bisect_hints(text: str) -> int:
    low, high = 1, 9
    for guess, hint in re.findall(r"I say \[(\d)\].*?target number is (higher|lower)", text, re.DOTALL):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return (low + high) // 2


@needs_textarena
@pytest.mark.parametrize("text", ["", "[99999999999999999999999]", "[[", "no", "\x00", "[-1]", "[0]", "9" * 5000])
def test_a_hostile_turn_is_answered_by_the_game(text: str) -> None:
    task = load_task(TaskConfig(name="textarena", options={"id": "GuessTheNumber-v0-raw", "held_out": 2}), 0)
    prompt = task.prompt(0)
    (first, second) = play_texts(task, prompt, [text, text])
    assert "invalid move" in first.observation
    assert second.done
    assert second.reward == 0.0


def play_texts(task: Any, prompt: Prompt, turns: list[str]) -> list[GameStep]:
    seen, steps = digest("", prompt.columns["observation"]), list[GameStep]()
    for number in range(len(turns)):
        reply = task.use(prompt, "step", {"actions": turns[: number + 1], "seen": seen})
        seen = digest(seen, reply)
        steps.append(GameStep.from_json(reply))
    return steps


@needs_textarena
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "NoSuchGame-v0"}, "not found in registry"),
        ({"id": "TicTacToe-v0"}, "only games of one player can be trained"),
        ({"id": "GuessTheNumber-v0", "kwargs": {"ice": 1}}, "unexpected keyword argument 'ice'"),
    ],
)
def test_a_wrong_game_of_textarena_is_one_clear_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_task(TaskConfig(name="textarena", options={"held_out": 2, **options}), 0).held_out()
    assert raised.value.key == "task.options.id"


@needs_textarena
def test_demonstrations_of_textarena_need_their_turns() -> None:
    task = load_task(TaskConfig(name="textarena", options={"id": "GuessTheNumber-v0-raw", "held_out": 2}), 0)
    with pytest.raises(ConfigError, match=r"set task\.options\.demonstration_actions"):
        task.demonstration(0)


def test_open_games_keep_several_games_with_the_same_history() -> None:
    class Silent:
        actions, opened, ended = "", 0, 0

        def __init__(self) -> None:
            Silent.opened += 1

        def reset(self, seed: int) -> str:
            return "go"

        def step(self, text: str) -> GameStep:
            return GameStep("on", done=text == "end")

        def random_action(self, random: random.Random) -> str:
            return "on"

        def close(self) -> None:
            Silent.ended += 1

    games = OpenGames(Silent, limit=8)
    seen = digest("", games.first(1)[0])
    for _ in range(4):
        games.step(1, ["a"], seen)
    assert (Silent.opened, len(games)) == (4, 4), "the prompt's game serves the first sample"
    after = digest(seen, GameStep("on").to_json())
    for _ in range(4):
        assert games.step(1, ["a", "end"], after).done
    assert (Silent.opened, Silent.ended, len(games)) == (4, 4, 0)
