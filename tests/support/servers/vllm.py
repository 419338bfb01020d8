"""Real vLLM servers of a tiny model, started once for all tests, and the model that says what they must answer.

    def test_something(servers: list[Served]) -> None: ...

Starting one takes 15 s and more on a busy machine, so tests share them and leave them running, resumed and unharmed. A
test that needs to kill one takes `a_server`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pipeline.config import InferenceConfig, LoraConfig, RunConfig
from pipeline.inference.vllm.compact_logprobs import SWITCH
from pipeline.inference.vllm.installed_release import check_installed
from pipeline.inference.vllm.server_command import adapter_environment, server_environment
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.roles import inference
from pipeline.rollout.server_client import Completion
from pipeline.topology.plan import Placement, World
from pipeline.train.model.lora import checkpoint_tensors, is_trained
from pipeline.utils import shared_files, subprocesses
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support import forks

WORLD = World(run_id="tests", attempt="7-0", epoch=1, leader=0, secret="the-secret-of-the-tests", placements=())
SECRET = WORLD.password
TRAINER = "127.0.0.2"
START_SECONDS = 400
ROOT = Path(__file__).resolve().parents[3]
_AT_A_TIME = 64
"""Completions that a model computes together."""
FORKS = {"ROLLCALL_TESTS_FORK_WORKERS": "1"}
"""For a server whose engine has processes; see `tests.support.preloaded.vllm_processes`."""
HELD_PORT = "pipeline.roles.held_port"
UNTOLD = "tests.support.servers.untold"
"""What has a server take its vLLM for a release that says no versions."""
TINY = Path(__file__).parents[3] / "conf" / "models" / "tiny_qwen3"
EOS = 2

Model = torch.nn.Module


@dataclass
class Served:
    """A running server; `child` is its process group."""

    endpoint: str
    model: Path
    child: subprocesses.Child


def tiny_config(model: Path, lora: LoraConfig | None = None, **inference: Any) -> RunConfig:
    """The config of a server of the tiny model; `inference` are keys of that section."""
    adapters = lora.model_dump() if lora else {}
    model_keys = {"path": str(model), "init": "random", "max_length": 256, "lora": adapters}
    return make_config(model=model_keys, inference=inference)


def replaying_config(model: Path) -> RunConfig:
    """The config of a server of a mixture that returns the experts of each token."""
    training = {"steps": 1, "prompts_per_step": 1, "routing_replay": "rollout"}
    return make_config(model={"path": str(model), "init": "random", "max_length": 256}, training=training)


def tensor_arguments(processes: int) -> tuple[str, ...]:
    """What has a server on CPUs be of so many processes, each with its part of every layer; `resources.inference.gpus`
    says it on GPUs."""
    return ("--tensor-parallel-size", str(processes), "--distributed-executor-backend", "mp")


def model_directory(folder: Path, *, tied: bool) -> Path:
    """The demo's tiny model, with or without a tied head; it ends at no token by itself, so samples are long."""
    folder.mkdir(parents=True)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied, "eos_token_id": None}))
    return folder


def mixture_directory(folder: Path) -> Path:
    """A tied model with experts in all layers but the first, of a size that the kernel on CPUs pads (24, to 32)."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    others = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": [0]}
    file = model_directory(folder, tied=True) / "config.json"
    (folder / "tokenizer.json").write_text("{}")
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes | others))
    return folder


def world_file(folder: Path) -> Path:
    """The world from which servers learn that their password is `SECRET`."""
    path = folder / "world.json"
    shared_files.write_document(path, WORLD)
    return path


@contextmanager
def starting(
    model: Path, address: str, lora: LoraConfig | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Callable[[], Served]]:
    """Start a server, with `variables` besides its environment; the value waits until it is ready, so that several can
    start at once."""
    with starting_of(tiny_config(model, lora), address, variables) as ready:
        yield ready


@contextmanager
def starting_of(
    config: RunConfig,
    address: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    gpus: tuple[int, ...] = (),
    index: int = 0,
    module: str = HELD_PORT,
) -> Iterator[Callable[[], Served]]:
    """As `starting`, the server of any config with this index, on these GPUs; `module` is run in the place of
    `pipeline.roles.held_port`."""
    check_installed()
    model = Path(config.model.path)
    with subprocesses.hold_port() as holder, TemporaryDirectory(prefix="vllm-") as sockets:
        place = Placement(role="inference", index=index, rank=0, address=address, ports=(port_of(holder),), gpus=gpus)
        environment = dict(os.environ) | server_environment(config, place, world_file(model.parent))
        environment |= adapter_environment(config, model.parent / f"adapters-{place.ports[0]}")
        environment |= {"VLLM_RPC_BASE_PATH": sockets, **variables}  # vLLM leaves its sockets behind
        log = model.parent / f"{model.name}-{place.ports[0]}.log"
        command = [module if part == HELD_PORT else part for part in inference.server_command(config, place)]
        child = subprocesses.Child(command, log, environment, forks.request())

        def ready() -> Served:
            def healthy() -> bool:
                assert child.poll() is None, subprocesses.tail(log)
                return inference.is_healthy(address, place.ports[0], SECRET)

            wait_for("a server", healthy, START_SECONDS, missing=lambda: "\n".join(subprocesses.tail(log)))
            return Served(place.endpoint, model, child)

        try:
            yield ready
        finally:
            child.stop(6)


@contextmanager
def a_server(model: Path, address: str, lora: LoraConfig | None = None) -> Iterator[Served]:
    """A server of the test's own; with `lora`, of adapters on the weights that the model's directory then holds."""
    with starting(model, address, lora) as ready:
        yield ready()


@contextmanager
def two_servers(folder: Path) -> Iterator[list[Served]]:
    """Two servers of the same model with a head of its own.

    The first one has its engine in another process, as on GPUs, so that its log-probabilities are encoded, and encoded
    in our cheaper way, with the version of each token (`logprobs.weight_versions`). The second has them in vLLM's own.
    """
    model = model_directory(folder / "untied", tied=False)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quick = {SWITCH: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": path} | FORKS
    stock = {SWITCH: "0"}
    with ExitStack() as started:
        ready = [
            started.enter_context(starting_of(tiny_config(model), address, variables, module=module))
            for address, variables, module in (("127.0.0.3", quick, UNTOLD), ("127.0.0.4", stock, HELD_PORT))
        ]
        yield [wait() for wait in ready]


@contextmanager
def a_sender(
    servers: Sequence[Served],
    on_change: Callable[[str, int | None], None] = lambda server, version: None,
    lora: LoraConfig | None = None,
    patience: float = 60,
    **settings: Any,
) -> Iterator[WeightSender]:
    """A trainer's sender to these servers; `settings` are of `inference.*`."""
    config = InferenceConfig.model_validate({"update_seconds": 60, **settings})
    endpoints = [server.endpoint for server in servers]
    with subprocesses.hold_port() as holder:
        meeting = MeetingPoint(TRAINER, port_of(holder), SECRET)
        with WeightSender(endpoints, meeting, config, patience, on_change, lora) as sender:
            yield sender


def publish_to_all(sender: WeightSender, version: int, model: Model) -> None:
    """Publish, and wait for the servers that join in the background too."""
    sender.publish(version, parameters(model))
    wait_for("all servers", lambda: set(sender.versions().values()) == {version}, WAIT_SECONDS)


def port_of(holder: socket) -> int:
    port: int = holder.getsockname()[1]
    return port


def a_model(directory: Path, seed: int) -> Model:
    """The model with random float32 weights that differ from those of another seed far more than rounding does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def parameters(model: Model) -> list[tuple[str, Tensor]]:
    """What a trainer sends: every parameter once, a tied head through the embedding, by its name in a checkpoint; of
    adapters, these alone."""
    adapters: list[tuple[str, Tensor]] = [
        each
        for name, tensor in model.named_parameters()
        if is_trained(name)
        for each in checkpoint_tensors(model, name, tensor)
    ]
    if adapters:
        return adapters
    public: dict[str, Tensor] = revert_weight_conversion(model, dict(model.named_parameters()))
    return list(public.items())


@torch.no_grad()
def expected_of_all(model: Model, prompt: Sequence[int], completions: Sequence[Completion]) -> list[Tensor]:
    """float32[tokens] of each: the model's own log-probabilities of what was sampled at temperature 1, in as many
    tokens by all."""
    found: list[Tensor] = []
    for start in range(0, len(completions), _AT_A_TIME):
        ids = torch.tensor([[*prompt, *one.tokens] for one in completions[start : start + _AT_A_TIME]])
        logits = model(ids).logits[:, len(prompt) - 1 : -1].float()
        found += logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None])[..., 0]
    return found


def expected_logprobs(model: Model, prompt: Sequence[int], completion: Completion) -> Tensor:
    """`expected_of_all` for one."""
    (expected,) = expected_of_all(model, prompt, [completion])
    return expected


def distance(model: Model, prompt: Sequence[int], completion: Completion) -> float:
    """Largest difference between a server's log-probabilities and the model's."""
    return distance_to(expected_logprobs(model, prompt, completion), completion)


def distance_to(expected: Tensor, completion: Completion) -> float:
    """Largest difference between a server's log-probabilities and these."""
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


@torch.no_grad()
def straddles(
    older: Model,
    newer: Model,
    prompt: Sequence[int],
    completion: Completion,
    close: float,
    *,
    kept: bool,
    expected: tuple[Tensor, Tensor],
) -> bool:
    """Whether one update explains every log-probability: those before it are the older model's, those after it the
    newer one's, at least one each.

    `kept`: the newer model goes on with the keys and values that the older one computed. The last token before the
    update has none yet, as they come with the next one. `expected`: `expected_logprobs` of both models.
    """
    sampled, (before, whole) = torch.tensor(completion.logprobs), expected
    explained = int(((before - sampled).abs() < close).long().cumprod(0).sum())
    for first in range(min(explained, len(sampled) - 1), 0, -1):
        after = _continued(older, newer, prompt, completion, first) if kept else whole[first:]
        if (after - sampled[first:]).abs().max() < close:
            return True
    return False


def _continued(older: Model, newer: Model, prompt: Sequence[int], completion: Completion, first: int) -> Tensor:
    """float32[tokens - first]: log-probabilities from token `first` on, the newer model after the older one's cache."""
    ids = torch.tensor([[*prompt, *completion.tokens]])
    done = len(prompt) + first - 1
    cache = older(ids[:, :done], use_cache=True).past_key_values
    logits = newer(ids[:, done:-1], past_key_values=cache, use_cache=True).logits[0].float()
    sampled: Tensor = logits.log_softmax(-1).gather(-1, ids[0, done + 1 :, None])[:, 0]
    return sampled


def two_models(directory: Path) -> tuple[Model, Model]:
    return a_model(directory, 3), a_model(directory, 4)
