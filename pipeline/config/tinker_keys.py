"""The keys of a run that serves the Tinker API, `serve.*`; see docs/tinker.md."""

from typing import Annotated

from pydantic import Field

from pipeline.config.value_types import Bytes, NotNegative, Positive, Seconds, Section

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
"""The layers on which clients may put an adapter, by `train_attn` and `train_mlp`; servers wrap no others."""


class ServeConfig(Section):
    """Serve the Tinker API: the trainer executes clients' requests instead of an algorithm; see docs/tinker.md."""

    enabled: bool = Field(False, description="Serve the Tinker API; `launchers/serve.py` starts such a run.")
    host: str = Field(
        "127.0.0.1", description="Listening address of the gateway; the trainer's nodes must be able to reach it."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8778, description="Port of the gateway; 0: any free port, the same again after a restart."
    )
    keys: str = Field("", description="File of API keys, as hashes; empty: one key for this run.")
    base_name: str = Field("", description="The model's name in the API; empty: the name of its directory.")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="The adapters' output is scaled by alpha / rank.")
    sampling: bool = Field(
        False,
        description="Run inference servers for sampling; their number is in `resources.inference`.",
    )
    max_rank: Annotated[int, Field(ge=1, le=512)] = Field(64, description="Highest rank of an adapter.")
    whole_models: bool = Field(
        False, description="Allow clients to train all weights, with one copy of the model for each."
    )
    whole_servers: NotNegative = Field(
        0,
        description="The number of servers, of those in `resources.inference`, that sample from whole models: "
        "each has one at a time. The others sample from adapters and the base.",
    )
    bases: dict[str, str] = Field(
        {},
        description="Further base models that clients may choose: names in the API, and directories with weights.",
    )
    base_servers: NotNegative = Field(
        0, description="The number of servers for each of `serve.bases`, of those in `resources.inference`."
    )
    request_bytes: Bytes = Field(1 << 26, description="Largest size of a request, decompressed.")
    session_seconds: Seconds = Field(3600, description="Timeout of a session without heartbeats; its checkpoints stay.")
    silent_seconds: Annotated[float, Field(ge=60)] = Field(
        120,
        description="A session is silent after this time without a heartbeat: its requests then wait for the next "
        "heartbeat. The SDK sends one every 10 s.",
    )
    snapshot_seconds: Seconds = Field(
        3600,
        description="Time after its last use at which a snapshot of one sampling client may be removed. The newest "
        "eight of each model stay.",
    )
    checkpoint_steps: Positive = Field(
        20,
        description="Optimizer steps, over all models, between the service's checkpoints; more if checkpoints take "
        "too long.",
    )
    checkpoint_seconds: Seconds = Field(60, description="Longest time after a step until a checkpoint covers it.")
    restarts: NotNegative = Field(100, description="On one machine: largest number of restarts of a failed trainer.")
