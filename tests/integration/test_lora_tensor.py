"""Adapters in a tensor-parallel server: each of its processes has its part of the version that tokens are labelled
with."""

from collections.abc import Iterator

import pytest

from tests.integration.test_lora import LORA, an_adapted
from tests.support.servers.traffic import APART, CLOSE, PROBE, check_purity, probe, run_traffic, straddling
from tests.support.servers.vllm import (
    Served,
    a_model,
    a_sender,
    distance,
    model_directory,
    parameters,
    publish_to_all,
    starting_of,
    tensor_arguments,
    tiny_config,
)

pytestmark = [pytest.mark.integration, pytest.mark.trial]  # two processes take over 40 s to start

TENSOR = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two processes on CPUs; it takes twice as long to start as one of one."""
    directory = model_directory(tmp_path_factory.mktemp("tensor") / "base", tied=True)
    a_model(directory, 1).save_pretrained(directory)  # type: ignore[operator]
    config = tiny_config(directory, LORA, extra_args=tensor_arguments(TENSOR))
    with starting_of(config, "127.0.0.14") as ready:
        yield ready()


def test_every_update_of_an_adapter_reaches_every_process_and_no_token_is_torn_or_mislabelled(server: Served) -> None:
    """One test, since the server takes most of its time. With a process that kept the adapter before, or was later than
    the other one, log-probabilities would be those of neither."""
    first, second = (an_adapted(server.model, seed) for seed in (1, 2))
    with a_sender([server], lora=LORA) as sender:
        for version, (new, old) in enumerate([(first, second), (second, first), (first, second)]):
            publish_to_all(sender, version, new)
            completion = probe(server, version)
            assert (completion.version_min, completion.version_max) == (version, version)
            assert distance(new, PROBE, completion) < CLOSE
            assert distance(old, PROBE, completion) > APART
        report = sender.publish(3, parameters(second))
        assert {*report.phases[server.endpoint]} == {"send", "update"}, "the server was paused"
    traffic, models = run_traffic([server], first, second, lora=LORA)
    check_purity(traffic, models)
    assert straddling(traffic), "no request was in flight during an update"
    assert traffic.retries == 0
