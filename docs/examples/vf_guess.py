"""An environment of verifiers: guess a number from 1 to 3 in two guesses.

`VENV/bin/python vf_guess.py FILE` writes conversations of random guesses for SFT.
"""

import json
import sys
from pathlib import Path
from random import Random

import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]
PROMPT, GUESSES = "1 to 3", 2


def hint(guess, number):
    return "higher" if guess < number else "lower"


class GuessData(vf.TaskData):
    number: int


class Number(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(trace.branches[-1].messages[-1].content) == str(self.data.number))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.calls))


class Guess(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self):
        random = Random(0)
        for _ in range(500):
            yield Number(GuessData(number=random.randint(1, 3)), self.config.task)


class GuessEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: Number, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            text = PROMPT
            for _ in range(GUESSES):
                reply = (await interaction.turn(text)).last_reply
                if reply not in ("1", "2", "3") or int(reply) == task.data.number:
                    break
                text = hint(int(reply), task.data.number)


def random_play(random):
    number, messages, text = random.randint(1, 3), [], PROMPT
    for _ in range(GUESSES):
        guess = random.randint(1, 3)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": str(guess)}]
        if guess == number:
            break
        text = hint(guess, number)
    return {"messages": messages}


if __name__ == "__main__":
    random = Random(0)
    Path(sys.argv[1]).write_text("".join(json.dumps(random_play(random)) + "\n" for _ in range(2000)))
