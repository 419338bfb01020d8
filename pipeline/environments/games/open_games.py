"""The games that a process has open between two turns.

Owns their cache. A call names the seed and all actions so far, so any worker process can make it: a game that is not
open here starts again from its seed, with the same actions. Promises that a game which is played again gave the same
observations and rewards, or that the call raises; that a lost game (`GameLost`) is played again once; that at most
`limit` games are open; and that a game that ended, raised, or was idle for `IDLE_SECONDS` is closed. A library that
draws from the global random state of `random` or NumPy sees a separate state in each game. The processes of games end
with the worker (`pipeline.utils.subprocesses`).
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from pipeline.environments.games.game_protocol import Game, GameLost, GameStep

IDLE_SECONDS = 900.0
NOT_SAME = (
    "the environment is not deterministic: the same seed and actions gave other observations; set "
    "task.options.deterministic=false and task.processes=1"
)
NOT_OPEN = (
    "the environment is not open in this process, and task.options.deterministic=false forbids playing it again; set "
    "task.processes=1, and task.options.open_games to at least the samples in flight"
)


def digest(before: str, reply: str) -> str:
    """The digest of all replies of a game, from the digest before this reply."""
    return blake2b(f"{before}\n{reply}".encode(errors="replace"), digest_size=12).hexdigest()


class _RandomState:
    """The global random state of one game."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, the global generators have this game's state."""
        numpy = sys.modules.get("numpy")
        outer, outer_numpy = random.getstate(), numpy.random.get_state() if numpy else None
        random.setstate(self._python)
        if numpy:
            if self._numpy is None:
                self._numpy = numpy.random.RandomState(self._seed).get_state()
            numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(outer)
            if numpy:
                self._numpy = numpy.random.get_state()
                numpy.random.set_state(outer_numpy)


class PlayedGame:
    """A game with a separate random state."""

    def __init__(self, make: Callable[[], Game], seed: int) -> None:
        """Open the game and start it; `first` is its first observation."""
        self._random = _RandomState(seed)
        with self._random.active():
            self.game = make()
        try:
            self.restart(seed)
        except BaseException:
            self.close()
            raise

    def restart(self, seed: int) -> None:
        """Start the game of another seed."""
        self._random = _RandomState(seed)
        with self._random.active():
            self.first = self.game.reset(seed)

    def step(self, text: str) -> GameStep:
        """The reply to a turn of the policy."""
        with self._random.active():
            return self.game.step(text)

    def close(self) -> None:
        """Close the game. An error of the library on the way is ignored: the game is over."""
        with suppress(Exception), self._random.active():
            self.game.close()


@dataclass
class _Entry:
    key: tuple[int, tuple[str, ...], str]
    game: PlayedGame
    used: float = field(default_factory=time.monotonic)


class OpenGames:
    """The open games of this process, by what was played."""

    def __init__(self, make: Callable[[], Game], limit: int, deterministic: bool = True) -> None:
        """`make` opens a game. Without `deterministic` no game is played again."""
        self._make, self._limit, self._deterministic = make, limit, deterministic
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def first(self, seed: int) -> tuple[str, str]:
        """The first observation of a seed, and the sentence with the valid actions. The game stays open."""
        game = self._opened(seed)
        self._keep((seed, (), digest("", game.first)), game)
        return game.first, game.game.actions

    def step(self, seed: int, actions: Sequence[str], seen: str) -> GameStep:
        """The reply to the last of `actions`; `seen` is the digest of all replies before it."""
        before = tuple(actions[:-1])
        game = self._take((seed, before, seen)) or self._played_again(seed, before, seen)
        try:
            step = game.step(actions[-1])
        except GameLost:
            game.close()
            if not self._deterministic:
                raise
            return self._again(seed, actions, seen)
        except BaseException:
            game.close()
            raise
        return self._replied(game, seed, actions, seen, step)

    def _again(self, seed: int, actions: Sequence[str], seen: str) -> GameStep:
        """The reply of a game that was lost, played again once."""
        game = self._played_again(seed, tuple(actions[:-1]), seen)
        try:
            step = game.step(actions[-1])
        except BaseException:
            game.close()
            raise
        return self._replied(game, seed, actions, seen, step)

    def _replied(self, game: PlayedGame, seed: int, actions: Sequence[str], seen: str, step: GameStep) -> GameStep:
        if step.done:
            game.close()
        else:
            self._keep((seed, tuple(actions), digest(seen, step.to_json())), game)
        return step

    def close(self) -> None:
        """Close all games."""
        while self._entries:
            self._entries.pop().game.close()

    def _take(self, key: tuple[int, tuple[str, ...], str]) -> PlayedGame | None:
        for number in reversed(range(len(self._entries))):
            if self._entries[number].key == key:
                return self._entries.pop(number).game
        return None

    def _keep(self, key: tuple[int, tuple[str, ...], str], game: PlayedGame) -> None:
        self._entries.append(_Entry(key, game))
        # Entries are in the order of their last use, so the first ones are idle for longest.
        oldest = time.monotonic() - IDLE_SECONDS
        while len(self._entries) > self._limit or (self._entries and self._entries[0].used < oldest):
            self._entries.pop(0).game.close()

    def _opened(self, seed: int) -> PlayedGame:
        if len(self._entries) >= self._limit:
            self._entries.pop(0).game.close()  # before the next one opens: a server may allow no more
        return PlayedGame(self._make, seed)

    def _played_again(self, seed: int, actions: Sequence[str], seen: str) -> PlayedGame:
        if actions and not self._deterministic:
            raise RuntimeError(NOT_OPEN)
        game = self._opened(seed)
        try:
            replies = digest("", game.first)
            for action in actions:
                replies = digest(replies, game.step(action).to_json())
            if replies != seen:
                raise RuntimeError(NOT_SAME)
        except BaseException:
            game.close()
            raise
        return game
