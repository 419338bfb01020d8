"""Tools: what is a call, what comes back, and that a row has the tokens that servers saw, to the last one."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from pipeline.config import TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import Prompt, load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.rewards import Score
from pipeline.environments.sandbox import missing_sandbox
from pipeline.environments.task_calls import RenderedPrompt, ToolResult
from pipeline.environments.tool_task import ToolCall, Tools
from pipeline.errors import ConfigError
from pipeline.rollout.rollout_policy import Sampling
from pipeline.rollout.sample_rollout import completion_of, roll_out, to_sample
from tests.fakes.inline_calls import InlineCalls
from tests.unit.environments.test_tasks import Said

TINY_TEXT = BUILT_IN / "tiny_text"
QWEN = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' + content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Shaped as Qwen3's: tools first, answers of tools in a turn of the user's, and thoughts of earlier turns dropped."""


def tools(**options: Any) -> Tools:
    task = load_task(TaskConfig(name="tools", options={"digits": 2} | options), 0)
    assert isinstance(task, Tools)
    return task


def bytes_model(directory: Path) -> Path:
    """A tokenizer of bytes with one merge, so that the same text has more than one tokenisation."""
    alphabet = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}
    tokenizer = Tokenizer(BPE(alphabet, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|im_{name}|>", special=True) for name in ("start", "end")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": QWEN}))
    (directory / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    return directory


class Talking:
    """Servers that say what they were given to say, turn after turn, and remember what they saw."""

    def __init__(self, *turns: Sequence[int], finish: str = "stop") -> None:
        self._turns, self._finish = list(turns), finish
        self.seen: list[tuple[int, ...]] = []
        self.said: list[tuple[int, ...]] = []

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
        self.seen.append(tuple(token_ids))
        self.said.append(tuple(self._turns.pop(0)))
        return [Said(self.said[-1], finish=self._finish if not self._turns else "stop")] * n


def played(
    task: Tools, chat: ChatTokenizer, model: Path, servers: Talking, prompt: Prompt, max_length: int = 4096
) -> Any:
    asked = RenderedPrompt(prompt, chat.render(prompt.messages, prompt.tools))
    sampling = Sampling(1.0, 64, max_length, 60)
    (ended,) = asyncio.run(roll_out(task, InlineCalls(task, model), chat, servers, sampling, asked, 1))
    assert ended.reason == ""
    return ended.episode


def is_what_servers_saw(episode: Any, servers: Talking) -> None:
    """The whole law of a row: each request continues the one before it, and what is sampled is what was sampled."""
    row = list(episode.tokens)
    assert row == [*servers.seen[-1], *servers.said[-1]]
    for seen, said in zip(servers.seen, servers.said, strict=True):
        assert row[: len(seen) + len(said)] == [*seen, *said]
    sampled = [
        place
        for seen, said in zip(servers.seen, servers.said, strict=True)
        for place in range(len(seen), len(seen) + len(said))
    ]
    assert [place for place, mark in enumerate(episode.sampled) if mark] == sampled
    sample = to_sample(episode, Score(1.0), 0.0)
    sample.check()
    assert sample.token_array().tolist() == row


def test_a_row_has_the_tokens_that_the_servers_saw_and_reads_as_the_template_writes_it() -> None:
    task, chat = tools(tool_call_syntax="short", system="", tools=["calculator"]), ChatTokenizer(TINY_TEXT)
    turns = ["[calculator:37*52]", "[calculator:1924+1][calculator:2/0]", "1925"]
    servers = Talking(*([*chat.encode(turn), 2] for turn in turns))
    prompt = Prompt(({"role": "user", "content": "37*52+1"},), "1925", tools=task.schemas)
    episode = played(task, chat, TINY_TEXT, servers, prompt)
    is_what_servers_saw(episode, servers)
    assert [message["content"] for message in episode.conversation] == [
        turns[0], "1924", turns[1], "1925", "error: no arithmetic expression", "1925"
    ]  # fmt: skip
    assert list(servers.seen[-1]) == chat.prompt([*prompt.messages, *episode.conversation[:-1]], prompt.tools)
    assert episode.metrics == {"tools/calculator": 3.0}
    assert task.reward(prompt, episode.text) == 1.0
    answer = completion_of(episode)
    assert answer.tokens == tuple(token for said in servers.said for token in said)
    assert answer.conversation == episode.conversation


@pytest.mark.parametrize("thought", ["", "<think>\nab?\n</think>\n\n", " ü <|im_start|> "])
def test_what_was_sampled_is_never_tokenised_again(tmp_path: Path, thought: str) -> None:
    """The policy says `ab` in two tokens where the tokenizer has one, and thinks what the template would drop."""
    model = bytes_model(tmp_path)
    task, chat = tools(), ChatTokenizer(model)
    (end,) = chat.stop_token_ids
    a, b = (chat.encode(letter)[0] for letter in "ab")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*52"}}\n</tool_call>'
    servers = Talking([a, b, *chat.encode(thought + call), end], [a, b, *chat.encode(" 1924"), end])
    prompt = Prompt(({"role": "user", "content": "37*52"},), "1924", tools=task.schemas)
    episode = played(task, chat, model, servers, prompt)
    is_what_servers_saw(episode, servers)
    assert chat.encode("ab") != [a, b]
    told = "\n<|im_start|>user\n<tool_response>\n1924\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert list(servers.seen[1][len(servers.seen[0]) + len(servers.said[0]) :]) == chat.encode(told)
    assert episode.text == "ab 1924"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "calculator", "arguments": {"expression": "1+1"}}', ToolCall("calculator", {"expression": "1+1"})),
        ('{"name": "search", "arguments": {}}', "error: no tool search; there are calculator, python"),
        ('{"name": "calculator", "arguments": {"code": "1"}}', "error: calculator takes expression, not code"),
        ('{"name": "calculator"}', "error: calculator takes expression, not nothing"),
        ("{", "error: no tool call"),
        ("[]", "error: no tool call"),
        ('{"arguments": {}}', "error: no tool call: 'name'"),
        ('{"name": "python", "arguments": "x"}', "error: no tool call: its arguments are no object, but str"),
        ('{"name": "python", "arguments": [[1, 2]]}', "error: no tool call: its arguments are no object, but list"),
        ('"python"', "error: no tool call"),
        ("[" * 100_000, "error: no tool call"),
        ('{"name": "\\ud83d", "arguments": {}}', "error: no tool call: half of a surrogate pair"),
        ('{"name": "calculator", "arguments": {"\\uDE00": "1"}}', "error: no tool call: half of a surrogate pair"),
        ('{"name": "calculator", "arguments": {"expression": ["\\ud83d"]}}', "error: no tool call: half of a"),
        (
            '{"name": "calculator", "arguments": {"expression": "\\ud83d\\ude00"}}',
            ToolCall("calculator", {"expression": "\N{GRINNING FACE}"}),
        ),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_policy(text: str, call: ToolCall | str) -> None:
    (read,) = tools().read_calls(f"Let me see.<tool_call>{text}</tool_call>")
    assert read == call if isinstance(call, ToolCall) else read.wrong.startswith(call)


def test_a_tool_without_arguments_is_called_with_none() -> None:
    class Clock(Tools):
        @property
        def schemas(self) -> tuple[Mapping[str, Any], ...]:
            takes = {"type": "object", "properties": {}}
            return ({"type": "function", "function": {"name": "now", "parameters": takes}},)

    clock = Clock(tools(tool_call_syntax="short").options, 0)
    assert clock.read_calls("[now:]") == [ToolCall("now", {})]
    assert [call.wrong for call in clock.read_calls("[now:5]")] == ["error: now takes nothing, not an argument"]


@pytest.mark.parametrize(("calls", "opens"), [("tagged", "<tool_call>"), ("short", "[calculator:")])
def test_calls_that_never_close_are_none_however_many(calls: str, opens: str) -> None:
    """Searched from each of them to the end, this would take minutes in the actor's event loop."""
    task, flood = tools(tool_call_syntax=calls), opens * (200_000 // len(opens))
    assert task.read_calls(flood) == []
    made = {"tagged": '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'}
    (call,) = task.read_calls(made.get(calls, "[calculator:1]") + flood)
    assert call == ToolCall("calculator", {"expression": "1"})


def test_of_very_many_calls_in_a_turn_some_are_made() -> None:
    calls = tools(tool_call_syntax="short").read_calls("[calculator:1+1]" * 500)
    assert [call.wrong for call in calls] == [""] * 16 + ["error: more than 16 calls in a turn"] * 484


def test_an_episode_ends_where_turns_or_tokens_do() -> None:
    chat = ChatTokenizer(TINY_TEXT)
    call = [*chat.encode("[calculator:1+1]"), 2]
    prompt = Prompt(({"role": "user", "content": "1+1"},), "2")
    for task, finish, length, turns in [
        (tools(tool_call_syntax="short", turns=2), "stop", 4096, 2),
        (tools(tool_call_syntax="short"), "length", 4096, 3),
        (tools(tool_call_syntax="short"), "stop", len(chat.prompt(prompt.messages)) + len(call) + len("\nT:2\nA:"), 1),
    ]:
        servers = Talking(*[call] * turns, finish=finish)
        episode = played(task, chat, TINY_TEXT, servers, prompt, length)
        is_what_servers_saw(episode, servers)
        assert (episode.turns, episode.finish) == (turns, finish)


def test_a_tool_whose_process_ends_is_told_to_the_policy_and_the_episode_goes_on() -> None:
    class Dying(InlineCalls):
        async def use(self, prompt: Prompt, name: str, arguments: Any) -> ToolResult | str:
            return "tool calculator took too long: more than task.seconds=60"

    task, chat = tools(tool_call_syntax="short"), ChatTokenizer(TINY_TEXT)
    servers = Talking([*chat.encode("[calculator:1+1]"), 2], [*chat.encode("2"), 2])
    prompt = Prompt(({"role": "user", "content": "1+1"},), "2")
    asked = RenderedPrompt(prompt, chat.render(prompt.messages))
    calls = Dying(task, TINY_TEXT)
    (ended,) = asyncio.run(roll_out(task, calls, chat, servers, Sampling(1.0, 64, 512, 60), asked, 1))
    assert ended.episode is not None
    assert ended.episode.conversation[1]["content"] == "error: tool calculator took too long: more than task.seconds=60"


def test_half_an_emoji_in_a_call_or_a_result_is_told_to_the_policy_and_the_episode_goes_on(tmp_path: Path) -> None:
    class Odd(InlineCalls):
        async def use(self, prompt: Prompt, name: str, arguments: Any) -> ToolResult | str:
            return ToolResult("half \ud83d")

    model = bytes_model(tmp_path)
    task, chat = tools(), ChatTokenizer(model)
    prompt, end = task.prompt(0), chat.stop_token_ids[0]
    texts = (
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>',
        "12",
    )
    servers = Talking(*([*chat.encode(text), end] for text in texts))
    asked = RenderedPrompt(prompt, chat.render(prompt.messages, prompt.tools))
    sampling = Sampling(1.0, 128, 4096, 60)
    (ended,) = asyncio.run(roll_out(task, Odd(task, model), chat, servers, sampling, asked, 1))
    assert ended.episode is not None, ended.reason
    conversation = ended.episode.conversation
    assert conversation[1]["content"] == "error: no tool call: half of a surrogate pair is no character"
    assert conversation[3]["content"] == "half \\ud83d"


def test_demonstrations_show_calls_and_what_follows_them() -> None:
    task = tools(tool_call_syntax="short", tool_demonstration_rate=0.5)
    shown = [task.demonstration(index) for index in range(400)]
    calls = [each for each in shown if each.answer.startswith("[calculator:")]
    after = [each for each in shown if len(each.prompt.messages) > 2]
    assert 60 < len(calls) == len(after) < 140
    assert all(task.reward(each.prompt, each.answer) == 1.0 for each in after)
    guesses = [each for each in shown if each not in calls and each not in after]
    assert sum(task.reward(each.prompt, each.answer) for each in guesses) < 20


needs_namespaces = pytest.mark.skipif(bool(missing_sandbox(SandboxConfig())), reason="no sandbox here")


def test_held_out_expressions_are_the_same_for_every_seed_and_never_trained() -> None:
    task, other = tools(), load_task(TaskConfig(name="tools", options={"digits": 2}), 5)
    assert task.held_out() == other.held_out()
    held_out = {prompt.messages[-1]["content"] for prompt in task.held_out()}
    assert not held_out & {task.prompt(index).messages[-1]["content"] for index in range(4096)}
    with pytest.raises(ConfigError, match="half of the 81 expressions"):
        tools(digits=1)


@needs_namespaces
def test_the_python_tool_runs_programs_and_says_what_became_of_them() -> None:
    task = tools(tool_seconds=60)
    prompt = task.prompt(0)
    assert task.use(prompt, "python", {"code": "print(37*52)"}) == "1924"
    assert task.use(prompt, "python", {"code": "pass"}) == "error: it printed nothing"
    assert "ZeroDivisionError" in task.use(prompt, "python", {"code": "1/0"})
    late = tools(tool_seconds=0.5).use(prompt, "python", {"code": "while True: pass"})
    assert late == "error: it took more than 0.5 s"
    assert task.use(prompt, "calculator", {}).startswith("error: TypeError")
