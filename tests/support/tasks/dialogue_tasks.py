"""Sums in several turns, whatever the policy says, with a tool between two turns."""

from typing import Any

from pipeline.environments import Episode, Policy, Prompt
from pipeline.environments.arithmetic import Arithmetic

TURNS = 3


class Dialogue(Arithmetic):
    """Three turns, which can be replayed."""

    name = "dialogue"

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        return "+1"

    def can_replay(self, prompt: Prompt) -> bool:
        return True

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        episode = Episode.begin(policy.prompt)
        while True:
            turn = await policy.sample(episode.tokens)
            episode = episode.append_turn(turn, policy.decode(turn.tokens))
            if episode.turns == TURNS:
                return episode
            episode = episode.append_observation(policy.encode(await policy.use(prompt, "tool", {})))
