"""Sums in one turn, with a rubric of two parts; and ones whose rubric does wrong, as `how` says."""

import asyncio
import os
import time
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str
    how: str = ""


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.how == "raises":
            raise ValueError("the judge has left")
        if self.data.how == "blocks":
            time.sleep(3600)
        if self.data.how == "waits":
            await asyncio.sleep(3600)
        if self.data.how == "exits":
            os._exit(3)
        return float(self.said(trace) == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(self.said(trace)) < 3)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(self.said(trace)))

    def said(self, trace: vf.Trace) -> str:
        return str(trace.branches[-1].messages[-1].content or "")


class SumsConfig(vf.TasksetConfig):
    how: str = ""
    count: int = 12
    split: str = "train"


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(self.config.count):
            prompt = f"{number}+{number}" if self.config.split == "train" else f"{number}+9"
            timeout = vf.TaskTimeout(scoring=0.2) if self.config.how == "waits" else vf.TaskTimeout()
            data = SumData(prompt=prompt, answer=str(eval(prompt)), how=self.config.how, timeout=timeout)
            yield Sum(data, self.config.task)
