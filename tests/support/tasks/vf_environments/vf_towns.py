"""An environment with a tool: the policy is to look a town up before it answers."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Towns"]

PEOPLE = {"Ulm": "126405", "Jena": "110731"}


class Register(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def people(self, town: str) -> str:
        """How many live in a town."""
        return PEOPLE.get(town, "unknown")


class TownData(vf.TaskData):
    answer: str


class Town(vf.Task[TownData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Register(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.branches[-1].messages[-1].content))


class Towns(vf.Taskset[Town, vf.TasksetConfig]):
    def load(self) -> Iterator[Town]:
        for index in range(6):
            town = list(PEOPLE)[index % 2]
            data = TownData(prompt=f"People in {town}?", system_prompt="Use the register.", answer=PEOPLE[town])
            yield Town(data, self.config.task)


if __name__ == "__main__":
    Register.run()
