"""An environment of several turns: the policy guesses a number, the user says whether it is higher or lower."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]


class GuessData(vf.TaskData):
    number: int


class Number(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(str(trace.branches[-1].messages[-1].content) == str(self.data.number))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.calls))


class Guess(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self) -> Iterator[Number]:
        for number in range(1, 9):
            yield Number(GuessData(number=number), self.config.task)


class GuessEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: Number, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            said = "Guess a number from 1 to 8."
            for _ in range(4):
                segment = await interaction.turn(said)
                guess = int(segment.last_reply or 0)
                if guess == task.data.number:
                    break
                said = "higher" if guess < task.data.number else "lower"
