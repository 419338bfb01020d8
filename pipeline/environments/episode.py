"""One episode as it grows: prompt, turns of the policy, observations between them.

Owns the token ledger of an episode: which tokens the policy sampled, with their log-probabilities and policy versions.
Promises that token ids are preserved as they were sampled, never encoded again from text. Knows no tokenizer and no
server.

Most episodes are one row of tokens. An episode whose conversation branched, or was compacted, has further rows,
`branches`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Finish = Literal["stop", "length"]


class Turn(Protocol):
    """One turn of the policy, such as a completion of the inference client.

    `tokens` (with the end-of-turn token if it was sampled), `logprobs` (nats, at the sampling temperature) and
    `versions` (the policy version that sampled each token) have the same length. `version_min` and `version_max` are
    the oldest and newest versions that may have sampled one of the tokens. `routed_experts` has the experts of the
    first tokens of the turn's whole context, its input first; empty without routing replay.
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
    @property
    def routed_experts(self) -> Sequence[bytes]: ...


@dataclass(frozen=True)
class EpisodeBranch:
    """A further row of an episode, which shares a prefix with an earlier row.

    Attributes:
        of: the row with the shared prefix: 0 is the episode's main row, n its nth branch.
        shared: length of the prefix in tokens. Sampled tokens of the prefix count in row `of`, and are context here.
        tokens, sampled, logprobs, versions, routed_experts: the tokens after the prefix, as in `Episode`.
    """

    of: int
    shared: int
    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...] = ()
    routed_experts: tuple[bytes, ...] = ()


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
        server: the server that sampled the last turn.
        conversation: the messages since the prompt, for rewards; empty for a single turn.
        metrics: metrics of the episode by name, such as `tools/calls`.
        branches: the further rows. Versions, turns and the last turn cover all rows.
        reward: the reward that an agent or environment reported; None: `Task.reward` computes it.
        versions: the policy version that sampled each token, T of them, 0 for tokens that were not sampled. With any
            other length `version_min` counts for all tokens.
        routed_experts: the experts that the servers chose for each of the first tokens, as bytes; empty without routing
            replay (`pipeline.config.routing_shape`).
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
    routed_experts: tuple[bytes, ...] = ()

    @classmethod
    def begin(cls, prompt: Sequence[int]) -> "Episode":
        """An episode that holds only its prompt."""
        return cls(tuple(prompt), (0,) * len(prompt), (0.0,) * len(prompt), versions=(0,) * len(prompt))

    @property
    def open(self) -> bool:
        """True until a turn was cut off."""
        return self.finish == "stop"

    def append_turn(self, turn: Turn, text: str) -> "Episode":
        """The episode followed by a turn of the policy, with `text` as the turn's text."""
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
            routed_experts=extended(self.routed_experts, turn.routed_experts),
        )

    def append_observation(self, tokens: Sequence[int]) -> "Episode":
        """The episode followed by tokens that the policy did not sample (a tool result, the next question)."""
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            sampled=(*self.sampled, *(0 for _ in tokens)),
            logprobs=(*self.logprobs, *(0.0 for _ in tokens)),
            versions=(*self.versions, *(0 for _ in tokens)),
        )


def extended(known: Sequence[bytes], routed_experts: Sequence[bytes]) -> tuple[bytes, ...]:
    """The records of `known` tokens, followed by those of later tokens: a token keeps the experts of its first pass,
    whose log-probability it has."""
    return (*known, *routed_experts[len(known) :])
