"""What a task is.

Owns the words between a task and the rest of Rollcall: `Prompt`, `Demonstration`, `Policy`, `Episode` and the base
class `Task`. A task says what is asked, how an episode runs and what it is worth. It must not know servers, streams,
weights or training; the tokens it handles are those that the policy was given and gave.

The least a task of your own needs:

    class Parity(Task):
        name = "parity"
        def __len__(self): return 1000
        def prompt(self, index): return ask(f"Is {index} even?", answer="yes" if index % 2 == 0 else "no")
        def held_out(self): return [ask(f"Is {n} even?", answer=…) for n in range(1000, 1256)]
        def reward(self, prompt, text): return float(text == prompt.answer)

and `task.name=my.package.parity:Parity` in the config.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from pipeline.data.chat_messages import Message
from pipeline.environments.episode import Episode, Turn
from pipeline.environments.tool_call_syntax import ToolCallSyntax


class TaskOptions(BaseModel):
    """Base of a task's options: frozen, typed; unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Prompt:
    """One thing asked of the policy.

    Attributes:
        messages: the conversation so far, as for a chat template.
        answer: whatever the reward compares with; nobody else looks at it.
        columns: what else its row says, for reward functions.
        tools: JSON schemas of the tools that it may call, for the chat template.
        plain: whether functions of TRL's form get texts, its last message and the answers, in the place of messages.
    """

    messages: tuple[Message, ...]
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    as_text: bool = False


@dataclass(frozen=True)
class Completion:
    """What the policy made of a prompt, as rewards see it.

    Attributes:
        text: its last turn.
        conversation: all that was said since the prompt, in order: the policy's turns, and what it was told between.
        tokens: ids of what it sampled, in order.
        reward: what it is worth, where whoever ran the episode said so; then `Task.reward` is not asked.
    """

    text: str
    conversation: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    reward: float | None = None


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a good answer, for supervised fine-tuning."""

    prompt: Prompt
    answer: str


class AgentEndpoint(Protocol):
    """An OpenAI-compatible endpoint for one episode, open as a context; only who has its `key` is answered."""

    key: str

    @property
    def url(self) -> str:
        """The base URL, as clients of OpenAI want it."""

    @property
    def model(self) -> str:
        """The model's name there."""

    def episode(self) -> Episode:
        """All calls that were answered, as rows, with the reward and the metrics that were posted to `reward` below
        the URL."""


class Policy(Protocol):
    """The model as one episode sees it."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the rendered prompt, ready for the first turn."""

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """The policy's next turn after `tokens` (every token id so far); `RolloutError` if it can never be had."""

    def remaining_tokens(self, tokens: Sequence[int]) -> int:
        """How many more tokens an episode of `tokens` may have."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is appended to an episode as it is."""

    def encode_observation(
        self, prompt: Prompt, history: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        """Token ids of `told`, messages that follow the policy's turn, as the chat template writes them: what comes
        after the token that ended the turn, up to where the policy speaks again.

        `said` is the conversation since the prompt, that turn included. Nothing of it is tokenised again.
        """

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """What the task's tool `name` answers (`Task.use`), made in a worker process; `RolloutError` with the reason
        when it raised, hung, or ended its process."""

    async def run(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """As `use`, of what asks the policy itself, through an `endpoint`: its time is the episode's own
        (`rollout.episode_seconds`), but for the wait for a worker and for the policy; `task.seconds` is no bound."""

    def endpoint(
        self, form: ToolCallSyntax = "tagged", address: str = "127.0.0.1"
    ) -> AbstractAsyncContextManager[AgentEndpoint]:
        """An endpoint of this policy, open as a context; `form` is how the policy writes calls of tools."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without the end-of-turn token."""


class Task(ABC):
    """Prompts by index, an episode, a reward.

    Made in the actor (episodes, held-out prompts), in each of its worker processes (prompts and rewards) and in the
    trainer (demonstrations), from the same options and seed. So it shares no state between calls; the same index must
    give the same prompt there, after a restart, and for ever; and prompts travel, so they can be pickled. Methods may
    raise, return nonsense, hang, print, or end their process: then the sample fails with that reason and is counted.
    Only `rollout` runs in the actor's event loop, and must not block it.
    """

    name: ClassVar[str]
    Options: ClassVar[type[TaskOptions]] = TaskOptions
    has_reward: ClassVar[bool] = True
    """Whether it has a reward of its own; else `reward.functions` says what an answer is worth."""

    def __init__(self, options: Any, seed: int) -> None:
        """`options` is a valid `Options`; `seed` is the run's."""
        self.options, self.seed = options, seed

    @property
    def runs_code(self) -> bool:
        """Whether `reward` or `use` runs code of the policy's in `pipeline.environments.sandbox`."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Training prompts in an epoch."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Training prompt `index`, 0 ≤ index < len(self)."""

    @abstractmethod
    def held_out(self) -> Sequence[Prompt]:
        """The prompts of evaluations: the same for every seed, none of them a training prompt."""

    @abstractmethod
    def reward(self, prompt: Prompt, text: str) -> float:
        """What the policy's last turn `text` is worth. Runs in a worker process, so it may compute and start others;
        `task.seconds` and `task.memory_bytes` bound it."""

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """What the tool `name` answers. Runs in a worker process, as `reward`."""
        raise NotImplementedError(f"task {self.name} has no tool {name}")

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """One episode: by default a single turn. Override it for several turns or tools:

        episode = Episode.begin(policy.prompt)
        while episode.open:
            turn = await policy.sample(episode.tokens)
            episode = episode.act(turn, policy.decode(turn.tokens))
            ...
            answer = await policy.use(prompt, "search", {"for": "…"})
            episode = episode.observe(policy.reply(prompt, said, [{"role": "tool", "content": answer}]))
        """
        turn = await policy.sample(policy.prompt)
        return Episode.begin(policy.prompt).append_turn(turn, policy.decode(turn.tokens))

    async def aclose(self) -> None:  # noqa: B027 most have nothing to give back
        """Give back what `rollout` keeps between episodes, such as processes. The actor calls it when it ends."""

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration `index` = 0, 1, 2, … without end, none of them held out. Needed by a warm start only."""
        raise NotImplementedError(f"task {self.name} has no demonstrations; set training.warm_start.steps=0")


def user_prompt(question: str, answer: Any = None) -> Prompt:
    """A prompt of one user message."""
    return Prompt(({"role": "user", "content": question},), answer)
