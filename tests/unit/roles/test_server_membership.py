"""Servers that join and leave an attempt, by their records, at a sender that only notes what is asked."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.errors import StreamError
from pipeline.roles.server_membership import ServerMembership
from pipeline.run.joined_servers import JoinedServer, JoinedServers
from pipeline.run.paths import AttemptPaths
from tests.fakes.clock import FakeClock

HERE, THERE = "10.1.0.7:41003", "10.1.0.8:41003"


@dataclass
class NotedSender:
    served: dict[str, int | None] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    trouble: str = ""

    def add(self, server: str) -> bool:
        self.calls.append(f"add {server}")
        if server in self.served:
            return False
        self.served[server] = None
        return True

    def remove(self, server: str) -> None:
        if self.trouble:
            raise StreamError(self.trouble)
        self.calls.append(f"remove {server}")
        self.served.pop(server, None)

    def versions(self) -> dict[str, int | None]:
        return dict(self.served)


@pytest.fixture
def joined(tmp_path: Path) -> JoinedServers:
    return JoinedServers(AttemptPaths(tmp_path, "r-1", "12-0"))


def a_record(endpoint: str = HERE, since: float = 0.0) -> JoinedServer:
    return JoinedServer(name=f"inference.{endpoint.partition(':')[0][-1]}", endpoint=endpoint, since=since)


def test_a_record_adds_its_server_and_the_removal_of_the_record_removes_it(joined: JoinedServers) -> None:
    sender = NotedSender()
    membership = ServerMembership(joined, sender, patience=60)
    membership.look()
    joined.write(a_record(HERE))
    joined.write(a_record(THERE))
    membership.look()
    membership.look()
    assert sorted(sender.calls) == [f"add {HERE}", f"add {THERE}"]
    joined.remove("inference.7")
    membership.look()
    assert sender.calls[2:] == [f"remove {HERE}"]
    assert list(joined.read()) == [THERE]


def test_a_server_without_weights_for_long_is_forgotten_until_its_agent_records_it_again(joined: JoinedServers) -> None:
    sender, clock = NotedSender(), FakeClock()
    membership = ServerMembership(joined, sender, patience=60, clock=clock)
    joined.write(a_record())
    membership.look()
    for version in (1, None, 2, None):  # each version counts, so it is never silent for 60 s
        sender.served[HERE] = version
        clock.time += 50
        membership.look()
    assert HERE in joined.read()
    clock.time += 11
    membership.look()
    assert not joined.read(), "a killed agent leaves no record behind"
    membership.look()
    assert sender.calls[-1] == f"remove {HERE}"
    joined.write(a_record(since=1.0))
    membership.look()
    assert sender.calls[-1] == f"add {HERE}"


def test_a_restarted_server_has_the_whole_patience_again(joined: JoinedServers) -> None:
    sender, clock = NotedSender(), FakeClock()
    membership = ServerMembership(joined, sender, patience=60, clock=clock)
    joined.write(a_record())
    membership.look()
    clock.time += 59
    joined.write(a_record(since=1.0))
    membership.look()
    clock.time += 59
    membership.look()
    assert HERE in joined.read()


def test_a_server_that_has_not_left_yet_is_added_as_soon_as_it_has(joined: JoinedServers) -> None:
    sender = NotedSender(served={HERE: None})
    membership = ServerMembership(joined, sender, patience=60)
    joined.write(a_record())
    membership.look()
    del sender.served[HERE]
    membership.look()
    membership.look()
    assert sender.calls == [f"add {HERE}"] * 2


def test_servers_that_an_earlier_trainer_posted_are_removed_unless_they_have_a_record(joined: JoinedServers) -> None:
    sender = NotedSender(trouble="no answer")
    joined.write(a_record(HERE))
    membership = ServerMembership(joined, sender, patience=60, former=frozenset({HERE, THERE}))
    with pytest.raises(StreamError):
        membership.look()
    sender.trouble = ""
    membership.look()
    assert sender.calls == [f"remove {THERE}", f"add {HERE}"]


def test_own_servers_whose_node_was_replaced_are_removed_and_those_of_the_spare_are_added(
    joined: JoinedServers,
) -> None:
    own, sender = [HERE], NotedSender()
    membership = ServerMembership(joined, sender, patience=60, own=lambda: own)
    membership.look()
    assert sender.calls == []
    own[:] = [THERE]
    sender.trouble = "no answer"
    with pytest.raises(StreamError):
        membership.look()
    sender.trouble = ""
    membership.look()
    membership.look()
    assert sender.calls == [f"remove {HERE}", f"add {THERE}"]


def test_a_thread_looks_until_the_block_ends_although_a_look_fails(
    joined: JoinedServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.roles.server_membership.LOOK_SECONDS", 0.01)
    sender = NotedSender(trouble="no answer")
    with ServerMembership(joined, sender, patience=60, former=frozenset({THERE})):
        while "no answer" not in caplog.text:
            time.sleep(0.01)
        sender.trouble = ""
        joined.write(a_record())
        while f"add {HERE}" not in sender.calls:
            time.sleep(0.01)
