"""A task whose rewards and prompts do whatever can be done wrong; the text of an answer says what."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.environments import Prompt, Task, TaskOptions, user_prompt

HANGING_PROMPT, LOCAL_PROMPT = 7, 8


class HostileOptions(TaskOptions):
    """`notes`: a folder in which whoever hangs leaves a file of its pid."""

    notes: str = ""


class Hostile(Task):
    """Reward 1 for `ok`."""

    name = "hostile"
    Options = HostileOptions
    options: HostileOptions

    def __len__(self) -> int:
        return 100

    def prompt(self, index: int) -> Prompt:
        if index == HANGING_PROMPT:
            self._hang()
        return user_prompt(f"{index}+1", answer=(lambda: 0) if index == LOCAL_PROMPT else index + 1)

    def held_out(self) -> list[Prompt]:
        return [user_prompt("2+2")]

    def reward(self, prompt: Prompt, text: str) -> Any:
        return DOES[text](self)

    def _note(self) -> None:
        (Path(self.options.notes) / str(os.getpid())).touch()

    def _hang(self) -> None:
        self._note()
        while True:
            time.sleep(600)

    def _print(self) -> None:
        self._note()
        while True:
            print("and on " * 1000)

    def _fork(self) -> float:
        """The copy comes back from here too."""
        os.fork()
        return 0.5

    def _leave(self) -> None:
        """A daemon: its session is its own, and its parent is gone."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                self._hang()
            os._exit(0)
        self._hang()

    def _eat(self) -> float:
        return float(len(bytearray((1 << 31) + 1)))

    def _close(self) -> None:
        os.closerange(3, 1000)
        self._hang()

    def _raise(self) -> None:
        raise ValueError("the verifier is broken")


DOES: dict[str, Callable[[Hostile], Any]] = {
    "ok": lambda task: 1.0,
    "pid": lambda task: os.getpid(),
    "heavy": lambda task: len({"torch", "transformers", "numpy"} & sys.modules.keys()),
    "raise": Hostile._raise,
    "nan": lambda task: float("nan"),
    "text": lambda task: "1.0",
    "nothing": lambda task: None,
    "sys.exit": lambda task: sys.exit(3),
    "exit": lambda task: os._exit(3),
    "exit well": lambda task: os._exit(0),
    "kill": lambda task: os.kill(os.getpid(), signal.SIGKILL),
    "hang": Hostile._hang,
    "print": Hostile._print,
    "fork": Hostile._fork,
    "leave": Hostile._leave,
    "eat": Hostile._eat,
    "close": Hostile._close,
    "read": lambda task: float(len(sys.stdin.read())),
}
REASONS = {
    "raise": "reward raised ValueError: the verifier is broken",
    "nan": "reward is not finite: nan",
    "text": "reward is no number: str '1.0'",
    "nothing": "reward is no number: NoneType None",
    "sys.exit": "reward raised SystemExit: 3",
    "exit": "reward ended its process: exited with code 3",
    "exit well": "reward ended its process: exited with code 0",
    "kill": "reward ended its process: killed by SIGKILL",
    "eat": "reward raised MemoryError: ",
}
"""What becomes of those that do not hang."""
