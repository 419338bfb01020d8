"""Episodes with tools.

Owns `ToolTask`, the base of tasks whose policy may call tools in several turns: executing the calls, and appending the
results; and the built-in task `tools`, integer arithmetic with a calculator and a Python tool. Promises that sampled
tokens are preserved: a tool's result is appended as the model's chat template writes it, and no earlier text is
rendered or tokenized again. Tools run in worker processes (`Task.use`). If a tool fails, the policy receives the error
as its result. `pipeline.environments.tool_call_syntax` owns the syntax of calls.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.data.chat_messages import Message
from pipeline.environments.arithmetic import evaluate as arithmetic_value
from pipeline.environments.countdown import evaluate
from pipeline.environments.episode import Episode
from pipeline.environments.guarded_call import encodable
from pipeline.environments.sandbox import run_python
from pipeline.environments.task_protocol import Demonstration, Policy, Prompt, Task, TaskOptions
from pipeline.environments.tool_call_syntax import ParameterTypes, ToolCall, parameter_types, parse_calls
from pipeline.errors import RolloutError

MAX_CALLS = 16
"""Largest number of calls of one turn that are executed."""
TOO_MANY = f"error: more than {MAX_CALLS} calls in a turn"
MAX_ANSWER = 2000
"""Largest length of a tool's result in characters; the rest is cut off."""


class ToolOptions(TaskOptions):
    """Number of turns, and the syntax of calls and results."""

    turns: Annotated[int, Field(ge=1)] = Field(
        4, description="Largest number of policy turns; calls in the last turn are not executed."
    )
    tool_call_syntax: Literal["tagged", "short"] = Field(
        "tagged", description="Tool-call syntax: `<tool_call>{…}</tool_call>`, or `[tool:argument]`."
    )
    role: str = Field("tool", description="Role of the message with a tool's result.")


class ToolTask(Task):
    """A task whose policy may call tools. A subclass defines each tool as a method `tool_<name>`, and its parameters in
    `schemas`."""

    options: ToolOptions

    @property
    @abstractmethod
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of the tools, as chat templates take them."""

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """The result of a tool. An error of the tool is a result too, because the policy chose the arguments."""
        try:
            return str(getattr(self, f"tool_{name}")(**arguments))
        except Exception as error:  # noqa: BLE001 the policy receives any error as the result
            return f"error: {type(error).__name__}: {error}"

    def can_replay(self, prompt: Prompt) -> bool:
        """True: a call of a tool runs in any worker process, so tools share no state. A subclass with tools that need
        what an earlier call left in a process returns False."""
        return type(self).rollout is ToolTask.rollout

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Turns of the policy and the results of its tool calls, until a turn calls no tool or is the last one."""
        episode, history, counts = Episode.begin(policy.prompt), list[Message](), dict.fromkeys(self._names, 0.0)
        while True:
            turn = await policy.sample(episode.tokens)
            episode = episode.append_turn(turn, policy.decode(turn.tokens))
            history.append({"role": "assistant", "content": episode.text})
            calls = self.read_calls(episode.text)
            if not calls or not episode.open or episode.turns >= self.options.turns:
                break
            results = [await self._answer(prompt, policy, call) for call in calls]
            observation = policy.encode_observation(prompt, history, results)
            # No room for the results and a further turn: the episode ends with its last turn.
            if len(observation) >= policy.remaining_tokens(episode.tokens):
                break
            for call in calls:
                counts[call.name] = counts.get(call.name, 0.0) + 1
            episode, history = episode.append_observation(observation), [*history, *results]
        metrics = {f"tools/{name}": count for name, count in counts.items()}
        return replace(episode, conversation=tuple(history), metrics=metrics)

    def read_calls(self, text: str) -> list[ToolCall]:
        """The calls of a turn, in order."""
        calls = [self._checked(call) for call in parse_calls(text, self.options.tool_call_syntax, self._names)]
        return [*calls[:MAX_CALLS], *(replace(call, wrong=TOO_MANY) for call in calls[MAX_CALLS:])]

    @property
    def _names(self) -> ParameterTypes:
        """The parameter schema of each tool, by the tool's name."""
        return parameter_types(self.schemas)

    def _checked(self, call: ToolCall) -> ToolCall:
        if call.wrong:
            return call
        schema = self._names.get(call.name)
        if schema is None:
            return replace(
                call, name="unknown", wrong=f"error: no tool {call.name}; there are {', '.join(self._names)}"
            )
        properties = schema.get("properties", {})
        if not set(schema.get("required", ())) <= call.arguments.keys() <= properties.keys():
            expected = ", ".join(properties) or "nothing"
            actual = ", ".join(name or "an argument" for name in call.arguments) or "nothing"
            return replace(call, wrong=f"error: {call.name} takes {expected}, not {actual}")
        return call

    async def _answer(self, prompt: Prompt, policy: Policy, call: ToolCall) -> Message:
        answer = call.wrong
        if not answer:
            try:
                answer = await policy.use(prompt, call.name, dict(call.arguments))
            except RolloutError as error:
                answer = f"error: {error}"
        return {"role": self.options.role, "name": call.name, "content": encodable(answer)[:MAX_ANSWER]}


class ArithmeticToolOptions(ToolOptions):
    """Difficulty, number of the prompts, and the tools."""

    tools: tuple[Literal["calculator", "python"], ...] = Field(
        ("calculator", "python"), min_length=1, description="Available tools."
    )
    digits: Annotated[int, Field(ge=1, le=9)] = Field(4, description="Digits of the two operands.")
    operators: tuple[Literal["+", "-", "*"], ...] = Field(("*",), min_length=1, description="Operators to draw from.")
    system: str = Field(
        "Answer with the result alone, without words or separators. You may call a tool first.",
        description="System message; empty: none.",
    )
    size: Annotated[int, Field(gt=0)] = Field(8192, description="Training prompts in an epoch.")
    held_out: Annotated[int, Field(gt=0)] = Field(256, description="Prompts of an evaluation.")
    tool_demonstration_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="Fraction of the demonstrations that call a tool; the others guess and are mostly wrong."
    )
    tool_seconds: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Timeout of one run of the Python tool, in seconds."
    )
    tool_memory_bytes: Annotated[int, Field(ge=1 << 24)] = Field(
        1 << 29, description="Memory limit of one run of the Python tool, in bytes."
    )

    @model_validator(mode="after")
    def _leaves_prompts_to_train(self) -> Self:
        distinct = len(set(self.operators)) * (9 * 10 ** (self.digits - 1)) ** 2
        if self.held_out * 2 > distinct:
            raise ValueError(f"held_out at most half of the {distinct} expressions; lower it, or raise digits")
        return self


class Tools(ToolTask):
    """Reward 1 if the last turn is the value of the expression, else 0."""

    name = "tools"
    Options = ArithmeticToolOptions
    options: ArithmeticToolOptions

    def __init__(self, options: ArithmeticToolOptions, seed: int) -> None:
        super().__init__(options, seed)
        draws, self._held_out = self._draws("tools held out"), dict[str, None]()
        while len(self._held_out) < options.held_out:
            self._held_out[next(draws)] = None

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(_SCHEMAS[name] for name in self.options.tools)

    @property
    def runs_code(self) -> bool:
        return "python" in self.options.tools

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return self._prompt(self._draw(f"{self.seed} prompt {index}"))

    def held_out(self) -> list[Prompt]:
        return [self._prompt(expression) for expression in self._held_out]

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text.strip() == prompt.answer)

    def demonstration(self, index: int) -> Demonstration:
        """Of a demonstration with a tool call, even indices show the call, and odd ones the turn after it."""
        number, after = divmod(index, 2)
        expression = self._draw(f"{self.seed} demonstration {number}")
        random, prompt = Random(f"{self.seed} shown {number}"), self._prompt(expression)
        if random.random() >= self.options.tool_demonstration_rate:
            return Demonstration(prompt, str(random.choice((-1, 1)) * random.randrange(10 ** len(prompt.answer))))
        call = self._call("calculator" if "calculator" in self.options.tools else "python", expression)
        if not after:
            return Demonstration(prompt, call)
        result = {"role": self.options.role, "name": self.options.tools[0], "content": prompt.answer}
        messages = (*prompt.messages, {"role": "assistant", "content": call}, result)
        return Demonstration(replace(prompt, messages=messages), prompt.answer)

    def tool_calculator(self, expression: str) -> str:
        """The value of an arithmetic expression."""
        value = evaluate(expression)
        return "error: no arithmetic expression" if value is None else str(value)

    def tool_python(self, code: str) -> str:
        """The output of a program."""
        ran = run_python(code, self.options.tool_seconds, self.options.tool_memory_bytes)
        return ran.text or "error: it printed nothing"

    def _call(self, name: str, expression: str) -> str:
        argument = expression if name == "calculator" else f"print({expression})"
        if self.options.tool_call_syntax == "short":
            return f"[{name}:{argument}]"
        (parameter,) = _SCHEMAS[name]["function"]["parameters"]["properties"]
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {parameter: argument}})}\n</tool_call>"

    def _prompt(self, expression: str) -> Prompt:
        system: tuple[Message, ...] = ({"role": "system", "content": self.options.system},)
        messages = (*(system if self.options.system else ()), {"role": "user", "content": expression})
        return Prompt(messages, str(arithmetic_value(expression)), tools=self.schemas)

    def _draw(self, seed: str) -> str:
        return next(expression for expression in self._draws(seed) if expression not in self._held_out)

    def _draws(self, seed: str) -> Iterator[str]:
        random, digits = Random(seed), self.options.digits
        low, high = 10 ** (digits - 1), 10**digits - 1
        while True:
            yield f"{random.randint(low, high)}{random.choice(self.options.operators)}{random.randint(low, high)}"


def _schema(name: str, does: str, argument: str, meaning: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


_SCHEMAS = {
    "calculator": _schema(
        "calculator", "Computes an arithmetic expression.", "expression", "Integers, + - * / and parentheses."
    ),
    "python": _schema("python", "Runs a Python program and returns what it prints.", "code", "The program."),
}
