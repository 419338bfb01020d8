"""One episode as it grows: prompt, turns of the policy, observations between them.

Owns the token ledger of an episode: which tokens the policy sampled, with which log-probability and weights. Promises
that token ids are kept as they were sampled, never made from text again. Knows no tokenizer and no server.

Most episodes are one row of tokens. One whose conversation branched, or was compacted, has further rows, `branches`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Finish = Literal["stop", "length"]


class Turn(Protocol):
    """What the policy said at once; the inference client's completions are such.

    `tokens` (with the end-of-turn token if it was sampled) and `logprobs` (nats, at the sampling temperature) have the
    same length, and so have `versions`, the weights that sampled each; `version_min`, `version_max` are the oldest and
    newest weights that may have sampled one of them.
    """

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def finish(self) -> Finish | Literal["abort"]: ...
    @property
    def versions(self) -> Sequence[int]: ...
    @property
    def version_min(self) -> int: ...
    @property
    def version_max(self) -> int: ...
    @property
    def server(self) -> str: ...


@dataclass(frozen=True)
class EpisodeBranch:
    """A further row of an episode: it begins as an earlier row does, and goes on in its own way.

    Attributes:
        of: the row that it begins as: 0 is the episode's own, n its nth branch.
        shared: that many tokens of that row; whatever of them was sampled counts there, and is only read here.
        tokens, sampled, logprobs, versions: what follows, as in `Episode`.
    """

    of: int
    shared: int
    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Episode:
    """All tokens so far, in order; immutable, so a task may branch it.

    Attributes:
        tokens, sampled, logprobs: of equal length T; `sampled` is 1 where the policy sampled the token, and `logprobs`
            is 0 where it is not.
        text: the policy's last turn as text.
        finish: how the last turn ended; `length` means it was cut off.
        version_min, version_max: over all turns; −1 before the first.
        turns: turns of the policy.
        server: who answered last.
        said: the conversation since the prompt as messages, for rewards; empty for a single turn.
        metrics: numbers about the episode by their names in metrics, such as `tools/calls`.
        branches: its further rows; versions, turns and the last turn are those of all rows.
        reward: what it is worth, where whoever ran it says so; None: `Task.reward` is asked.
        versions: the weights that sampled each token, T of them, 0 where none did; of any other length: `version_min`
            counts for all.
    """

    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    finish: Finish = "stop"
    version_min: int = -1
    version_max: int = -1
    turns: int = 0
    server: str = ""
    conversation: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    branches: tuple[EpisodeBranch, ...] = ()
    reward: float | None = None
    versions: tuple[int, ...] = ()

    @classmethod
    def begin(cls, prompt: Sequence[int]) -> "Episode":
        """An episode that holds only its prompt."""
        return cls(tuple(prompt), (0,) * len(prompt), (0.0,) * len(prompt), versions=(0,) * len(prompt))

    @property
    def open(self) -> bool:
        """True until a turn was cut off."""
        return self.finish == "stop"

    def append_turn(self, turn: Turn, text: str) -> "Episode":
        """The episode with a turn of the policy, whose text is `text`."""
        first = self.turns == 0
        return replace(
            self,
            tokens=(*self.tokens, *turn.tokens),
            sampled=(*self.sampled, *(1 for _ in turn.tokens)),
            logprobs=(*self.logprobs, *turn.logprobs),
            text=text,
            finish="stop" if turn.finish == "stop" else "length",
            version_min=turn.version_min if first else min(self.version_min, turn.version_min),
            version_max=turn.version_max if first else max(self.version_max, turn.version_max),
            turns=self.turns + 1,
            server=turn.server,
            versions=(*self.versions, *turn.versions),
        )

    def append_observation(self, tokens: Sequence[int]) -> "Episode":
        """The episode with tokens that the policy reads but did not sample (a tool's answer, the next question)."""
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            sampled=(*self.sampled, *(0 for _ in tokens)),
            logprobs=(*self.logprobs, *(0.0 for _ in tokens)),
            versions=(*self.versions, *(0 for _ in tokens)),
        )
