"""vLLM as an `InferenceEngine`.

Owns which models vLLM can serve and update. The command line, the installed release and the parser of arguments have
modules of their own. Imports no vLLM.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.model_directory import has_vision_tower
from pipeline.errors import ConfigError
from pipeline.inference.engine_protocol import ClientModel, InferenceEngine
from pipeline.inference.vllm.decoding_checks import check_quantization, check_quantized_experts, check_speculation
from pipeline.inference.vllm.gpu_capability import check_capability
from pipeline.inference.vllm.installed_release import check_installed, check_returned_experts
from pipeline.inference.vllm.server_arguments import check_extra_args, unchecked_arguments
from pipeline.inference.vllm.server_command import (
    adapter_environment,
    server_command,
    server_environment,
    server_imports,
)
from pipeline.topology.plan import Placement
from pipeline.utils.fork_server import Stage

_NOT_RELOADED_ON_GPUS = ("gpt_oss",)
"""Families that need `direct_loading`, which has not run on GPUs."""


class VllmEngine:
    """vLLM, as a `pipeline.inference.engine_protocol.InferenceEngine`."""

    socket_variables = ("VLLM_RPC_BASE_PATH",)
    cache_variables = ("VLLM_CACHE_ROOT",)

    def check_installed(self) -> None:
        check_installed()

    def check_model(self, config: RunConfig, family: str, experts: int) -> None:
        check_quantized_experts(config, experts)
        adapters = config.serve.enabled or config.model.lora.travels_alone
        if adapters and experts and config.resources.device == "cpu":
            expected = (
                f"a model without experts (it has {experts}) for adapters on CPUs, where vLLM serves none on mixtures"
            )
            hint = "choose another model" if config.serve.enabled else "set model.lora.merge=true"
            raise ConfigError("model.path", config.model.path, expected, f"{hint}, or resources.device=cuda")
        on_gpus, whole = config.resources.device == "cuda", not config.model.lora.travels_alone
        if family in _NOT_RELOADED_ON_GPUS and config.has_rollouts and on_gpus and whole:
            expected = f"another family than {family}, whose experts and sinks are not updated on servers with GPUs"
            hint = "train it by sft alone, or set model.lora.rank to adapt attention"
            raise ConfigError("model.path", config.model.path, expected, hint)

    def check_config(self, config: RunConfig) -> None:
        check_quantization(config)
        check_speculation(config)
        check_returned_experts(config)
        check_extra_args(config)

    def check_gpus(self, config: RunConfig, gpus: Sequence[int]) -> None:
        check_capability(config, gpus)

    def warnings(self, config: RunConfig) -> Iterator[str]:
        if unchecked := unchecked_arguments(config):
            yield unchecked
        # vLLM imports torchvision for a model that sees images, also where nobody sends one.
        if has_vision_tower(config.model) and find_spec("torchvision") is None:
            yield (
                f"{config.model.path} has a vision tower, and torchvision is not installed here: vLLM needs it to "
                "serve the model, and fails as it starts; pip install torchvision, in the version that fits torch"
            )

    def imports(self, config: RunConfig) -> Stage:
        return server_imports(config)

    def command(self, config: RunConfig, placement: Placement, clients: ClientModel | None) -> tuple[str, ...]:
        return server_command(config, placement, clients)

    def environment(self, config: RunConfig, placement: Placement, world: Path) -> dict[str, str]:
        return server_environment(config, placement, world)

    def adapter_environment(self, config: RunConfig, folder: Path) -> dict[str, str]:
        return adapter_environment(config, folder)


ENGINE: InferenceEngine = VllmEngine()
