"""Which sessions are silent, in simulated time."""

from pipeline.tinker.heartbeats import MAX_LOOK_GAP_SECONDS, SILENT_SECONDS, Heartbeats

SDK_SECONDS = 20.0
"""The SDK waits 10 s after a heartbeat, and gives each 10 s: while none comes through, it tries one in so many."""


class Time:
    def __init__(self) -> None:
        self.now = 1000.0
        self.heartbeats = Heartbeats(lambda: self.now, silent=("earlier",))
        self.changes: list[tuple[str, bool]] = []
        self.heartbeats.subscribers.append(lambda *change: self.changes.append(change))

    def pass_by(self, seconds: float, *, beats: float = 0.0, step: float = 2.0) -> None:
        """Look every `step` seconds; with `beats`, session `s` is heard of in that interval."""
        end, beat = self.now + seconds, self.now + beats
        while self.now < end:
            self.now += step
            if beats and self.now >= beat:
                self.heartbeats.beat("s")
                beat += beats
            self.heartbeats.look(["s", "earlier"])


def test_a_session_whose_every_other_heartbeats_are_lost_is_never_silent() -> None:
    time = Time()
    time.pass_by(3600.0, beats=5 * SDK_SECONDS)
    assert time.changes == []


def test_a_session_is_silent_after_a_while_and_no_longer_with_its_next_request() -> None:
    time = Time()
    time.heartbeats.beat("s")
    time.pass_by(SILENT_SECONDS)
    assert not time.heartbeats.is_silent("s")
    time.pass_by(4.0)
    assert time.heartbeats.is_silent("s")
    time.pass_by(300.0)
    time.heartbeats.beat("s")
    assert not time.heartbeats.is_silent("s")
    time.pass_by(SILENT_SECONDS - 4.0)
    assert time.changes == [("s", True), ("s", False)]


def test_a_session_that_was_silent_when_the_gateway_ended_is_silent_until_it_is_heard_of() -> None:
    time = Time()
    assert time.heartbeats.is_silent("earlier")
    assert time.heartbeats.seconds_silent("earlier") == 0.0, "its end is counted from the start of the gateway"
    time.heartbeats.beat("earlier")
    assert time.changes == [("earlier", False)]


def test_time_in_which_the_gateway_stood_still_is_nobodys_silence() -> None:
    time = Time()
    time.pass_by(60.0, beats=10.0)
    time.pass_by(7200.0, step=7200.0)  # its host was asleep, say
    assert time.changes == []
    assert time.heartbeats.seconds_silent("s") <= 10.0
    time.pass_by(SILENT_SECONDS + MAX_LOOK_GAP_SECONDS)
    assert time.changes == [("s", True)]
