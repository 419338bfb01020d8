"""The modules that a fork server imports before it forks the roles of its node (`pipeline.utils.fork_server`).

Owns the stages and their third-party modules. The project's modules are not among them: each role imports those of its
run. A module that is missing here costs its import in each role, and one that is not installed nothing.
"""

from collections.abc import Iterable

from pipeline.config import RunConfig
from pipeline.inference.engine_protocol import SERVER
from pipeline.inference.engine_registry import find_engine
from pipeline.roles import SERVICES, TRAINER
from pipeline.topology.plan import RoleName
from pipeline.utils.fork_server import Stage

_STAGE_OF: dict[RoleName, str] = {
    "redis": SERVICES,
    "actor": SERVICES,
    "preprocessor": SERVICES,
    "trainer": TRAINER,
    "inference": SERVER,
}
_ORDER = (SERVICES, TRAINER, SERVER)
_SERVICE_MODULES = ("msgspec", "pydantic", "numpy", "aiohttp", "redis", "redis.asyncio", "psutil", "fsspec", "jinja2")
_TRAINER_MODULES = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.generation",
    "safetensors.torch",
)


def stages_of(config: RunConfig) -> list[Stage]:
    """The stages for the roles of this run, in order."""
    return [
        Stage(SERVICES, _SERVICE_MODULES),
        # With NVML's count of devices, a module that asks for GPUs when it is imported does not initialize CUDA.
        Stage(TRAINER, _TRAINER_MODULES, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
        find_engine(config.inference.engine).imports(config),
    ]


def ready_stages(roles: Iterable[RoleName]) -> int:
    """The number of stages after the first that a node with these roles makes at once."""
    return max((_ORDER.index(_STAGE_OF[role]) for role in roles), default=0)
