"""Tasks: arithmetic's promises, the way from a name to a task, and the model's view of text."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import TaskConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import Episode, Prompt, Task, load_task
from pipeline.environments.arithmetic import Arithmetic, careless_answer, evaluate
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.verifiers.verifiers_process import EnvironmentMissing, EnvironmentProcess
from pipeline.errors import ConfigError

TINY = BUILT_IN / "tiny_qwen3"


def arithmetic(seed: int = 0, **options: Any) -> Arithmetic:
    task = load_task(TaskConfig(name="arithmetic", options=options), seed)
    assert isinstance(task, Arithmetic)
    return task


def expression(prompt: Prompt) -> str:
    return prompt.messages[0]["content"]


expressions = st.builds(
    lambda first, rest: f"{first}" + "".join(f"{operator}{operand}" for operator, operand in rest),
    st.integers(0, 999),
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 999)), max_size=5),
)


@given(expressions)
def test_an_expression_has_the_value_that_python_gives_it(text: str) -> None:
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("17+25", 32), ("52-37", 25), ("37-52", -25), ("99+1", 90), ("12+34", 46), ("5-5", 0), ("7*8+5", 51)],
)
def test_a_careless_teacher_forgets_to_carry_and_to_borrow(text: str, value: int) -> None:
    assert careless_answer(text) == value


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_where_nothing_is_carried_the_careless_are_right(digits: list[tuple[int, int]]) -> None:
    one, other = (int("".join(str(pair[i]) for pair in digits)) for i in (0, 1))
    assert careless_answer(f"{one}+{other}") == one + other


def test_a_fraction_of_the_demonstrations_slips_and_no_reward_does() -> None:
    task = arithmetic(demonstration_error_rate=0.5, operators=["+"])
    shown = [task.demonstration(index) for index in range(400)]
    wrong = [each for each in shown if each.answer != each.prompt.answer]
    assert 0.2 < len(wrong) / len(shown) < 0.5, "a slip without a carry does not show"
    assert all(int(each.prompt.answer) == evaluate(expression(each.prompt)) for each in shown)
    assert all(int(each.answer) == careless_answer(expression(each.prompt)) for each in wrong)


def test_answers_may_be_written_from_the_last_digit() -> None:
    plain, backwards = arithmetic(), arithmetic(last_digit_first=True)
    for one, other in zip(plain.held_out(), backwards.held_out(), strict=True):
        assert (one.messages, one.answer) == (other.messages, other.answer[::-1])


def test_the_default_is_sums_and_differences_of_two_digit_numbers() -> None:
    task = arithmetic()
    shown = [expression(task.prompt(index)) for index in range(200)]
    assert {text[2] for text in shown} == {"+", "-"}
    assert all(len(text) == 5 and text[0] != "0" and text[3] != "0" for text in shown)
    assert any(task.prompt(index).answer.startswith("-") for index in range(200))


def test_levels_terms_and_operators_make_it_harder() -> None:
    task = arithmetic(operators=["*"], levels=[1, 3], terms=3)
    operands = [operand for index in range(50) for operand in expression(task.prompt(index)).split("*")]
    assert len(operands) == 150
    assert {len(operand) for operand in operands} == {1, 3}


def test_a_prompt_depends_on_seed_and_index_alone() -> None:
    one, same, other = arithmetic(seed=1), arithmetic(seed=1), arithmetic(seed=2)
    assert [one.prompt(i) for i in (5, 3, 5)] == [same.prompt(i) for i in (5, 3, 5)]
    assert [one.prompt(i) for i in range(20)] != [other.prompt(i) for i in range(20)]


def test_held_out_prompts_are_256_fixed_ones_that_are_never_trained() -> None:
    task = arithmetic(seed=1, size=4096)
    held_out = {expression(prompt) for prompt in task.held_out()}
    assert len(held_out) == len(task.held_out()) == 256
    assert task.held_out() == arithmetic(seed=2).held_out()
    trained = {expression(task.prompt(index)) for index in range(len(task))}
    shown = {expression(task.demonstration(index).prompt) for index in range(4096)}
    assert not held_out & (trained | shown)


@pytest.mark.parametrize(("text", "reward"), [("-15", 1.0), ("15", 0.0), ("-15 ", 0.0), ("-15^", 0.0), ("", 0.0)])
def test_only_exactly_the_value_is_rewarded(text: str, reward: float) -> None:
    assert arithmetic().reward(Prompt((), answer="-15"), text) == reward


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"level": 1}, "task.options.level", "did you mean levels"),
        ({"operators": ["/"]}, "task.options.operators.0", r"'\+', '-' or '\*'"),
        ({"terms": 1}, "task.options.terms", "greater than or equal to 2"),
        ({"levels": [1], "operators": ["+"]}, "task.options", "half of the 100 expressions"),
    ],
)
def test_a_wrong_option_is_named_with_its_key(options: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        arithmetic(**options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arithmetik", "did you mean arithmetic"),
        ("no.such:Task", "PYTHONPATH"),
        ("json:JSONDecoder", "subclass of pipeline.environments.Task"),
        ("pipeline.environments.arithmetic:Algebra", "Algebra"),
    ],
)
def test_a_name_that_is_no_task_is_a_config_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_task(TaskConfig(name=name), 0)
    assert caught.value.key == "task.name"


class Echo(Task):
    """The least a task of one's own needs."""

    name = "echo"

    def __len__(self) -> int:
        return 1

    def prompt(self, index: int) -> Prompt:
        return Prompt(({"role": "user", "content": "1"},))

    def held_out(self) -> list[Prompt]:
        return []

    def reward(self, prompt: Prompt, text: str) -> float:
        return 0.0


def test_a_task_of_ones_own_is_loaded_by_module_and_class() -> None:
    assert load_task(TaskConfig(name=f"{__name__}:Echo"), 0).name == "echo"


def test_loading_a_task_imports_neither_torch_nor_transformers() -> None:
    modules = "pipeline.environments.chat_tokenizer, pipeline.environments.arithmetic"
    script = f"import sys, {modules}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout.strip() == b"set()"


def test_the_chat_gives_the_tokens_that_hugging_face_gives() -> None:
    from transformers import AutoTokenizer

    theirs, chat = AutoTokenizer.from_pretrained(TINY), ChatTokenizer(TINY)
    for prompt in arithmetic(terms=3, operators=["+", "-", "*"]).held_out()[:20]:
        expected = theirs.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        assert chat.prompt(prompt.messages) == expected


def test_a_token_of_the_tiny_model_is_one_character() -> None:
    chat = ChatTokenizer(TINY)
    text = "0123456789+-*=^$_"
    assert len(chat.encode(text)) == len(set(chat.encode(text))) == len(text)
    assert chat.decode(chat.encode(text)) == text


def test_a_demonstration_ends_with_the_token_that_ends_a_turn() -> None:
    chat, shown = ChatTokenizer(TINY), arithmetic().demonstration(0)
    tokens, prompt = chat.demonstration(shown)
    assert tokens[:prompt] == chat.prompt(shown.prompt.messages)
    assert tokens[-1] in chat.stop_token_ids
    assert chat.decode(tokens[prompt:]) == shown.answer


def test_what_the_policy_said_is_decoded_whole_except_the_end_of_its_turn() -> None:
    chat = ChatTokenizer(TINY)
    assert chat.decode(chat.encode("4^6$")) == "4^6"
    assert chat.decode(chat.encode("46")) == "46"
    assert chat.decode([]) == ""


@dataclass(frozen=True)
class Said:
    """A turn of a scripted policy."""

    tokens: tuple[int, ...]
    version_min: int = 0
    version_max: int = 0
    finish: Any = "stop"
    server: str = "a:1"
    routed_experts: tuple[bytes, ...] = ()

    @property
    def logprobs(self) -> tuple[float, ...]:
        return (-0.5,) * len(self.tokens)

    @property
    def versions(self) -> tuple[int, ...]:
        """The last token is of the newest weights, all others of the oldest."""
        return (*(self.version_min for _ in self.tokens[1:]), self.version_max)


class Scripted:
    """A policy that says what it was given to say."""

    def __init__(self, *turns: Said) -> None:
        self.prompt, self._turns = (1, 2, 3), list(turns)

    async def sample(self, tokens: Any) -> Said:
        return self._turns.pop(0)

    def encode(self, text: str) -> list[int]:
        return [int(character) for character in text]

    def decode(self, tokens: Any) -> str:
        return "".join(map(str, tokens))


def test_a_task_without_a_rollout_of_its_own_takes_one_turn() -> None:
    episode = asyncio.run(Echo(None, 0).rollout(Prompt(()), Scripted(Said((7, 8), 3, 4))))
    assert episode.tokens == (1, 2, 3, 7, 8)
    assert episode.sampled == (0, 0, 0, 1, 1)
    assert episode.logprobs == (0.0, 0.0, 0.0, -0.5, -0.5)
    assert (episode.text, episode.version_min, episode.version_max, episode.turns) == ("78", 3, 4, 1)


def test_an_episode_of_several_turns_keeps_what_was_sampled_apart_from_what_was_read() -> None:
    episode = (
        Episode.begin([1])
        .append_turn(Said((5,), 4, 6), "5")
        .append_observation([9, 9])
        .append_turn(Said((6,), 3, 5), "6")
    )
    assert episode.tokens == (1, 5, 9, 9, 6)
    assert episode.sampled == (0, 1, 0, 0, 1)
    assert (episode.version_min, episode.version_max, episode.turns, episode.text) == (3, 6, 2, "6")
    assert episode.versions == (0, 6, 0, 0, 5)


EVERY_RULE = """{% set said = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set said.system = message.content %}
        {%- continue %}
    {%- endif %}
    {% if loop.index0 > 3 %}{% break %}{% endif %}
{{ bos_token }}{{ message | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=1, sort_keys=true) }}
    {% generation %}{% set inside = 1 %}{{ message.content }}{% endgeneration %}
    {{- 'leaked' if inside is defined else 'kept' }}
{% endfor %}{{ said.system }} {{ strftime_now('%Y') }}
{% if tools %}tools{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_a_template_is_rendered_as_transformers_renders_it(tmp_path: Path) -> None:
    """transformers' own renderer is the oracle for each rule that templates use."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (tmp_path / "chat_template.jinja").write_text(EVERY_RULE)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    messages = [{"role": role, "content": f"{role} says 2+2, é"} for role in ("system", "user", "assistant") * 2]
    theirs, _ = render_jinja_template([messages], chat_template=EVERY_RULE, add_generation_prompt=True, bos_token="<s>")
    assert ChatTemplate(tmp_path).render(messages) == theirs[0]  # type: ignore[arg-type]


def test_what_a_template_refuses_is_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role here') }}")
    with pytest.raises(Exception, match="no system role here"):
        ChatTemplate(tmp_path).render([])


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_the_process_of_verifiers_runs_its_bridge_which_reports_a_missing_library() -> None:
    async def load() -> None:
        process = EnvironmentProcess(sys.executable, {})
        try:
            await process.ready(60.0)
        finally:
            await process.end()

    with pytest.raises(EnvironmentMissing, match="No module named 'verifiers'") as raised:
        asyncio.run(load())
    assert raised.value.key == "python"
