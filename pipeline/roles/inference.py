"""The inference role: one vLLM server.

Owns the server's command line, its environment, and its readiness check. Promises that the server listens only on its
placement's address, requires the world's password on every privileged route, and starts without the policy, unless the
run only evaluates: the trainer sends the policy before any request (`pipeline.inference.weight_sync`). The role's
process is vLLM.
"""

import importlib.util
import re
import sys
from http.client import HTTPConnection, HTTPException
from importlib.metadata import entry_points, version
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.tinker_keys import ATTENTION_LAYERS, MLP_LAYERS
from pipeline.errors import ConfigError
from pipeline.inference.vllm.compact_logprobs import SWITCH
from pipeline.inference.vllm.kv_cache_size import SHARED
from pipeline.inference.vllm.plugin import ENGINES, MODEL, register
from pipeline.inference.vllm.routing_capture import SWITCH as ROUTED_EXPERTS
from pipeline.inference.vllm.server_password import WORLD
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.tinker.entities import BASE
from pipeline.tinker.gateway_settings import MAX_ADAPTERS
from pipeline.tinker.server_pools import pool_of
from pipeline.tinker.tinker_records import Pool
from pipeline.topology.plan import Placement
from pipeline.utils.authenticated_http import connect
from pipeline.utils.network_interfaces import KEEPALIVE_SECONDS, bound_to

_PROBE_SECONDS = 5.0
_PLUGINS = "vllm.general_plugins"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's `MaxLoRARanks`."""


def find_vllm() -> None:
    """`ConfigError` unless vLLM is importable and will load Rollcall's plugin. Imports neither."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "resources.inference", "vllm", "vLLM in this Python", f"{sys.executable} launchers/install.py installs it"
        )
    check_plugin()


def check_returned_experts(config: RunConfig) -> None:
    """`ConfigError` for routing replay with a release of vLLM whose servers return no experts, or in another form."""
    if config.training.routing_replay != "none" and _is_older_than([0, 22]):
        expected = f"none with vLLM {version('vllm')}, whose servers cannot return the experts of each token"
        raise ConfigError("training.routing_replay", "rollout", expected, "remove it, or install vLLM 0.22 or newer")


def check_plugin() -> None:
    """`ConfigError` unless every vLLM of this Python will call `plugin.register`.

    An installation records its entry points once. If the module has moved since, vLLM skips the plugin that it cannot
    import, and fails later for lack of Rollcall's weight-transfer engines.
    """
    entry = f"{register.__module__}:{register.__name__}"
    installed = [plugin.value for plugin in entry_points(group=_PLUGINS, name="rollcall")]
    if installed != [entry]:
        hint = f"reinstall: {sys.executable} -m pip install -e ."
        raise ConfigError(f"entry point rollcall in {_PLUGINS}", ", ".join(installed), entry, hint)


def launch(context: RoleContext) -> RoleCommand:
    """The server's command; ready once the server answers, even without weights. `ConfigError` if it would start
    without Rollcall's plugin."""
    check_plugin()
    placement = context.placement
    return RoleCommand(
        argv=server_command(context.config, placement),
        env=server_environment(context.config, placement, context.paths.world)
        | adapter_environment(context.config, context.paths.adapters(placement.name))
        | bound_to(placement.address),
        ready=lambda: is_healthy(placement.address, placement.ports[0], context.world.password),
    )


def server_command(config: RunConfig, placement: Placement) -> tuple[str, ...]:
    """The argv of vLLM's server. `inference.extra_args` come last, so they take precedence."""
    device = _gpu_arguments(config, placement) if config.resources.device == "cuda" else _cpu_arguments(config)
    return (
        *_program(config, placement),
        *("--host", placement.address, "--port", str(placement.ports[0])),
        *("--middleware", "pipeline.inference.vllm.auth_middleware.AuthMiddleware"),
        *_weights_arguments(config),
        *_routing_arguments(config),
        *_head_arguments(config),
        *("--dtype", config.model.dtype, "--max-model-len", str(config.model.max_length)),
        *("--max-num-seqs", str(config.inference.max_sequences), "--seed", str(config.seed + placement.index)),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests", "--shutdown-timeout", "1"),
        *device,
        *config.inference.extra_args,
    )


def server_environment(config: RunConfig, placement: Placement, world: Path) -> dict[str, str]:
    """The server's variables in addition to the agent's environment. The server reads its password from the file
    `world`, because other users can read argv, and other processes of the same user the environment."""
    common = {
        WORLD: str(world),
        "VLLM_API_KEY": "",  # a user's own key would be required in addition
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": placement.address,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(2 * KEEPALIVE_SECONDS),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        SWITCH: str(int(config.inference.compact_logprobs and not config.serve.enabled)),
    }
    if placement.gpus:
        common["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, placement.gpus))
    if config.resources.device == "cuda":
        shared = config.resources.colocate or config.resources.inference.servers_per_gpu > 1
        return common | {SHARED: str(int(shared))}
    return common | {
        ROUTED_EXPERTS: str(int(config.training.routing_replay != "none")),
        # Compiling a few lines of the sampler would cost the first request seconds.
        "TORCH_COMPILE_DISABLE": "1",
        # Otherwise the `uni` executor would use an additional process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The default binding would pin every server of a node to the same first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.resources.inference.threads),
    }


def adapter_environment(config: RunConfig, folder: Path) -> dict[str, str]:
    """Further variables if the policy is an adapter: permission to load adapters, and a separate folder, created here,
    to which the trainer writes the adapter (`pipeline.inference.vllm.adapter_loading`)."""
    if config.serve.enabled:
        return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if not config.model.lora.travels_alone or config.evaluation.only:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)}


def is_healthy(address: str, port: int, password: str) -> bool:
    """Whether this attempt's server answers there and its engine runs; `ImpostorError` for another program."""
    connection = HTTPConnection(address, port, timeout=_PROBE_SECONDS)
    try:
        connect(connection, password)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _weights_arguments(config: RunConfig) -> tuple[str, ...]:
    """The source of the weights; and no text output, which only API clients and benchmark commands need."""
    if config.serve.enabled:
        return _scale_out()
    if config.evaluation.only:
        return _scale_out() if config.evaluation.command else ("--tokens-only",)
    return (
        "--tokens-only",
        *("--weight-transfer-config", f'{{"backend": "{ENGINES[config.weights_backend]}"}}'),
        *("--worker-extension-cls", "pipeline.inference.vllm.worker_extension.WeightsExtension"),
    )


def _routing_arguments(config: RunConfig) -> tuple[str, ...]:
    """Return the experts of each token. On CPUs Rollcall's plugin does that, without a prefix cache
    (`pipeline.inference.vllm.routing_capture`)."""
    if config.training.routing_replay == "none":
        return ()
    on_gpus = config.resources.device == "cuda"
    return ("--enable-return-routed-experts",) if on_gpus else ("--no-enable-prefix-caching",)


def _scale_out() -> tuple[str, ...]:
    """Make the server answer with tokens in addition to text. Releases before this flag always do, and reject it."""
    return () if _is_older_than([0, 30]) else ("--enable-scale-out",)


def _is_older_than(release: list[int]) -> bool:
    """Whether vLLM is older than this release. A build from source without a release number has version 0.1, and counts
    as new."""
    return [0, 1] < [int(part) for part in re.findall(r"\d+", version("vllm"))[:2]] < release


def _cpu_arguments(config: RunConfig) -> tuple[str, ...]:
    """No compilation, which costs start-up time without a gain here; memory as configured, not most of the node's."""
    return (
        *("--enforce-eager", "--distributed-executor-backend", "uni"),
        *("--kv-cache-memory-bytes", str(config.inference.kv_cache_bytes), "--gpu-memory-utilization", "0.05"),
    )


def _program(config: RunConfig, placement: Placement) -> tuple[str, ...]:
    """vLLM's server and its model. Only its command line has several API processes; the CPU build lacks it."""
    pool = pool_of(config.serve, placement.index) if config.serve.enabled else Pool()
    path = config.serve.bases.get(pool.base, config.model.path)
    model = (path, *_policy_arguments(config, pool))
    program = (sys.executable, "-P", "-m", "pipeline.roles.held_port", str(placement.ports[0]))
    if config.resources.device == "cuda":
        return (*program, "vllm.entrypoints.cli.main", "serve", *model)
    return (*program, "vllm.entrypoints.openai.api_server", "--model", *model)


def _gpu_arguments(config: RunConfig, placement: Placement) -> tuple[str, ...]:
    loads_adapters = config.serve.enabled or (config.model.lora.travels_alone and not config.evaluation.only)
    processes = 1 if loads_adapters else config.inference.api_server_count  # an adapter is loaded into one of them
    return (
        *("--tensor-parallel-size", str(len(placement.gpus))),
        *("--gpu-memory-utilization", str(config.inference.gpu_memory / config.resources.inference.servers_per_gpu)),
        *("--api-server-count", str(processes)),
    )


def _policy_arguments(config: RunConfig, pool: Pool) -> tuple[str, ...]:
    """The served model. The trainer sends its weights, or an adapter on a frozen base from disk; in a run that only
    evaluates, both are on disk. For API clients the server holds any of their adapters on the base, or, in a pool of
    whole models, those instead."""
    if config.serve.enabled:
        common = ("--served-model-name", BASE, "--enable-prompt-tokens-details")
        if pool.whole:
            return common
        return (
            *(*common, "--enable-lora", "--max-loras", str(MAX_ADAPTERS)),
            *("--max-cpu-loras", str(2 * MAX_ADAPTERS), "--max-lora-rank", str(_least_rank(config.serve.max_rank))),
            *("--lora-target-modules", *ATTENTION_LAYERS, *MLP_LAYERS),
        )
    lora, alone = config.model.lora, config.evaluation.only
    if not lora.travels_alone:
        return ("--served-model-name", MODEL, *(() if alone else ("--load-format", "dummy")))
    return (
        *("--served-model-name", "base", "--enable-lora", "--max-loras", "1"),
        *("--max-lora-rank", str(_least_rank(lora.rank)), "--lora-target-modules", *lora.targets),
        *(("--lora-modules", f"{MODEL}={lora.adapter}") if alone else ()),
    )


def _least_rank(rank: int) -> int:
    """The smallest rank of vLLM's `MaxLoRARanks` that is at least `rank`."""
    supported = [limit for limit in _RANKS if limit >= rank]
    if not supported:
        raise ConfigError("model.lora.rank", rank, f"at most {_RANKS[-1]}, vLLM's limit", "lower it")
    return supported[0]


def _head_arguments(config: RunConfig) -> tuple[str, ...]:
    """The trainer computes log-probabilities with a float32 head, so the server must too."""
    return () if config.model.dtype == "float32" else ("--hf-overrides", '{"head_dtype": "float32"}')
