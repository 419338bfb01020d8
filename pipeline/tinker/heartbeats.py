"""The silence of sessions.

Owns the time of each session's last heartbeat: any request is a heartbeat, and the SDK also sends one every 10 s.
Promises that a session is silent only after `silent_seconds` without a heartbeat, that its next request ends the
silence at once, and that time in which the gateway itself was stopped does not count. Pure: the caller passes the
clock, and subscribers act on silence.
"""

from collections.abc import Callable, Iterable

SILENT_SECONDS = 120.0
"""Default of `serve.silent_seconds`. The SDK tries a heartbeat every 10 s with a timeout of 10 s, so a running client
misses six in a row before; the SDK's warning comes after the same time."""
MAX_LOOK_GAP_SECONDS = 10.0
"""Seconds between two looks; more means that the gateway was stopped, or its host asleep, and received no heartbeat."""


class Heartbeats:
    """The times of the sessions' last heartbeats, by session id."""

    def __init__(self, clock: Callable[[], float], silent: Iterable[str] = ()) -> None:
        """`silent` are the sessions that were silent when the gateway ended."""
        self._clock, self._silent = clock, set(silent)
        self._last_beats: dict[str, float] = {}
        self._looked = clock()
        self.silent_seconds = SILENT_SECONDS
        self.subscribers: list[Callable[[str, bool], None]] = []
        """Each is called with a session, and whether it is silent, when that changes."""

    def beat(self, session: str) -> None:
        """A request of this session came."""
        self._last_beats[session] = self._clock()
        if session in self._silent:
            self._silent.discard(session)
            self._publish(session, is_silent=False)

    def is_silent(self, session: str) -> bool:
        return session in self._silent

    def seconds_silent(self, session: str) -> float:
        """Seconds since the session's last heartbeat; a session without one counts from now."""
        now = self._clock()
        return now - self._last_beats.setdefault(session, now)

    def look(self, sessions: Iterable[str]) -> None:
        """Note which of these sessions have become silent. To be called every few seconds."""
        now = self._clock()
        pause, self._looked = now - self._looked, now
        if pause > MAX_LOOK_GAP_SECONDS:
            self._last_beats = {session: min(now, last_beat + pause) for session, last_beat in self._last_beats.items()}
        for session in sessions:
            if session not in self._silent and self.seconds_silent(session) > self.silent_seconds:
                self._silent.add(session)
                self._publish(session, is_silent=True)

    def forget(self, session: str) -> None:
        self._last_beats.pop(session, None)
        self._silent.discard(session)

    def _publish(self, session: str, *, is_silent: bool) -> None:
        for subscriber in self.subscribers:
            subscriber(session, is_silent)
