"""Questions of a file in one turn, `{"question": …, "answer": …}` a line: 1 for exactly the answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Questions"]


class QuestionData(vf.TaskData):
    answer: str


class Question(vf.Task[QuestionData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(trace.branches[-1].messages[-1].content or "") == self.data.answer)


class QuestionsConfig(vf.TasksetConfig):
    path: str = ""


class Questions(vf.Taskset[Question, QuestionsConfig]):
    def load(self) -> Iterator[Question]:
        for line in Path(self.config.path).read_text().splitlines():
            row = json.loads(line)
            yield Question(QuestionData(prompt=row["question"], answer=row["answer"]), self.config.task)
