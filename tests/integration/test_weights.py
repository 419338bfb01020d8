"""Weights on their way from a trainer to real vLLM servers: what is served afterwards, and what survives a fault."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
import torch

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.server_admin_client import ServerAdminClient
from pipeline.roles.inference import is_healthy
from pipeline.rollout.generate_wire import Choice
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.utils.subprocesses import Child, tail
from pipeline.utils.waiting import Deadline, wait_for
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.processes import runs
from tests.support.ranks import forked_ranks, publication_ranks
from tests.support.servers.answers import answers_of, status_of, versions_told
from tests.support.servers.routed_experts import check_routed_experts
from tests.support.servers.traffic import (
    APART,
    CLOSE,
    PROBE,
    Traffic,
    check_purity,
    client_of,
    lose_a_server,
    probe,
    run_traffic,
    sample,
    straddling,
)
from tests.support.servers.vllm import (
    EOS,
    SECRET,
    TRAINER,
    Served,
    a_model,
    a_sender,
    distance,
    mixture_directory,
    parameters,
    publish_to_all,
    replaying_config,
    starting_of,
    two_models,
    two_servers,
)

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NOT_MET = "the server has not met the trainer: init_weight_transfer_engine comes first"
STOP_SECONDS = 20
"""More than an agent's 6: these machines are busy, and what counts is that nobody has to be killed."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """Two real vLLM servers of a tiny model; the last test of this file ends them."""
    with two_servers(tmp_path_factory.mktemp("servers")) as ready:
        yield ready


def test_after_an_update_every_server_serves_the_trainers_logprobs(servers: list[Served]) -> None:
    first, second = (a_model(servers[0].model, seed) for seed in (1, 2))
    with a_sender(servers) as sender:
        for version, (new, old) in enumerate([(first, second), (second, first), (first, second)]):
            publish_to_all(sender, version, new)
            for server in servers:
                completion = probe(server, version)
                assert (completion.version_min, completion.version_max) == (version, version)
                assert distance(new, PROBE, completion) < CLOSE
                assert distance(old, PROBE, completion) > APART


def test_ranks_that_hold_parts_of_the_weights_update_every_server(servers: list[Served], tmp_path: Path) -> None:
    model = a_model(servers[0].model, 5)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    where = [server.endpoint for server in servers], TRAINER, SECRET, tmp_path
    ranks = forked_ranks.start_ranks(2, publication_ranks.publish_to, tmp_path / "model", *where)
    for version in (1, 2):
        wait_for("the ranks", (tmp_path / f"published {version}").exists, forked_ranks.JOIN_SECONDS)
        for server in servers:
            assert distance(model, PROBE, probe(server, version)) < CLOSE
        with torch.no_grad():
            for parameter in model.parameters():
                publication_ranks.change_tensor(parameter, version)
        (tmp_path / f"probed {version}").touch()
    for process in ranks:
        process.join(forked_ranks.JOIN_SECONDS)
    codes = [process.exitcode for process in ranks]
    forked_ranks.end_ranks(ranks)
    assert codes == [0, 0]


def test_a_tied_head_and_experts_are_updated_too_and_a_dead_server_loses_no_request(
    servers: list[Served], tmp_path: Path
) -> None:
    """Two tests that share the 15 s of one more server, which the second kills."""
    directory = mixture_directory(tmp_path / "mixture")
    config = replaying_config(directory)
    with starting_of(config, "127.0.0.5") as ready:
        victim = ready()
        with a_sender([victim]) as sender:
            for version, seed in enumerate((1, 2, 1)):
                model = a_model(directory, seed)
                publish_to_all(sender, version, model)
                assert distance(model, PROBE, probe(victim, version)) < CLOSE
        check_routed_experts(victim, config, model, version)
        both = [servers[0], victim]
        with a_sender([servers[0]]) as sender:
            publish_to_all(sender, 1, a_model(servers[0].model, 1))
            completions, retries = asyncio.run(lose_a_server(both, victim))
    assert len(completions) == 32
    assert {completion.server for completion in completions} == {servers[0].endpoint}
    assert retries >= 16


def test_requests_in_flight_go_on_through_an_update_and_later_ones_see_only_the_new_weights(
    servers: list[Served],
) -> None:
    traffic, models = run_traffic(servers, *two_models(servers[0].model))
    check_purity(traffic, models)
    spans = {completion.version_max - completion.version_min for completion in straddling(traffic)}
    assert 1 in spans, "no request was in flight during an update"
    assert traffic.retries == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_a_later_turn_finds_its_prefix_in_the_cache_after_an_update(servers: list[Served], keeps: bool) -> None:
    server, (before, after) = servers[0], two_models(servers[0].model)
    prompt = [3 + keeps, *[4, 5, 6, 7, 8] * 40]

    async def turns() -> float:
        async with client_of([server], keeps_prefixes=keeps) as client:
            client.update(server.endpoint, 1)
            await turn(client)
            await asyncio.to_thread(publish_to_all, sender, 2, after)
            client.update(server.endpoint, 2)
            assert f"prefix_cache/{server.endpoint}" in client.numbers()
            await turn(client)
            return client.numbers()[f"prefix_cache/{server.endpoint}"]

    async def turn(client: InferenceClient) -> None:
        sampling = {"n": 1, "temperature": 1.0, "max_tokens": 4, "stop_token_ids": []}
        await client.generate(prompt, cached_on=server.endpoint, cached_at=1, **sampling)

    with a_sender([server]) as sender:
        publish_to_all(sender, 1, before)
        assert (asyncio.run(turns()) > 0.2) is keeps


def test_a_release_that_does_not_say_which_weights_sampled_a_token_is_helped_to_say_it(
    servers: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client believes our plugin, which says what this release says itself; see `tests.support.servers.untold`."""
    both: list[tuple[Any, Any]] = []

    def spans(choice: Any) -> Any:
        both.append((choice.logprobs.weight_versions, choice.weight_versions))
        return choice.logprobs.weight_versions

    monkeypatch.setattr(Choice, "spans", property(spans))
    traffic, models = run_traffic(servers[:1], *two_models(servers[0].model))
    check_purity(traffic, models)
    assert straddling(traffic), "no request was in flight during an update"
    assert all(ours == theirs for ours, theirs in both)


def test_the_purity_check_notices_a_request_that_saw_other_weights(servers: list[Served]) -> None:
    model, other = two_models(servers[0].model)
    with a_sender(servers) as sender:
        publish_to_all(sender, 1, model)
        completion = probe(servers[0], 1)
    traffic = Traffic(servers, tokens=24, issued=1, done=[(1, completion)])
    check_purity(traffic, {1: model})
    with pytest.raises(AssertionError):
        check_purity(traffic, {1: other})
    traffic.done = [(1, replace(completion, version_max=2))]
    for kept in (False, True):  # no token is of the second version
        with pytest.raises(AssertionError):
            check_purity(traffic, {1: model, 2: other}, kept=kept)


@pytest.mark.parametrize(
    "settings",
    [
        {"pause_mode": "abort"},
        pytest.param({"pause_mode": "wait"}, marks=pytest.mark.trial),
        pytest.param({"reset_kv_cache_on_update": True}, marks=pytest.mark.trial),
    ],
    ids=str,
)
def test_no_update_loses_a_request_however_it_pauses(servers: list[Served], settings: dict[str, Any]) -> None:
    traffic, models = run_traffic(servers, *two_models(servers[0].model), tokens=64, **settings)
    check_purity(traffic, models, kept=False)
    if settings.get("pause_mode") == "abort":
        assert traffic.retries
        assert straddling(traffic), "no aborted sample went on where it stopped"
    if settings.get("pause_mode") == "wait":
        assert not straddling(traffic)


def test_a_server_that_hangs_is_evicted_and_brought_up_to_date_before_it_serves(servers: list[Served]) -> None:
    steady, hanging = servers
    models = [a_model(steady.model, seed) for seed in range(3)]
    told: list[tuple[str, int | None]] = []
    with a_sender(servers, lambda server, version: told.append((server, version)), update_seconds=2) as sender:
        publish_to_all(sender, 0, models[0])
        os.killpg(hanging.child.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            report = sender.publish(1, parameters(models[1]))
            took = time.monotonic() - started
            unhindered = sender.publish(2, parameters(models[2]))
        finally:
            os.killpg(hanging.child.pid, signal.SIGCONT)
        wait_for("the server to be back", lambda: sender.versions()[hanging.endpoint] == 2, WAIT_SECONDS)
        assert distance(models[2], PROBE, probe(hanging, 2)) < CLOSE
    assert took < 2 + 5
    assert list(report.servers) == [steady.endpoint]
    assert "no answer in time" in report.failures[hanging.endpoint]
    assert unhindered.seconds < 1.5
    assert unhindered.failures == {}
    assert [version for server, version in told if server == hanging.endpoint] == [0, None, 2]


@pytest.mark.parametrize("point", ["sending", "paused"])
def test_a_trainer_killed_in_the_middle_of_an_update_leaves_a_server_that_the_next_one_can_use(
    servers: list[Served], tmp_path: Path, point: str
) -> None:
    server = servers[0]
    before, after = (a_model(server.model, seed) for seed in (5, 6))
    with a_sender([server]) as sender:
        publish_to_all(sender, 0, before)
    command = [sys.executable, "-m", "tests.support.ranks.half_trainer", point, server.endpoint, str(server.model)]
    killed = Child(command, tmp_path / "log", os.environ | {"PYTHONPATH": str(ROOT)}, forks.request())
    try:
        wait_for("the trainer to be killed", lambda: killed.poll() is not None, WAIT_SECONDS)
    finally:
        assert killed.kill() == -signal.SIGKILL, "\n".join(tail(killed.log))
    address, _, port = server.endpoint.rpartition(":")
    assert is_healthy(address, int(port), SECRET)
    if point == "sending":
        assert distance(before, PROBE, probe(server, 0)) < CLOSE
    with a_sender([server]) as sender:
        publish_to_all(sender, 7, after)
        assert distance(after, PROBE, probe(server, 7)) < CLOSE


def test_a_server_without_weights_is_not_believed(servers: list[Served]) -> None:
    """A server that restarted has made-up weights of version `default`; one that was not told has older ones."""

    async def ask() -> bool:
        async with client_of(servers) as client:
            client.update(servers[0].endpoint, 9)
            request = asyncio.create_task(sample(client))
            async with asyncio.timeout(WAIT_SECONDS):
                while not (request.done() or client.retries["stale weights"]):
                    await asyncio.sleep(0.01)
            believed = request.done()
            request.cancel()
            await asyncio.wait([request])
            return believed

    with a_sender(servers) as sender:
        publish_to_all(sender, 8, a_model(servers[0].model, 1))
        assert not asyncio.run(ask())


def test_a_server_that_lost_its_weights_gets_them_again_between_two_updates(servers: list[Served]) -> None:
    """What a restarted server looks like: alive, and without a version."""
    server, model = servers[0], a_model(servers[0].model, 1)
    told: list[int | None] = []
    with a_sender([server], lambda _, version: told.append(version)) as sender:
        publish_to_all(sender, 3, model)
        with ServerAdminClient(server.endpoint, SECRET) as control:
            control.post("/collective_rpc", Deadline("an answer", 10), method="leave_weights")
        wait_for("the server to be back", lambda: told == [3, None, 3], 30, missing=lambda: str(told))
        assert distance(model, PROBE, probe(server, 3)) < CLOSE


def test_both_sides_leave_their_group_at_the_end(servers: list[Served]) -> None:
    with a_sender(servers) as sender:
        publish_to_all(sender, 0, a_model(servers[0].model, 1))
        assert sender.close() == []
    with ServerAdminClient(servers[0].endpoint, SECRET) as control:
        for method, answer in (("begin_update", True), ("weights_failure", NOT_MET)):
            told = control.post("/collective_rpc", Deadline("an answer", 10), method=method)
            assert told == {"results": [[answer]]}


def test_a_stranger_can_neither_ask_nor_change_a_server(servers: list[Served]) -> None:
    endpoint = servers[0].endpoint
    for route in ("/inference/v1/generate", "/pause?mode=abort", "/update_weights", "/init_weight_transfer_engine"):
        assert status_of(endpoint, route, "guess") == 401
    with (
        ServerAdminClient(endpoint, "guess") as control,
        pytest.raises(WeightSyncError, match="does not know"),
    ):
        control.post("/pause", Deadline("refusal", 10))
    command_line = Path(f"/proc/{servers[0].child.pid}/cmdline").read_bytes()
    assert SECRET.encode() not in command_line


def test_who_has_the_key_can_have_no_file_written(servers: list[Served], tmp_path: Path) -> None:
    asked = {"method": "save_sharded_state", "args": [str(tmp_path), "written"]}
    assert status_of(servers[0].endpoint, "/collective_rpc", SECRET, asked) == 403
    assert status_of(servers[0].endpoint, "/server_info", SECRET) == 403
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_can_never_work_says_why(servers: list[Served]) -> None:
    from pipeline.errors import RolloutError

    async def ask() -> None:
        async with client_of(servers, vocabulary=17) as client:
            client.update(servers[0].endpoint, 0)
            with pytest.raises(RolloutError, match="maximum"):
                await sample(client, prompt=[1] * 300)
            with pytest.raises(RolloutError, match="token id 17 is outside"):
                await sample(client, prompt=[1, 17])

    with a_sender(servers) as sender:
        publish_to_all(sender, 0, a_model(servers[0].model, 1))
        asyncio.run(ask())


def test_requests_that_are_cut_off_go_on_and_their_logprobs_are_the_models(servers: list[Served]) -> None:
    """A tenth of a second is too short for the whole sample, and a piece of it is asked for at a time besides. Where
    the cores are busy, a server may hear that it should stop only when it is done; then it is asked again."""

    async def ask() -> tuple[list[Completion], int]:
        async with InferenceClient([servers[0].endpoint], SECRET, 0.1, max_tokens_per_request=200) as client:
            client.update(servers[0].endpoint, 0)
            while "aborted" not in client.retries:
                made = await client.generate(PROBE, n=4, temperature=1.0, max_tokens=240, stop_token_ids=[])
            assert client.retries.keys() == {"aborted"}
            return made, client.retries["aborted"]

    model = a_model(servers[0].model, 1)
    with a_sender(servers) as sender:
        publish_to_all(sender, 0, model)
        completions, aborted = asyncio.run(asyncio.wait_for(ask(), WAIT_SECONDS))
    assert aborted >= 1
    assert {(len(completion.tokens), completion.finish) for completion in completions} == {(240, "length")}
    assert all(distance(model, PROBE, completion) < CLOSE for completion in completions)


def test_requests_that_are_given_up_end_on_their_server(servers: list[Served]) -> None:
    endpoint, whole = servers[0].endpoint, 64 * 240

    def made() -> float:
        """Tokens that the server has sampled."""
        with urlopen(f"http://{endpoint}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    async def give_up() -> float:
        """Tokens sampled for requests that are given up once the server has begun; the client lives on, as in a run."""
        before = made()
        async with client_of(servers[:1]) as client:
            client.update(endpoint, 0)
            asked = [asyncio.create_task(sample(client, tokens=240)) for _ in range(64)]
            while await asyncio.to_thread(made) == before:
                await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await asyncio.to_thread(probe, servers[0], 0)
            given_up = made() - before - 24
            await asyncio.to_thread(probe, servers[0], 0)
            assert made() - before - 2 * 24 == given_up, "what was given up went on"
            return given_up

    async def give_up_in_time() -> None:
        """Where the cores are busy, a server may hear of it only when all is done; then it is asked again."""
        while await give_up() == whole:
            pass

    with a_sender(servers) as sender:
        publish_to_all(sender, 0, a_model(servers[0].model, 1))
        asyncio.run(asyncio.wait_for(give_up_in_time(), WAIT_SECONDS))


def test_a_sample_ends_at_a_stop_token_which_it_keeps(servers: list[Served]) -> None:
    async def ask() -> list[Completion]:
        async with client_of(servers) as client:
            client.update(servers[0].endpoint, 0)
            return await client.generate(PROBE, n=16, temperature=1.0, max_tokens=100, stop_token_ids=[EOS])

    with a_sender(servers) as sender:
        publish_to_all(sender, 0, a_model(servers[0].model, 1))
        stopped = [completion for completion in asyncio.run(ask()) if completion.finish == "stop"]
    assert stopped
    assert all(completion.tokens.index(EOS) == len(completion.tokens) - 1 for completion in stopped)


def test_servers_that_differ_in_their_way_for_log_probabilities_answer_alike(servers: list[Served]) -> None:
    with a_sender(servers) as sender:
        publish_to_all(sender, 1, a_model(servers[0].model, 1))
        found, wanted = [answers_of(server) for server in servers]
    assert [len(answer["choices"]) for answer in wanted] == [1, 3, 1, 1, 1, 1, 1, 1, 1]
    assert len(wanted[0]["choices"][0]["logprobs"]["content"]) == 40
    assert all(ours is None for ours, _ in versions_told(wanted))
    told = [(ours, theirs) for ours, theirs in versions_told(found) if ours is not None]
    assert len(told) >= 4, "most answers take the cheaper way"
    assert all(ours == theirs for ours, theirs in told)
    assert found == wanted


def test_a_request_has_the_times_that_the_metrics_of_its_server_have(servers: list[Served]) -> None:
    """Each sample's own, also where samples share a request. Both servers: their way for log-probabilities differs."""
    names = ("queue", "prefill", "decode")

    def totals(endpoint: str) -> list[float]:
        """The sums of all requests so far, and their number."""
        with urlopen(f"http://{endpoint}/metrics") as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("vllm:request_")]
        wanted = [*(f"{name}_time_seconds_sum" for name in names), "decode_time_seconds_count"]
        return [sum(float(line.split()[-1]) for line in lines if f"request_{name}" in line) for name in wanted]

    async def ask(server: Served) -> list[Completion]:
        async with client_of([server]) as client:
            client.update(server.endpoint, 0)
            sampling = {"temperature": 1.0, "stop_token_ids": []}
            alone = await client.generate(PROBE, n=1, max_tokens=1, **sampling)
            return [*alone, *await client.generate(PROBE, n=3, max_tokens=40, **sampling)]

    def check(server: Served) -> None:
        before = totals(server.endpoint)
        completions = asyncio.run(asyncio.wait_for(ask(server), WAIT_SECONDS))
        # The server counts a request a moment after its response.
        wait_for("the server's metrics", lambda: totals(server.endpoint)[-1] >= before[-1] + 4, WAIT_SECONDS)
        *sums, count = (now - then for now, then in zip(totals(server.endpoint), before, strict=True))
        times = [completion.engine_seconds for completion in completions if completion.engine_seconds]
        assert count == len(times) == 4
        assert [sum(getattr(one, name) for one in times) for name in names] == pytest.approx(sums, abs=1e-6)
        assert times[0].decode == 0.0, "its first token is its last"
        assert all(sum(one) <= completion.seconds for one, completion in zip(times, completions, strict=True))

    with a_sender(servers) as sender:
        publish_to_all(sender, 0, a_model(servers[0].model, 1))
        for server in servers:
            check(server)


def test_no_update_warns_of_weights_that_no_checkpoint_has(servers: list[Served]) -> None:
    """Users read the log of a server; vLLM's warning would come at every step."""
    for server in servers:
        assert "Failed to load weights" not in server.child.log.read_text()


def test_servers_end_well_when_asked(servers: list[Served]) -> None:
    """The last test, since they serve all others."""
    for server in servers:
        leader = psutil.Process(server.child.pid)
        processes = {leader, *leader.children(recursive=True)}
        assert server.child.stop(STOP_SECONDS) == 0, "\n".join(tail(server.child.log))
        wait_for("its processes to be gone", lambda each=processes: not any(map(runs, each)), WAIT_SECONDS)
