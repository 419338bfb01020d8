"""Three real vLLM servers that forward weights: one send of the trainer, equal weights, and a killed relay."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from torch import Tensor

from pipeline.inference.weight_sync.transports.gloo import TransferGroup, WeightLayout
from pipeline.utils.waiting import Deadline, wait_for
from tests.patience import WAIT_SECONDS
from tests.support.servers.traffic import APART, CLOSE, PROBE, probe
from tests.support.servers.vllm import (
    a_model,
    a_sender,
    distance,
    model_directory,
    parameters,
    publish_to_all,
    starting,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.trial]


def test_three_servers_have_the_trainers_weights_after_one_send_and_lose_no_update_with_a_killed_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_directory(tmp_path / "model", tied=False)
    first, second = (a_model(directory, seed) for seed in (1, 2))
    size = WeightLayout.of(parameters(first)).bytes
    sent = list[int]()
    doomed = list[str]()
    stock = TransferGroup.send
    with ExitStack() as stack:
        addresses = [f"127.0.0.{last}" for last in (3, 4, 5)]
        starts = [stack.enter_context(starting(directory, address)) for address in addresses]
        servers = {server.endpoint: server for server in (ready() for ready in starts)}

        def send(group: TransferGroup, version: int, buffer: Tensor, deadline: Deadline) -> None:
            if doomed:  # it has begun to receive
                servers[doomed.pop()].child.kill()
            stock(group, version, buffer, deadline)
            sent.append(len(buffer))

        monkeypatch.setattr(TransferGroup, "send", send)
        sender = stack.enter_context(a_sender(list(servers.values()), relay_fanout=2))
        for version, (new, old) in enumerate([(first, second), (second, first), (first, second)]):
            before = sum(sent)
            publish_to_all(sender, version, new)
            assert sum(sent) - before == size, "one model, for three servers"
            for server in servers.values():
                completion = probe(server, version)
                assert distance(new, PROBE, completion) < CLOSE
                assert distance(old, PROBE, completion) > APART
        (root,) = (server for server in servers if sender._plan.source_of(server) is None)
        doomed.append(root)
        children = [server for server in servers if server != root]
        before = sum(sent)
        sender.start(3, parameters(second))
        wait_for("both", lambda: all(sender.versions()[child] == 3 for child in children), WAIT_SECONDS)
        assert sum(sent) - before == size, "one model to the substitute"
        for child in children:
            assert distance(second, PROBE, probe(servers[child], 3)) < CLOSE
