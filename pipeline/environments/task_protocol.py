"""The interface of a task.

Owns the types between a task and the rest of Rollcall: `Prompt`, `Demonstration`, `Policy`, `Episode` and the base
class `Task`. A task provides the prompts, runs the episodes and computes the rewards. It must not know servers,
streams, weights or training. It handles only tokens that the policy received or sampled.

The minimum of a custom task:

    class Parity(Task):
        name = "parity"
        def __len__(self): return 1000
        def prompt(self, index): return user_prompt(f"Is {index} even?", answer="yes" if index % 2 == 0 else "no")
        def held_out(self): return [user_prompt(f"Is {n} even?", answer=…) for n in range(1000, 1256)]
        def reward(self, prompt, text): return float(text == prompt.answer)

and `task.name=my.package.parity:Parity` in the config.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pipeline.config.value_types import Section
from pipeline.data.chat_messages import Message
from pipeline.environments.episode import Episode, Turn
from pipeline.environments.tool_call_syntax import ToolCallSyntax


class TaskOptions(Section):
    """Base of a task's options: frozen, typed; unknown keys, infinity and NaN are errors."""


@dataclass(frozen=True)
class Prompt:
    """One prompt for the policy.

    Attributes:
        messages: the conversation so far, as for a chat template.
        answer: the reference that the reward compares with; nothing else reads it.
        columns: further columns of the prompt's row, for reward functions.
        tools: JSON schemas of the tools that the policy may call, for the chat template.
        as_text: whether functions in TRL's style receive texts (the last message, the answers) instead of messages.
        task: the label of the task that made the prompt, if that task is one of a mix.
    """

    messages: tuple[Message, ...]
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    as_text: bool = False
    task: str = ""


@dataclass(frozen=True)
class TaskPart:
    """A task of a mix: its label, its share (positions in each round of the mix), and its number of prompts."""

    label: str
    share: int
    size: int


@dataclass(frozen=True)
class Completion:
    """The policy's response to a prompt, as rewards see it.

    Attributes:
        text: the policy's last turn.
        conversation: all messages since the prompt, in order: the policy's turns and the observations between them.
        tokens: ids of the sampled tokens, in order.
        reward: the reward that an agent or environment reported; `Task.reward` is not called then.
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
    """An OpenAI-compatible endpoint for one episode, open as a context; requests need its `key`."""

    key: str

    @property
    def url(self) -> str:
        """The base URL, as OpenAI clients expect it."""

    @property
    def model(self) -> str:
        """The name of the model in requests."""

    def episode(self) -> Episode:
        """All completed calls as rows, with the reward and the metrics that were posted to `reward` below the URL."""


class Policy(Protocol):
    """The model, as one episode sees it."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the rendered prompt, ready for the first turn."""

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """The policy's next turn after `tokens` (all token ids so far); `RolloutError` if it can never succeed."""

    def remaining_tokens(self, tokens: Sequence[int]) -> int:
        """The number of tokens that may be added to an episode of `tokens`."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is appended to an episode unchanged."""

    def encode_observation(
        self, prompt: Prompt, history: Sequence[Message], new_messages: Sequence[Message]
    ) -> list[int]:
        """Token ids of `new_messages`, which follow a turn of the policy, as the chat template writes them: all tokens
        after the turn's end-of-turn token, up to the policy's next turn.

        `history` is the conversation since the prompt, that turn included. It is not tokenized again.
        """

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """The result of the task's tool `name` (`Task.use`), from a worker process; `RolloutError` with the reason
        when the tool raised, hung, or ended its process."""

    async def run(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """The result of a tool that itself calls the policy, through an `endpoint`. The episode's time limit
        (`rollout.episode_seconds`) bounds it, not `task.seconds`; waiting for a worker and for the policy does not
        count."""

    def endpoint(
        self, form: ToolCallSyntax = "tagged", address: str = "127.0.0.1"
    ) -> AbstractAsyncContextManager[AgentEndpoint]:
        """An endpoint of this policy, open as a context; `form` is the syntax of the policy's tool calls."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without the end-of-turn token."""


class Task(ABC):
    """Prompts by index, an episode, a reward.

    A task is constructed in the actor (episodes, held-out prompts), in each of its worker processes (prompts and
    rewards) and in the trainer (demonstrations), from the same options and seed. It shares no state between calls. The
    same index must give the same prompt in each process and after a restart, and prompts must be picklable. Methods may
    raise, return nonsense, hang, print, or end their process: the sample then fails with that reason and is counted.
    Only `rollout` runs in the actor's event loop, and must not block the loop.
    """

    name: ClassVar[str]
    Options: ClassVar[type[TaskOptions]] = TaskOptions
    has_reward: ClassVar[bool] = True
    """Whether the task computes a reward; otherwise `reward.functions` must."""

    def __init__(self, options: Any, seed: int) -> None:
        """`options` is a valid `Options`; `seed` is the run's."""
        self.options, self.seed = options, seed

    @property
    def parts(self) -> tuple[TaskPart, ...]:
        """The tasks of a mix, whose prompts are numbered one task after the other; empty for another task."""
        return ()

    @property
    def runs_code(self) -> bool:
        """Whether `reward` or `use` runs code written by the policy in `pipeline.environments.sandbox`."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """Whether code that it runs needs what only a sandbox has: `task.sandbox.kind=none` is refused."""
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

    def first_prompts(self) -> "list[Prompt]":
        """The first prompt, or that of each task of a mix, for the launcher's checks. Override it if `prompt` must run
        in a worker process."""
        return [self.prompt(0)]

    @abstractmethod
    def reward(self, prompt: Prompt, text: str) -> float:
        """The reward of the policy's last turn `text`. Runs in a worker process, so it may compute and start processes;
        `task.seconds` and `task.memory_bytes` bound it."""

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """The result of the tool `name`. Runs in a worker process, as `reward` does."""
        raise NotImplementedError(f"task {self.name} has no tool {name}")

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """One episode: by default a single turn. Override it for several turns or tools:

        episode = Episode.begin(policy.prompt)
        while episode.open:
            turn = await policy.sample(episode.tokens)
            episode = episode.append_turn(turn, policy.decode(turn.tokens))
            ...
            result = await policy.use(prompt, "search", {"for": "…"})
            message = {"role": "tool", "content": result}
            episode = episode.append_observation(policy.encode_observation(prompt, history, [message]))
        """
        turn = await policy.sample(policy.prompt)
        return Episode.begin(policy.prompt).append_turn(turn, policy.decode(turn.tokens))

    def can_replay(self, prompt: Prompt) -> bool:
        """Whether an episode of `prompt` that was cut off with its actor may continue, by running `rollout` again.

        In the new actor `policy.sample` then returns the recorded turns, and `policy.use` the recorded results of
        tools without calling them, until a request differs; from there on both work as usual. Return True if `rollout`
        makes the same requests after the same turns and results, and if later tools need nothing that an earlier call
        left in a process, such as an open browser or a running program. Otherwise the episode starts over. By default
        only a single turn is continued.
        """
        return type(self).rollout is Task.rollout

    def prepare_worker(self) -> None:  # noqa: B027 most tasks have nothing to start
        """Start what calls in this worker process need, such as a server. Called once in each worker, before its calls;
        `cluster.startup_seconds` bounds it, not `task.seconds`. Raise a `RollcallError` with the reason of a failure.
        """

    async def aclose(self) -> None:  # noqa: B027 most tasks have nothing to release
        """Release what `rollout` holds between episodes, such as processes. The actor calls it at its end."""

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration `index` = 0, 1, 2, … without end, none of them held out. Only SFT needs it."""
        raise NotImplementedError(f"task {self.name} has no demonstrations; set training.sft.steps=0")


def user_prompt(question: str, answer: Any = None) -> Prompt:
    """A prompt of one user message."""
    return Prompt(({"role": "user", "content": question},), answer)
