"""The keys of a run that serves the Tinker API.

Owns `serve.*`: types, bounds, meaning. See docs/tinker.md.
"""

from typing import Annotated

from pydantic import Field

from pipeline.config.values import Bytes, NotNegative, Positive, Seconds, Section

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
"""The layers on which clients may put an adapter, by `train_attn` and `train_mlp`; servers wrap no others."""


class ServeConfig(Section):
    """Serve the Tinker API: the trainer does what clients ask, in place of an algorithm; see docs/tinker.md."""

    enabled: bool = Field(False, description="Whether this run serves; `launchers/serve.py` starts it.")
    host: str = Field(
        "127.0.0.1", description="Address that the front listens at; the trainer's nodes have to reach it."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8778, description="Its port; 0: any that is free, the same again after a restart."
    )
    keys: str = Field("", description="File of API keys, as hashes; empty: one key of the run's own.")
    base_name: str = Field("", description="What clients call the model; empty: the name of its directory.")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="Adapters' output is scaled by alpha / rank.")
    sampling: bool = Field(
        False,
        description="Run vLLM servers that sample, of which `resources.inference` says how many.",
    )
    max_rank: Annotated[int, Field(ge=1, le=512)] = Field(64, description="Highest rank of an adapter.")
    whole_models: bool = Field(False, description="Let clients train all weights, of a copy of the model for each.")
    request_bytes: Bytes = Field(1 << 26, description="Largest request, decompressed.")
    session_seconds: Seconds = Field(
        3600, description="A session that gives no sign of life for so long ends; its checkpoints stay."
    )
    commit_steps: Positive = Field(
        20,
        description="Optimizer steps, of all models together, between commits; more where they take too long.",
    )
    commit_seconds: Seconds = Field(60, description="Longest time after a step until a commit covers it.")
    restarts: NotNegative = Field(
        100, description="On one machine: how often the trainer is started again after it failed."
    )
