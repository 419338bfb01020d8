"""The keys that say how samples are made: what the actor asks for, and of which servers.

Owns `rollout.*` and `inference.*`. How many servers there are, and where, is in `pipeline.config.places`.
"""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.values import Bytes, Fraction, NotNegative, Positive, Seconds, Section, Texts


class RolloutConfig(Section):
    """How the actor samples."""

    samples: Annotated[int, Field(ge=2)] = Field(8, description="Samples of each prompt (the group's size).")
    extra_samples: NotNegative = Field(
        0,
        description="Samples of each prompt that are begun beside those; the first that end are the group, and the "
        "others are abandoned. It favours short samples (docs/algorithms.md).",
    )
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature of training rollouts.")
    max_tokens: Positive = Field(32, description="Most tokens sampled in one turn.")
    concurrency: Positive = Field(64, description="Groups in flight over all servers.")
    request_seconds: Seconds = Field(
        120, description="How long one server works on a request; then it goes on elsewhere with the tokens it has."
    )
    request_tokens: Positive = Field(
        4096, description="Most tokens sampled by one request; what is longer is asked for in pieces of this length."
    )
    episode_seconds: Annotated[float, Field(ge=0)] = Field(
        600,
        description="Most seconds that the task takes for itself in one sample, such as for tools, then the sample "
        "fails with that reason; waiting for the servers does not count. 0: no bound.",
    )
    kept_bytes: NotNegative = Field(
        1 << 30,
        description="Most bytes of samples that are kept in the run directory to be read (docs/rollouts.md); 0: none.",
    )
    min_samples: Positive = Field(2, description="A group with fewer successful samples is settled as failed.")
    give_up_after: Positive = Field(
        256, description="The run stops when this many samples in a row failed for reasons of the task."
    )


class InferenceConfig(Section):
    """The vLLM servers."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="How weights travel: gloo, over TCP, to a server that is paused for the change; nccl, from GPU to "
        "GPU, without a pause. `auto`: nccl with resources.device=cuda, but gloo for adapters.",
    )
    update: Literal["keep", "wait", "abort"] = Field(
        "keep", description="Requests in flight during an update: go on, finish first, or be aborted and retried."
    )
    recompute_kv: bool = Field(
        False, description="With `keep`: re-prefill the requests in flight with the new weights."
    )
    update_seconds: Seconds = Field(60, description="Deadline of one update; a server that misses it is evicted.")
    kv_cache_bytes: Bytes = Field(1 << 26, description="Memory of the KV cache of each server (CPU).")
    gpu_memory: Fraction = Field(0.85, description="Fraction of the GPU that a server may take.")
    api_processes: Positive = Field(
        4,
        description="Processes of each server that answer HTTP (GPU); small models keep more of them busy. One where a "
        "server loads adapters.",
    )
    max_sequences: Positive = Field(256, description="Most sequences that a server runs at once.")
    restarts: NotNegative = Field(
        3, description="How often a server that dies or hangs is started again before it ends the attempt."
    )
    fast_logprobs: bool = Field(
        True,
        description="Send log-probabilities from vLLM's engine as plain numbers, which costs it less; same values. "
        "With vLLM 0.25 they bring along which weights sampled each token.",
    )
    extra_args: Texts = Field((), description="Further arguments for vLLM's server, as on its command line.")
