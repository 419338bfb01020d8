"""The command line and the environment of a vLLM server. Imports no vLLM."""

import json
import sys
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.tinker_keys import ATTENTION_LAYERS, MLP_LAYERS
from pipeline.errors import ConfigError
from pipeline.inference.engine_protocol import POLICY, SERVER, ClientModel
from pipeline.inference.vllm.compact_logprobs import SWITCH
from pipeline.inference.vllm.draft_weights import SECOND_RUNNER
from pipeline.inference.vllm.draft_weights import SWITCH as DRAFT_MODEL
from pipeline.inference.vllm.installed_release import is_older_than
from pipeline.inference.vllm.kv_cache_size import SHARED
from pipeline.inference.vllm.plugin import ENGINES
from pipeline.inference.vllm.routing_capture import SWITCH as ROUTED_EXPERTS
from pipeline.inference.vllm.server_password import WORLD
from pipeline.topology.plan import Placement
from pipeline.utils.fork_server import Stage
from pipeline.utils.network_interfaces import KEEPALIVE_SECONDS

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's `MaxLoRARanks`."""
_LOG_LEVELS = {"debug": "DEBUG", "error": "ERROR"}
"""vLLM's level by `debug.log_level`, if it is not WARNING."""
_UNCOMPILED = ("--compilation-config.mode=0", "--compilation-config.cudagraph_mode=FULL_DECODE_ONLY")
"""vLLM's `CompilationMode.NONE`, with CUDA graphs of whole forward passes that only decode."""


_IMPORTS = (
    "vllm",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.logits_processor",
    "vllm.model_executor.layers.quantization.online.base",
)
_GPU_IMPORTS = ("vllm.entrypoints.cli.main", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner")
_CPU_IMPORTS = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")


def server_imports(config: RunConfig) -> Stage:
    """What a server imports until it is ready. vLLM sets up its log when it is imported."""
    modules = (*_IMPORTS, *(_GPU_IMPORTS if config.resources.device == "cuda" else _CPU_IMPORTS))
    return Stage(SERVER, modules, _log_variables(config))


def _log_variables(config: RunConfig) -> dict[str, str]:
    return {"VLLM_LOGGING_LEVEL": _LOG_LEVELS.get(config.debug.log_level, "WARNING")}


def server_command(config: RunConfig, placement: Placement, clients: ClientModel | None) -> tuple[str, ...]:
    """The argv of vLLM's server. `inference.extra_args` come last, so they take precedence."""
    device = _gpu_arguments(config, placement) if config.resources.device == "cuda" else _cpu_arguments(config)
    return (
        *_program(config, placement, clients),
        *("--host", placement.address, "--port", str(placement.ports[0])),
        *("--middleware", "pipeline.inference.vllm.auth_middleware.AuthMiddleware"),
        *_weights_arguments(config),
        *_routing_arguments(config),
        *_head_arguments(config),
        *_quantization_arguments(config),
        *_speculation_arguments(config),
        *("--dtype", config.model.dtype, "--max-model-len", str(config.model.max_length)),
        *("--max-num-seqs", str(config.inference.max_sequences), "--seed", str(config.seed + placement.index)),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests", "--shutdown-timeout", "1"),
        "--enable-prompt-tokens-details",
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
        **_log_variables(config),
        "VLLM_HOST_IP": placement.address,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(2 * KEEPALIVE_SECONDS),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **_draft_environment(config),
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
        # The lookup of drafts is compiled by Numba, which otherwise gives OpenMP a thread for each core.
        "NUMBA_NUM_THREADS": str(config.resources.inference.threads),
    }


def _draft_environment(config: RunConfig) -> dict[str, str]:
    if config.inference.speculation.method != "draft":
        return {DRAFT_MODEL: "0"}
    return {DRAFT_MODEL: "1", SECOND_RUNNER: "0"}


def adapter_environment(config: RunConfig, folder: Path) -> dict[str, str]:
    """Further variables if the policy is an adapter: permission to load adapters, and a separate folder, created here,
    to which the trainer writes the adapter (`pipeline.inference.vllm.adapter_loading`)."""
    if config.serve.enabled:
        return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if not config.model.lora.travels_alone or config.evaluation.only:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder)}


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


def _quantization_arguments(config: RunConfig) -> tuple[str, ...]:
    """Scales of weights for each output channel, and of activations for each token: the finest for which every Hopper
    GPU has a kernel in vLLM itself."""
    return () if config.inference.quantization == "none" else ("--quantization", "fp8_per_channel")


def _speculation_arguments(config: RunConfig) -> tuple[str, ...]:
    speculation = config.inference.speculation
    if speculation.method == "none":
        return ()
    settings: dict[str, object] = {"num_speculative_tokens": speculation.tokens}
    if speculation.method == "ngram":
        window = {"prompt_lookup_min": speculation.lookup_min, "prompt_lookup_max": speculation.lookup_max}
        settings |= {"method": "ngram", **window}
    else:
        settings |= {"method": "draft_model", "model": speculation.model, "draft_load_config": {"load_format": "auto"}}
    return "--speculative-config", json.dumps(settings)


def _scale_out() -> tuple[str, ...]:
    """Make the server answer with tokens in addition to text. Releases before this flag always do, and reject it."""
    return () if is_older_than([0, 30]) else ("--enable-scale-out",)


def _cpu_arguments(config: RunConfig) -> tuple[str, ...]:
    """No compilation, which costs start-up time without a gain here; memory as configured, not most of the node's."""
    return (
        *("--enforce-eager", "--distributed-executor-backend", "uni"),
        *("--kv-cache-memory-bytes", str(config.inference.kv_cache_bytes), "--gpu-memory-utilization", "0.05"),
    )


def _program(config: RunConfig, placement: Placement, clients: ClientModel | None) -> tuple[str, ...]:
    """vLLM's server and its model. Only its command line has several API processes; the CPU build lacks it."""
    if clients is None:
        model = (config.model.path, *_policy_arguments(config))
    else:
        model = (clients.path, *_client_arguments(config, clients))
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
        *(() if config.inference.compile else _UNCOMPILED),
    )


def _client_arguments(config: RunConfig, clients: ClientModel) -> tuple[str, ...]:
    """The served model for API clients: the base with any of their adapters, or whole models instead of the base."""
    common = ("--served-model-name", clients.name, "--enable-prompt-tokens-details")
    if not clients.adapters:
        return common
    return (
        *(*common, "--enable-lora", "--max-loras", str(clients.adapters)),
        *("--max-cpu-loras", str(2 * clients.adapters), "--max-lora-rank", str(_least_rank(config.serve.max_rank))),
        *("--lora-target-modules", *ATTENTION_LAYERS, *MLP_LAYERS),
    )


def _policy_arguments(config: RunConfig) -> tuple[str, ...]:
    """The served model. The trainer sends its weights, or an adapter on a frozen base from disk; in a run that only
    evaluates, both are on disk."""
    lora, alone = config.model.lora, config.evaluation.only
    if not lora.travels_alone:
        return ("--served-model-name", POLICY, *(() if alone else ("--load-format", "dummy")))
    return (
        *("--served-model-name", "base", "--enable-lora", "--max-loras", "1"),
        *("--max-lora-rank", str(_least_rank(lora.rank)), "--lora-target-modules", *lora.targets),
        *(("--lora-modules", f"{POLICY}={lora.adapter}") if alone else ()),
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
