"""The tree of servers that forward weights: who feeds whom, before and after servers fail."""

from collections import Counter
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.inference.weight_sync.relay_plan import REFUSED_SECONDS, RelayPlan
from pipeline.utils.waiting import CLOCK, Clock
from tests.fakes.clock import FakeClock
from tests.patience import WAIT_SECONDS


def plan_of(servers: int, fanout: int, clock: Clock = CLOCK) -> RelayPlan:
    plan = RelayPlan(fanout, clock)
    for server in range(servers):
        plan.join(str(server))
    return plan


def sources(plan: RelayPlan, servers: int) -> dict[str, str | None]:
    return {str(server): plan.source_of(str(server)) for server in range(servers)}


def depth(plan: RelayPlan, server: str) -> int:
    """Sends from the trainer to a server."""
    source = plan.source_of(server)
    return 1 if source is None else 1 + depth(plan, source)


@given(st.integers(1, 100), st.integers(1, 8))
def test_the_trainer_sends_once_and_no_server_more_often_than_the_fanout(servers: int, fanout: int) -> None:
    plan = plan_of(servers, fanout)
    counts = Counter(sources(plan, servers).values())
    assert counts.pop(None) == 1
    assert all(count <= fanout for count in counts.values())


def test_nine_sends_reach_511_servers_and_ten_512() -> None:
    plan = plan_of(512, 2)
    assert [depth(plan, str(server)) for server in (0, 510, 511)] == [1, 9, 10]


@given(st.integers(2, 60), st.integers(1, 4), st.data())
def test_only_the_children_of_a_lost_server_and_of_its_substitute_get_another_source(
    servers: int, fanout: int, data: st.DataObject
) -> None:
    plan = plan_of(servers, fanout)
    before = sources(plan, servers)
    lost, last = str(data.draw(st.integers(0, servers - 1))), str(servers - 1)
    plan.leave(lost)
    after = sources(plan, servers)
    changed = {server for server, source in after.items() if source != before[server] and server != lost}
    assert changed <= {server for server, source in before.items() if source in (lost, last)} | {last}
    counts = Counter(source for server, source in after.items() if server != lost)
    assert counts.pop(None, 0) == (servers > 1)
    assert all(count <= fanout for count in counts.values())
    assert lost not in counts


def test_a_source_is_demoted_once_by_the_children_that_it_failed() -> None:
    plan = plan_of(4, 2)
    plan.demote("0", "1")
    assert sources(plan, 4) == {"0": "1", "1": "3", "2": "3", "3": None}
    plan.demote("0", "2")
    assert plan.source_of("3") is None, "the source was replaced before"


def test_a_child_that_its_source_cannot_feed_gets_the_weights_from_the_trainer_for_a_while() -> None:
    clock = FakeClock()
    plan = plan_of(4, 2, clock)
    plan.refuse("0", "1")
    others = {"0": None, "2": "0", "3": "1"}
    assert sources(plan, 4) == others | {"1": None}
    assert not plan.await_begun("0", "1", 7, 0.0)
    clock.sleep(REFUSED_SECONDS - 1)
    assert plan.source_of("1") is None
    clock.sleep(2)
    assert sources(plan, 4) == others | {"1": "0"}


@pytest.mark.parametrize("restarted", ["0", "1"])
def test_a_pair_is_forgotten_when_one_of_the_two_restarts(restarted: str) -> None:
    plan = plan_of(2, 2)
    plan.refuse("0", "1")
    plan.leave(restarted)
    plan.join(restarted)
    assert set(sources(plan, 2).values()) == {None, "0" if restarted == "1" else "1"}
    if restarted == "0":  # back in the earlier order
        plan.demote("1", "0")
    assert plan.source_of("1") == "0"


def test_without_a_fanout_and_before_it_joins_a_server_gets_the_weights_from_the_trainer() -> None:
    assert set(sources(plan_of(5, 0), 5).values()) == {None}
    assert plan_of(5, 2).source_of("another") is None


def test_a_server_waits_until_its_source_has_begun_a_version() -> None:
    plan = plan_of(3, 2)
    assert not plan.await_begun("0", "1", 7, 0.0)
    results = list[bool]()
    thread = Thread(target=lambda: results.append(plan.await_begun("0", "1", 7, WAIT_SECONDS)))
    thread.start()
    plan.note_begun("0", 6)
    plan.note_begun("0", 7)
    thread.join(WAIT_SECONDS)
    assert results == [True]
    plan.note_begun("0", 8)
    assert not plan.await_begun("0", "1", 7, WAIT_SECONDS), "it is beyond this version, so nobody waits"
    plan.leave("0")
    assert not plan.await_begun("0", "1", 9, WAIT_SECONDS), "it is no source any more"
