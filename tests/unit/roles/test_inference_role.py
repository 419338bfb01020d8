"""How the agent starts a vLLM server."""

import os
import socket
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.config.tinker_keys import ATTENTION_LAYERS, MLP_LAYERS
from pipeline.errors import ConfigError, ImpostorError
from pipeline.inference.engine_protocol import POLICY
from pipeline.inference.vllm import installed_release
from pipeline.inference.vllm.compact_logprobs import SWITCH
from pipeline.inference.vllm.kv_cache_size import SHARED
from pipeline.inference.vllm.routing_capture import SWITCH as ROUTED_EXPERTS
from pipeline.inference.vllm.server_command import adapter_environment, server_environment
from pipeline.roles import inference
from pipeline.topology.plan import Placement
from pipeline.utils.network_interfaces import KEEPALIVE_SECONDS
from tests.fakes.configs import make_config
from tests.fakes.http_server import PASSWORD, HttpServer, Request

WORLD = Path("/runs/demo/rendezvous/demo-1/7-0/world.json")


def place(**values: Any) -> Placement:
    return Placement(**{"role": "inference", "index": 2, "rank": 1, "address": "127.0.0.4", "ports": (4321,), **values})


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def config(**sections: object) -> RunConfig:
    return make_config(model={"path": "/models/tiny", "max_length": 99}, seed=5, **sections)


def test_a_server_listens_where_it_was_placed_and_serves_the_configured_model() -> None:
    command = inference.server_command(config(), place())
    assert command[:3] == (sys.executable, "-P", "-m")
    assert (option(command, "--host"), option(command, "--port")) == ("127.0.0.4", "4321")
    assert (option(command, "--model"), option(command, "--max-model-len")) == ("/models/tiny", "99")
    assert option(command, "--seed") == "7"


def test_a_server_gets_the_path_of_its_secret_and_asks_for_no_key_of_the_users() -> None:
    environment = server_environment(config(), place(), WORLD)
    assert environment["ROLLCALL_WORLD"] == str(WORLD)
    assert environment["VLLM_API_KEY"] == ""
    assert "pipeline.inference.vllm.auth_middleware.AuthMiddleware" in inference.server_command(config(), place())


@pytest.mark.parametrize("fast", [True, False])
def test_the_way_of_log_probabilities_is_as_configured(fast: bool) -> None:
    chosen = config(inference={"compact_logprobs": fast})
    assert server_environment(chosen, place(), WORLD)[SWITCH] == str(int(fast))


def test_a_server_starts_without_weights_of_its_own() -> None:
    assert option(inference.server_command(config(), place()), "--load-format") == "dummy"


def test_what_requests_ask_for_is_the_served_model_or_the_adapter_on_it() -> None:
    assert option(inference.server_command(config(), place()), "--served-model-name") == POLICY
    assert option(inference.server_command(adapted(4), place()), "--served-model-name") != POLICY


def adapted(rank: int) -> RunConfig:
    return make_config(model={"path": "/models/tiny", "lora": {"rank": rank, "targets": ["q_proj", "o_proj"]}})


def test_a_server_of_merged_adapters_is_one_of_whole_weights(tmp_path: Path) -> None:
    merged = make_config(model={"path": "/models/tiny", "lora": {"rank": 4, "merge": True}})
    whole = make_config(model={"path": "/models/tiny"})
    assert inference.server_command(merged, place()) == inference.server_command(whole, place())
    assert adapter_environment(merged, tmp_path) == {}


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (9, 16), (500, 512)])
def test_a_server_of_adapters_has_its_base_from_disk_and_room_for_one_adapter(rank: int, room: int) -> None:
    command = inference.server_command(adapted(rank), place())
    assert "--load-format" not in command
    assert (option(command, "--max-loras"), option(command, "--max-lora-rank")) == ("1", str(room))
    targets = command.index("--lora-target-modules")
    assert command[targets + 1 : targets + 3] == ("q_proj", "o_proj")
    assert command[targets + 3].startswith("--")


def test_a_rank_that_vllm_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=513: expected at most 512"):
        inference.server_command(adapted(513), place())


def test_only_a_server_of_adapters_gets_a_folder_for_them(tmp_path: Path) -> None:
    assert adapter_environment(config(), tmp_path / "none") == {}
    given = adapter_environment(adapted(4), tmp_path / "some" / "inference.0")
    assert str(tmp_path / "some" / "inference.0") in given.values()
    assert [folder.name for folder in tmp_path.iterdir()] == ["some"]
    assert (tmp_path / "some" / "inference.0").is_dir()


def test_a_server_keeps_a_connection_for_longer_than_its_clients() -> None:
    environment = server_environment(config(), place(), WORLD)
    assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > KEEPALIVE_SECONDS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_sees_the_gpus_it_was_given_and_no_others(device: str) -> None:
    environment = server_environment(config(resources={"device": device}), place(gpus=(2, 3)), WORLD)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("resources", "shared"),
    [({}, "0"), ({"colocate": True, "gpus_per_node": 1}, "1"), ({"inference": {"gpus": 1, "servers_per_gpu": 2}}, "1")],
)
def test_a_server_knows_whether_it_has_neighbours(resources: dict[str, Any], shared: str) -> None:
    given = config(resources={"device": "cuda"} | resources)
    assert server_environment(given, place(gpus=(0,)), WORLD)[SHARED] == shared


def test_a_server_that_computes_on_gpus_spreads_the_model_over_them() -> None:
    command = inference.server_command(config(resources={"device": "cuda"}), place(gpus=(2, 3)))
    assert option(command, "--tensor-parallel-size") == "2"
    assert "--kv-cache-memory-bytes" not in command


@pytest.mark.parametrize(
    ("sections", "processes"),
    [({}, "4"), ({"model": {"path": "/models/tiny", "lora": {"rank": 4}}}, "1"), ({"serve": {"enabled": True}}, "1")],
)
def test_only_a_server_that_loads_no_adapters_answers_from_several_processes(sections: Any, processes: str) -> None:
    given = make_config(**{"resources": {"device": "cuda"}, "model": {"path": "/models/tiny"}, **sections})
    assert option(inference.server_command(given, place(gpus=(0,))), "--api-server-count") == processes


def test_a_server_that_is_not_compiled_keeps_graphs_for_decoding_and_needs_no_check() -> None:
    given = config(inference={"compile": False}, resources={"device": "cuda"})
    command = inference.server_command(given, place(gpus=(0,)))
    added = set(command) - set(inference.server_command(config(resources={"device": "cuda"}), place(gpus=(0,))))
    assert added == {"--compilation-config.mode=0", "--compilation-config.cudagraph_mode=FULL_DECODE_ONLY"}
    assert not given.inference.extra_args


@pytest.mark.parametrize(
    ("release", "told"),
    [("0.25.1", False), ("0.25.2.dev3+g1a2b", False), ("0.1.dev1+g1a2b", True), ("0.30.0", True), ("0.32.0+cpu", True)],
)
def test_a_server_of_the_api_is_told_to_answer_tokens_where_its_release_has_to_be(
    monkeypatch: pytest.MonkeyPatch, release: str, told: bool
) -> None:
    monkeypatch.setattr(installed_release, "version", lambda name: release)
    command = inference.server_command(config(serve={"enabled": True}), place())
    assert ("--enable-scale-out" in command) is told


def test_a_server_on_a_cpu_takes_the_memory_and_threads_it_was_given() -> None:
    resources = {"inference": {"threads": 3}}
    given = config(resources=resources, inference={"kv_cache_bytes": 1 << 20})
    assert option(inference.server_command(given, place()), "--kv-cache-memory-bytes") == str(1 << 20)
    environment = server_environment(given, place(), WORLD)
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "3"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_head_is_float32_whatever_the_model_is(dtype: str) -> None:
    half = make_config(model={"path": "/models/tiny", "dtype": dtype})
    assert option(inference.server_command(half, place()), "--dtype") == dtype
    assert "head_dtype" in option(inference.server_command(half, place()), "--hf-overrides")
    assert "--hf-overrides" not in inference.server_command(config(), place())


def test_the_users_arguments_come_last_and_so_win() -> None:
    given = config(inference={"extra_args": ["--max-num-seqs", "3"]})
    assert inference.server_command(given, place())[-2:] == ("--max-num-seqs", "3")


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_release.check_installed()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"rollcall install installs it"):
        installed_release.check_installed()


STALE = [EntryPoint("rollcall", "pipeline.vllm.plugin:register", "vllm.general_plugins")]


CURRENT = [EntryPoint("rollcall", "pipeline.inference.vllm.plugin:register", "vllm.general_plugins")]


def test_two_installations_with_the_code_s_entry_point_are_as_good_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_release, "entry_points", lambda **_: [*CURRENT, *CURRENT])
    installed_release.check_plugin()


@pytest.mark.parametrize("installed", [STALE, [], [*CURRENT, *STALE]], ids=["stale", "absent", "one of two stale"])
def test_an_installation_whose_entry_point_is_not_the_codes_is_refused_with_the_command_that_renews_it(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_release, "entry_points", lambda **_: installed)
    context = SimpleNamespace(config=config(), placement=place())
    for start in (installed_release.check_installed, lambda: inference.launch(context)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"plugin:register; reinstall: \S+ -m pip install -e \.$") as refused:
            start()
        assert "\n" not in str(refused.value)


def test_the_entry_point_that_is_installed_and_the_one_in_pyproject_are_the_plugins() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"rollcall": "pipeline.inference.vllm.plugin:register"}
    installed_release.check_plugin()


class Starting(HttpServer):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__()

    def respond(self, request: Request) -> tuple[int, bytes]:
        return self.status if request.route == "/health" else 404, b""


@pytest.mark.parametrize("status", [200, 503])
def test_a_server_is_ready_once_it_says_so(status: int) -> None:
    with Starting(status) as server:
        address, _, port = server.endpoint.partition(":")
        assert inference.is_healthy(address, int(port), PASSWORD) is (status == 200)


@contextmanager
def somebody_else(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Whoever listens in a server's place: its port, and what it hears on one connection, whose end is `b""`."""
    heard: list[bytes] = []

    def respond(listener: socket.socket) -> None:
        with listener.accept()[0] as link:
            heard.append(link.recv(4096))
            if answer:
                link.sendall(answer)
                heard.append(link.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=respond, args=(listener,))
        thread.start()
        yield listener.getsockname()[1], heard
        thread.join()


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b""])
def test_nonsense_is_not_ready(answer: bytes) -> None:
    with somebody_else(answer) as (port, _):
        assert not inference.is_healthy("127.0.0.1", port, PASSWORD)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
def test_another_program_at_the_port_is_told_with_its_owner_and_hears_no_password(status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nOK".encode()
    told = rf"it answered status {status}; on this machine, uid {os.getuid()} .* pid {os.getpid()} "
    with somebody_else(answer) as (port, heard), pytest.raises(ImpostorError, match=told):
        inference.is_healthy("127.0.0.1", port, PASSWORD)
    assert heard[0].startswith(b"GET /rollcall/proof?nonce=")
    assert PASSWORD.encode() not in heard[0]
    assert heard[1:] == [b""]


def test_nobody_at_the_port_is_not_ready() -> None:
    assert not inference.is_healthy("127.0.0.9", 9, PASSWORD)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_for_clients_wraps_no_layer_that_they_cannot_train(device: str) -> None:
    gpus = (0,) if device == "cuda" else ()
    serving = config(serve={"enabled": True, "sampling": True}, resources={"device": device})
    command = inference.server_command(serving, place(gpus=gpus))
    first = command.index("--lora-target-modules") + 1
    assert command[first : first + 7] == (*ATTENTION_LAYERS, *MLP_LAYERS)


def test_the_first_servers_for_clients_are_for_whole_models_and_wrap_no_layer() -> None:
    sections = {"enabled": True, "sampling": True, "whole_models": True, "whole_servers": 1}
    serving = config(serve=sections, resources={"inference": {"servers": 2}})
    first, second = (inference.server_command(serving, place(index=index)) for index in (0, 1))
    assert "--enable-lora" not in first
    assert "--enable-lora" in second
    assert option(first, "--served-model-name") == option(second, "--served-model-name") == "base"


def test_servers_return_experts_where_they_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: dict[str, Any] = {"training": {"steps": 1, "prompts_per_step": 1, "routing_replay": "rollout"}}
    on_gpus: dict[str, Any] = {"resources": {"device": "cuda", "inference": {"gpus": 1}, "trainer": {"gpus": 1}}}
    flag, plain = "--enable-return-routed-experts", inference.server_command(config(), place())
    assert flag in inference.server_command(config(**replayed, **on_gpus), place(gpus=(0,)))
    assert flag not in (*plain, *inference.server_command(config(**on_gpus), place(gpus=(0,))))

    cached = "--no-enable-prefix-caching"
    assert {cached} == set(inference.server_command(config(**replayed), place())) - set(plain)
    for each, switch in ((config(), "0"), (config(**replayed), "1")):
        assert server_environment(each, place(), WORLD)[ROUTED_EXPERTS] == switch

    monkeypatch.setattr(installed_release, "version", lambda name: "0.21.3")
    installed_release.check_returned_experts(config())
    with pytest.raises(ConfigError, match=r"vLLM 0.21.3, whose servers cannot return the experts"):
        installed_release.check_returned_experts(config(**replayed))
