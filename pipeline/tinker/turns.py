"""Whose model the trainer works for next.

Owns the round-robin: sessions take turns, however many models each has, and the models of a session take turns within
the session's. Pure.

    turns.add("a", "a:0"); turns.add("a", "a:1"); turns.add("b", "b:0")
    turns.order()                       # a:0, a:1, b:0
    turns.took("a", "a:0")
    turns.order()                       # b:0, a:1, a:0
"""

from collections import OrderedDict


class RoundRobin:
    """The models that may have something to do."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    def add(self, session: str, model: str) -> None:
        """One that is there keeps its place."""
        self._sessions.setdefault(session, OrderedDict()).setdefault(model)

    def discard(self, session: str, model: str) -> None:
        models = self._sessions.get(session, OrderedDict())
        models.pop(model, None)
        if not models:
            self._sessions.pop(session, None)

    def took(self, session: str, model: str, *, stays: bool = False) -> None:
        """The model had its turn; if it `stays`, the next turn is its own, too."""
        self._sessions[session].move_to_end(model, last=not stays)
        self._sessions.move_to_end(session, last=not stays)

    def order(self) -> list[str]:
        """The models, the one whose turn it is first."""
        return [model for models in self._sessions.values() for model in models]
