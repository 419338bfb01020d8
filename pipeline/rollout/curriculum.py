"""A curriculum: prompts that are too easy or too hard are sampled less.

Owns the choice of prompts by what their earlier groups solved. A prompt is too easy once all samples of its last
`rollout.curriculum.tries` groups were solved, and too hard once none was; such a prompt is taken with the probability
`rollout.curriculum.weight` when its turn comes, and otherwise the next prompt of the same task. The weights of a mix
stay as they are: the task of a position is that of `PromptOrder`. A prompt that is too hard comes less often, but it
comes, and one solved sample makes it an ordinary prompt again.

What was solved depends on the moment, so the choice is recorded: the prompts of `window` positions at a time are chosen
and written to `curriculum/<number>.json` of the run, once, before the first of them is issued. Promises that a position
has one prompt forever, in every attempt, also if two actors choose at the same time: the first record counts. The
random numbers depend on the seed, the task and the turn. A new actor learns from `ledger.jsonl` what was solved.

    curriculum = Curriculum(order, keys, seed=0, window=64, folder=run.curriculum, ledger=run.ledger)
    curriculum.at(17)             # the prompt of a position; may read or write a file
    curriculum.note(prompt, 0.5)  # half of the samples of a group were solved
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from pipeline.config.rollout_keys import CurriculumConfig
from pipeline.errors import RecordError
from pipeline.rollout.prompt_order import PromptOrder
from pipeline.transport.ledger import Settlement
from pipeline.utils import shared_files
from pipeline.utils.append_log import complete_lines
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT, retry_transient

MIN_WINDOW = 64
"""Positions that are chosen at a time; a whole step, if that has more."""
MAX_KEPT = 256
"""Windows in memory; those of positions that are issued again much later are read again."""
MAX_SKIPPED = 1000
"""Prompts in a row that may be skipped; the next one is taken. Without a bound, a tiny weight would never choose."""


class SolveStreaks:
    """For each prompt the number of its latest groups that were all solved, or none (negative)."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._streaks: dict[int, int] = {}

    def note(self, prompt: int, solved: float) -> None:
        """Count a group, where `solved` is the fraction of its samples that were solved."""
        before = self._streaks.get(prompt, 0)
        # A group in which some samples are solved ends every streak.
        self._streaks[prompt] = max(before, 0) + 1 if solved >= 1 else min(before, 0) - 1 if solved <= 0 else 0

    def is_extreme(self, prompt: int) -> bool:
        """Whether a prompt is too easy or too hard."""
        return abs(self._streaks.get(prompt, 0)) >= self._tries

    def numbers(self) -> dict[str, float]:
        """The number of prompts that are too easy, and of those that are too hard."""
        streaks = list(self._streaks.values())
        easy, hard = (sum(sign * streak >= self._tries for streak in streaks) for sign in (1, -1))
        return {"curriculum/easy": float(easy), "curriculum/hard": float(hard)}


class ChosenWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a window of positions, in order, and the next turn of each task after it."""

    prompts: tuple[int, ...]
    turns: tuple[int, ...]


class Curriculum:
    """The prompts of positions, chosen by what was solved. Used by one thread at a time, except for `note`."""

    def __init__(
        self, order: PromptOrder, keys: CurriculumConfig, seed: int, window: int, folder: Path, ledger: Path
    ) -> None:
        self._order, self._keys, self._seed, self._window = order, keys, seed, window
        self._folder, self._ledger = folder, ledger
        self._chosen: dict[int, ChosenWindow] = {}
        self._streaks = SolveStreaks(keys.tries)
        self._has_read = False

    def note(self, prompt: int, solved: float) -> None:
        """Count a group of a prompt, where `solved` is the fraction of its samples that were solved."""
        self._streaks.note(prompt, solved)

    def numbers(self) -> dict[str, float]:
        """Values for the status."""
        return self._streaks.numbers()

    def at(self, position: int) -> int:
        """The prompt of a position; `OSError` if the disk keeps failing, `RecordError` for a damaged record."""
        number, offset = divmod(position, self._window)
        return self._window_of(number).prompts[offset]

    def is_known(self, position: int) -> bool:
        """Whether `at` needs no file for this position."""
        return position // self._window in self._chosen

    def _window_of(self, number: int) -> ChosenWindow:
        """A window: as it is recorded, or chosen and recorded now, after the windows before it."""
        if number not in self._chosen:
            # Before another window comes into memory: the requested one must stay.
            while len(self._chosen) >= MAX_KEPT:
                del self._chosen[min(self._chosen)]
            first = number
            while first and self._recorded(first) is None:
                first -= 1
            for missing in range(first, number + 1):
                window = self._recorded(missing) or self._record(missing)
                if len(window.prompts) != self._window:
                    raise self._damaged(missing)
                self._chosen[missing] = window
        return self._chosen[number]

    def _record(self, number: int) -> ChosenWindow:
        """Choose a window, after the one before it, and record it. If another actor was faster, its choice counts."""
        turns = self._chosen[number - 1].turns if number else (0,) * self._order.tasks
        write = partial(shared_files.create_document, self._path(number), self._choose(number, turns))
        retry_transient("the curriculum to be recorded", write, FS_OUTAGE_TIMEOUT)
        if (recorded := self._recorded(number)) is None:
            raise self._damaged(number)
        return recorded

    def _recorded(self, number: int) -> ChosenWindow | None:
        if number in self._chosen:
            return self._chosen[number]
        read = partial(shared_files.read_document, self._path(number), ChosenWindow)
        return retry_transient("the curriculum to be read", read, FS_OUTAGE_TIMEOUT)

    def _damaged(self, number: int) -> RecordError:
        return RecordError(f"{self._path(number)} is damaged: expected {self._window} prompts; restore the file")

    def _choose(self, number: int, turns: tuple[int, ...]) -> ChosenWindow:
        self._read_ledger()
        left, prompts = list(turns), []
        for position in range(number * self._window, (number + 1) * self._window):
            task, _ = self._order.turn(position)
            for skipped in range(MAX_SKIPPED + 1):
                turn = left[task]
                left[task] += 1
                prompt = self._order.nth(task, turn)
                if skipped == MAX_SKIPPED or self._takes(prompt, task, turn):
                    break
            prompts.append(prompt)
        return ChosenWindow(prompts=tuple(prompts), turns=tuple(left))

    def _takes(self, prompt: int, task: int, turn: int) -> bool:
        return not self._streaks.is_extreme(prompt) or _uniform(f"{self._seed} {task} {turn}") < self._keys.weight

    def _read_ledger(self) -> None:
        """Count the groups of earlier attempts, once: what this actor samples it notes itself."""
        if not self._has_read:
            self._has_read = True
            for prompt, solved in retry_transient("the ledger to be read", self._solved_before, FS_OUTAGE_TIMEOUT):
                self._streaks.note(prompt, solved)

    def _solved_before(self) -> list[tuple[int, float]]:
        return list(_solved_in(complete_lines(self._ledger)))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"


def _solved_in(lines: Iterable[bytes]) -> Iterator[tuple[int, float]]:
    """The prompt and the solved fraction of each line that has them; a damaged line costs only itself."""
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=Settlement)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if entry.prompt is not None and entry.solved is not None:
            yield entry.prompt, entry.solved


def _uniform(text: str) -> float:
    """A number from 0 to below 1 that depends on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
