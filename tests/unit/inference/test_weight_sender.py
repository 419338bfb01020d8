"""The trainer's side of weight updates as far as it goes without vLLM: states, rounds, deadlines, odd servers."""

import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import pytest
import torch

from pipeline.config import InferenceConfig, LoraConfig
from pipeline.errors import InvalidTransitionError, StreamError, WeightSyncError
from pipeline.inference.weight_sync.server_sync import (
    RESUME_SECONDS,
    TRANSITIONS,
    MeetingPoint,
    SyncEvent,
    SyncState,
    next_sync_state,
)
from pipeline.inference.weight_sync.sync_round import FIRST_RETRY, UNREACHABLE_RETRY
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import wait_for
from tests.fakes.weight_server import WeightServer
from tests.patience import WAIT_SECONDS

Changes = list[tuple[str, int | None]]
OnChange = Callable[[str, int | None], None]
WEIGHTS = [("w", torch.ones(2))]


def test_every_event_that_a_state_does_not_allow_raises() -> None:
    for state in get_args(SyncState):
        for event in get_args(SyncEvent):
            if (state, event) in TRANSITIONS:
                assert next_sync_state(state, event) == TRANSITIONS[state, event]
            else:
                with pytest.raises(InvalidTransitionError):
                    next_sync_state(state, event)


def test_no_state_but_closed_is_a_dead_end_and_a_failure_always_leads_to_absent() -> None:
    for state in get_args(SyncState):
        assert (state == "closed") == (not any(source == state for source, _ in TRANSITIONS))
    assert {target for (_, event), target in TRANSITIONS.items() if event == "fail"} == {"absent"}


def test_closing_gives_the_last_version_back() -> None:
    """On a GPU it has the size of the model, and its memory is counted before the end is told."""
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], patience=WAIT_SECONDS) as sender:
        sender.publish(1, WEIGHTS)
        assert sender._payload is not None
        buffer = weakref.ref(sender._payload.buffer)
    assert buffer() is None


def test_the_memory_of_a_version_that_every_server_has_is_free_before_the_next_is_packed() -> None:
    """Else the trainer holds two versions at each publication, each of the size of the model."""
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], patience=WAIT_SECONDS) as sender:
        sender.publish(1, WEIGHTS)
        assert sender._payload is not None
        buffer = weakref.ref(sender._payload.buffer)

        def next_weights() -> Iterator[tuple[str, torch.Tensor]]:
            wait_for("the first version's memory to be free", lambda: buffer() is None, WAIT_SECONDS)
            yield from WEIGHTS

        sender.publish(2, next_weights())


@contextmanager
def a_sender(
    servers: str | list[str],
    told: Changes | OnChange,
    patience: float = 0.5,
    lora: LoraConfig | None = None,
    on_leave: Callable[[str], None] = lambda server: None,
    quorum: int = 1,
    **settings: float,
) -> Iterator[WeightSender]:
    on_change = (lambda *change: told.append(change)) if isinstance(told, list) else told
    names = [servers] if isinstance(servers, str) else servers
    with hold_port() as holder:
        meeting = MeetingPoint("127.0.0.2", holder.getsockname()[1], "s3cret")
        config = InferenceConfig.model_validate(settings)
        with WeightSender(
            names, meeting, config, patience, on_change, lora, on_leave=on_leave, quorum=quorum
        ) as sender:
            yield sender


def test_a_server_that_accepts_and_never_answers_is_not_waited_for_beyond_the_patience() -> None:
    told: Changes = []
    with socket.create_server(("127.0.0.5", 0)) as silent:
        endpoint = f"127.0.0.5:{silent.getsockname()[1]}"
        with a_sender(endpoint, told, update_seconds=0.2) as sender:
            started = time.monotonic()
            with pytest.raises(WeightSyncError, match=f"{endpoint}/get_world_size: no answer in time"):
                sender.publish(1, [("w", torch.ones(2))])
            took = time.monotonic() - started
    assert took < 10 + RESUME_SECONDS
    assert told == [(endpoint, None)], "a trainer before this one may have left a version on the board"


def test_a_server_that_starts_up_is_tried_at_a_constant_pause_and_one_that_fails_ever_later() -> None:
    with hold_port() as holder, a_sender(f"127.0.0.5:{holder.getsockname()[1]}", [], patience=WAIT_SECONDS) as sender:
        sender.start(1, WEIGHTS)
        (slot,) = sender._slots
        wait_for("five attempts", lambda: slot.attempts == 5, WAIT_SECONDS)
        assert "Connection refused" in slot.failure
        assert slot.retry.seconds == UNREACHABLE_RETRY
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], patience=WAIT_SECONDS) as sender:
        server.failing.add("/get_world_size")
        sender.start(1, WEIGHTS)
        (slot,) = sender._slots
        wait_for("three attempts", lambda: slot.attempts == 3, WAIT_SECONDS)
        assert slot.retry.seconds == FIRST_RETRY * 2**3 > UNREACHABLE_RETRY


def test_an_exception_of_the_pulse_ends_the_wait() -> None:
    class Interrupted(Exception):
        pass

    def pulse() -> None:
        raise Interrupted

    with a_sender("127.0.0.9:9", []) as sender, pytest.raises(Interrupted):
        sender.publish(1, [("w", torch.ones(2))], pulse)


def test_publishing_other_parameters_than_before_is_refused() -> None:
    with a_sender("127.0.0.9:9", []) as sender:
        with pytest.raises(WeightSyncError, match="waited"):
            sender.publish(1, [("w", torch.ones(2))])
        with pytest.raises(WeightSyncError, match="not those that were announced"):
            sender.publish(2, [("v", torch.ones(2))])


def test_closing_before_anything_was_published_ends_all_threads() -> None:
    before = threading.active_count()
    with a_sender("127.0.0.9:9", []) as sender:
        assert sender.close() == []
    assert threading.active_count() == before


def test_a_server_receives_the_leave_signal_of_its_trainer() -> None:
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], 10) as sender:
        bring_all(sender, 1)
        assert sender.close() == []


def test_a_server_that_did_not_hear_that_its_trainer_leaves_is_named() -> None:
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], 10) as sender:
        bring_all(sender, 1)
        server.sees_signal = False
        assert sender.close() == [f"{server.endpoint} left its group before it received the trainer's signal to leave"]


@contextmanager
def two_servers() -> Iterator[tuple[WeightServer, WeightServer]]:
    with WeightServer("127.0.0.5") as first, WeightServer("127.0.0.6") as second:
        yield first, second


def bring_all(sender: WeightSender, version: int) -> None:
    """Publish, and wait for servers that join in the background too."""
    sender.publish(version, WEIGHTS)
    wait_for("all servers", lambda: set(sender.versions().values()) == {version}, 10)


def test_starting_a_version_returns_while_the_servers_are_still_busy_with_it() -> None:
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], 10) as sender:
        bring_all(sender, 1)
        with server.held("/update_weights") as asked:
            sender.start(2, WEIGHTS)
            assert asked.wait(10)
            assert sender.versions() == {server.endpoint: 1}
        report = sender.wait_until_synced()
        assert (report.version, list(report.servers), report.failures) == (2, [server.endpoint], {})
        assert sender.versions() == {server.endpoint: 2}


def test_a_busy_server_skips_to_the_newest_of_the_versions_that_were_started_meanwhile() -> None:
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], 10) as sender:
        bring_all(sender, 1)
        with server.held("/update_weights") as asked:
            sender.start(2, WEIGHTS)
            assert asked.wait(10)
            sender.start(3, WEIGHTS)
            sender.start(4, WEIGHTS)
        assert sender.wait_until_synced().servers.keys() == {server.endpoint}
        assert server.loaded == [1, 2, 4]


def test_the_seconds_of_each_part_of_an_update_are_told_for_each_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with two_servers() as (quick, slow), a_sender([quick.endpoint, slow.endpoint], [], 10) as sender:
        bring_all(sender, 1)
        with slow.held("/pause") as asked:
            sender.start(2, WEIGHTS)
            assert asked.wait(10)
            wait_for("the other server", lambda: sender.versions()[quick.endpoint] == 2, WAIT_SECONDS)
        report = sender.wait_until_synced()
    assert {server: list(phases) for server, phases in report.phases.items()} == {
        server.endpoint: ["send", "pause", "update", "resume"] for server in (quick, slow)
    }
    assert report.phases[slow.endpoint]["pause"] == report.slowest()["pause"]
    assert f"weights 2 on {slow.endpoint}: send " in caplog.text


def test_settling_does_not_wait_for_a_server_that_failed_at_the_version_before() -> None:
    told: Changes = []
    with two_servers() as (steady, failing), a_sender([steady.endpoint, failing.endpoint], told, 10) as sender:
        bring_all(sender, 1)
        with failing.held("/get_world_size"):
            with failing.held("/update_weights") as asked:
                sender.start(2, WEIGHTS)
                assert asked.wait(10)
                sender.start(3, WEIGHTS)
                failing.failing.add("/update_weights")
            report = sender.wait_until_synced()
    assert list(report.servers) == [steady.endpoint]
    assert "/update_weights" in report.failures[failing.endpoint]


@pytest.mark.parametrize(
    ("rank", "told"), [(0, {}), (8, {"r": 8, "lora_alpha": 4.0, "target_modules": ["q_proj"]})], ids=str
)
def test_a_server_is_told_whether_a_model_or_an_adapter_comes(rank: int, told: dict[str, Any]) -> None:
    lora = LoraConfig(rank=rank, alpha=4.0, targets=("q_proj",))
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], 10, lora) as sender:
        bring_all(sender, 1)
        assert server.adapter == told


def test_the_tensors_may_change_once_a_version_was_started() -> None:
    weight = torch.ones(2)
    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, [], 10) as sender:
        bring_all(sender, 1)
        with server.held("begin_update"):
            sender.start(2, [("w", weight)])
            weight.zero_()
        sender.wait_until_synced()
        assert torch.equal(server.weights["w"], torch.ones(2))


ODD = [("/collective_rpc", answer) for answer in (b"<html>", b"\xff", b"[]", b"{}", b"7")] + [("/update_weights", b"{")]


@pytest.mark.parametrize(("route", "answer"), ODD, ids=str)
def test_a_server_with_an_odd_answer_is_evicted_and_comes_back_when_it_answers_again(route: str, answer: bytes) -> None:
    told: Changes = []
    with two_servers() as (steady, odd), a_sender([steady.endpoint, odd.endpoint], told, 10) as sender:
        bring_all(sender, 1)
        odd.answers[route] = answer
        report = sender.publish(2, WEIGHTS)
        assert list(report.servers) == [steady.endpoint]
        assert f"{odd.endpoint}{route}" in report.failures[odd.endpoint]
        odd.answers.clear()
        wait_for("the server to be back", lambda: sender.versions()[odd.endpoint] == 2, 10)
    assert [version for server, version in told if server == odd.endpoint] == [1, None, 2]


def test_a_server_that_fails_while_paused_is_evicted_before_it_goes_on() -> None:
    with WeightServer("127.0.0.5") as server:

        def tell(_: str, version: int | None) -> None:
            server.calls.append(f"told {version}")

        with a_sender(server.endpoint, tell) as sender:
            bring_all(sender, 1)
            server.failing.add("/finish_weight_update")
            with pytest.raises(WeightSyncError, match="/finish_weight_update"):
                sender.publish(2, WEIGHTS)
        failed = server.calls[server.calls.index("told 1") :]
    assert failed[failed.index("told None") + 1] == "/resume"
    assert "/resume" not in failed[: failed.index("told None")]


def test_a_server_counts_as_current_once_its_announcement_succeeded() -> None:
    announced: Changes = []
    versions: list[int | None] = []
    lost = StreamError("no connection")

    def announce(server: str, version: int | None) -> None:
        announced.append((server, version))
        versions.append(sender.versions()[server])
        if version is not None and announced.count((server, 1)) <= 2:
            raise lost

    with WeightServer("127.0.0.5") as server, a_sender(server.endpoint, announce, 10) as sender:
        sender.start(1, WEIGHTS)
        assert list(sender.wait_until_synced().servers) == [server.endpoint]
        assert announced == [(server.endpoint, version) for version in (1, None, 1, None, 1)]
        assert versions == [None] * 5, "no announcement had succeeded"
        assert sender.versions() == {server.endpoint: 1}


def test_settling_before_any_start_is_refused() -> None:
    with a_sender("127.0.0.9:9", []) as sender, pytest.raises(WeightSyncError, match="no version was started"):
        sender.wait_until_synced()


def test_without_any_server_publishing_fails_and_says_who_is_missing() -> None:
    with hold_port() as holder:
        meeting = MeetingPoint("127.0.0.2", holder.getsockname()[1], "secret")
        refused = pytest.raises(WeightSyncError, match=r"127\.0\.0\.9:9/get_world_size: ConnectionRefusedError")
        nobody = WeightSender(["127.0.0.9:9"], meeting, InferenceConfig(), 1, lambda server, version: None)
        with nobody as sender, refused:
            sender.publish(0, [])


def test_a_server_that_joins_gets_the_newest_weights_and_no_version_waits_for_it() -> None:
    with two_servers() as (own, joining), a_sender(own.endpoint, [], 10) as sender:
        bring_all(sender, 1)
        with joining.held("/update_weights") as asked:
            assert sender.add(joining.endpoint)
            assert not sender.add(joining.endpoint), "it has joined already"
            assert asked.wait(10)
            assert list(sender.publish(2, WEIGHTS).servers) == [own.endpoint]
        wait_for("the server to join", lambda: sender.versions() == {own.endpoint: 2, joining.endpoint: 2}, 10)
        assert sorted(sender.publish(3, WEIGHTS).servers) == sorted([own.endpoint, joining.endpoint])


def test_a_server_leaves_in_the_middle_of_an_update_and_may_join_again() -> None:
    left: list[str] = []
    with two_servers() as (own, leaving):
        threads = threading.active_count()
        with a_sender([own.endpoint, leaving.endpoint], [], 10, on_leave=left.append) as sender:
            bring_all(sender, 1)
            both = threading.active_count()
            with leaving.held("/update_weights") as asked:
                sender.start(2, WEIGHTS)
                assert asked.wait(10)
                sender.remove(leaving.endpoint)
                report = sender.wait_until_synced()
                assert (list(report.servers), report.failures) == ([own.endpoint], {})
                assert not sender.add(leaving.endpoint), "its update has not ended"
            wait_for("the server to leave", lambda: sender.versions() == {own.endpoint: 2}, 10)
            assert left == [leaving.endpoint]
            wait_for("its thread to end", lambda: threading.active_count() < both, 10)
            assert sender.add(leaving.endpoint)
            bring_all(sender, 3)
            assert sender.close() == []
        wait_for("all threads to end", lambda: threading.active_count() == threads, 10)


def test_a_server_of_an_earlier_trainer_leaves_at_once() -> None:
    left: list[str] = []
    with a_sender("127.0.0.9:9", [], on_leave=left.append) as sender:
        sender.remove("127.0.0.7:7")
        assert left == ["127.0.0.7:7"]


def test_the_first_version_waits_for_the_quorum_and_later_ones_for_the_servers_that_are_there() -> None:
    with two_servers() as (early, late), ExitStack() as hold:
        asked = hold.enter_context(late.held("/init_weight_transfer_engine"))
        with a_sender([early.endpoint, late.endpoint, "127.0.0.9:9"], [], 10, quorum=2) as sender:
            sender.start(1, WEIGHTS)
            assert asked.wait(10)
            wait_for("the early server", lambda: sender.versions()[early.endpoint] == 1, WAIT_SECONDS)
            report = sender.wait_until_synced(hold.close)  # the late one joins during the wait
            assert report.servers.keys() == {early.endpoint, late.endpoint}
            late.failing.add("/update_weights")
            assert sender.publish(2, WEIGHTS).servers.keys() == {early.endpoint}


def test_a_quorum_that_does_not_come_together_fails_and_says_who_is_missing() -> None:
    expected = r"weights 1 on 2 servers \(inference.min_servers\); missing: weights 1: 127\.0\.0\.9:9"
    with (
        WeightServer("127.0.0.5") as server,
        a_sender([server.endpoint, "127.0.0.9:9"], [], 1, quorum=2) as sender,
        pytest.raises(WeightSyncError, match=expected),
    ):
        sender.publish(1, WEIGHTS)
