"""The keys of rollouts and of inference servers, `rollout.*` and `inference.*`.

The number of servers and their nodes are keys of `pipeline.config.cluster_keys`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.config.value_types import Bytes, BytesOrNone, Fraction, NotNegative, Positive, Seconds, Section, Texts

_ENGINES = Path(__file__).parents[1] / "inference"
"""The folder of `pipeline.inference`, in which an engine is a folder `<name>` with `<name>_engine.py`."""


def engine_names() -> tuple[str, ...]:
    """The names of all inference engines, sorted. Their folders are listed, never imported."""
    folders = [file.parent for file in _ENGINES.glob("*/__init__.py")]
    return tuple(sorted(folder.name for folder in folders if (folder / f"{folder.name}_engine.py").exists()))


if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[engine_names()]


class CurriculumConfig(Section):
    """A curriculum: prompts whose groups were all solved, or never, are sampled less (docs/tasks.md)."""

    weight: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="How often a prompt that is too easy or too hard is taken when its turn comes; 1: always, so that "
        "there is no curriculum.",
    )
    tries: Positive = Field(
        2, description="Groups in a row that must be solved wholly, or not at all, before a prompt is too easy or hard."
    )
    correct: float = Field(1.0, description="Smallest reward of a solved sample.")


class RolloutConfig(Section):
    """Sampling by the actor."""

    group_size: Annotated[int, Field(ge=2)] = Field(8, description="Samples of each prompt (the group size).")
    oversample: NotNegative = Field(
        0,
        description="Over-sampling: additional samples started for each prompt. The first rollout.group_size that end "
        "form the group, and the stragglers are canceled. Favors short samples (docs/algorithms.md).",
    )
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature of training rollouts.")
    max_tokens: Positive = Field(32, description="Largest number of tokens sampled in one turn.")
    concurrency: Positive = Field(64, description="Groups in flight over all servers.")
    adaptive_concurrency: bool = Field(
        False,
        description="Let the groups in flight follow the load of the servers' KV caches; rollout.concurrency is then "
        "their largest number (docs/agents.md#groups-in-flight).",
    )
    request_seconds: Seconds = Field(
        120, description="Timeout of a request on one server; then another server continues it from its sampled tokens."
    )
    max_tokens_per_request: Positive = Field(
        4096,
        description="Largest number of tokens sampled by one request; longer turns are requested in pieces of this "
        "length.",
    )
    episode_seconds: Annotated[float, Field(ge=0)] = Field(
        600,
        description="Timeout of the task's own time in one sample, such as for tools, in seconds; then the sample "
        "fails with this reason. Waiting for the servers does not count. 0: no limit.",
    )
    sample_store_bytes: BytesOrNone = Field(
        1 << 30,
        description="Largest size of the readable samples in the run directory (docs/rollouts.md); 0: none.",
    )
    journal_bytes: BytesOrNone = Field(
        1 << 28,
        description="Largest size of the record of episodes in flight: with it they continue after a restart "
        "of the actor and a requeue, without sampling recorded text again (docs/rollouts.md); 0: none.",
    )
    min_samples: Positive = Field(2, description="A group with fewer successful samples is recorded as failed.")
    curriculum: CurriculumConfig = CurriculumConfig()
    max_consecutive_failures: Positive = Field(
        256, description="The run stops when this many samples in a row have failed because of the task."
    )


class SpeculationConfig(Section):
    """Speculative decoding: several drafted tokens are checked in one step (docs/decoding.md)."""

    method: Literal["none", "ngram", "draft"] = Field(
        "none",
        description="Source of the drafts: `ngram`, the text so far, where its last tokens occurred before; `draft`, a "
        "smaller model. Samples have the policy's distribution and log-probabilities either way.",
    )
    tokens: Annotated[int, Field(ge=1, le=128)] = Field(4, description="Largest number of drafted tokens in a step.")
    lookup_min: Positive = Field(2, description="Fewest last tokens that must have occurred before (`ngram`).")
    lookup_max: Positive = Field(4, description="Most last tokens that are looked up (`ngram`).")
    model: str = Field(
        "",
        description="Directory of the smaller model, with the policy's vocabulary (`draft`). It is loaded once and "
        "never trained.",
    )


class InferenceConfig(Section):
    """The inference servers."""

    engine: EngineName = Field("vllm", description="The program of the servers: a folder of `pipeline/inference`.")
    min_servers: Positive | Literal["half", "all"] = Field(
        "half",
        description="Servers that must have the first weights before rollouts begin: a number, `half` (rounded up) or "
        "`all`. The others join when they are ready. A server that uses up `recovery.inference` is abandoned, and the "
        "attempt ends when fewer than these are left. A run that only evaluates or serves needs all its servers.",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="Transport of the weights: `gloo`, over TCP; `nccl`, from GPU to GPU. Servers are paused only for "
        "an update of full weights over gloo. `auto`: nccl with resources.device=cuda, but gloo for adapters.",
    )
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        "keep",
        description="Requests in flight during an update: `keep` them running, `wait` for their end, or `abort` and "
        "retry them.",
    )
    reset_kv_cache_on_update: bool = Field(
        False,
        description="With `keep`: prefill the requests in flight again with the new weights, and the later turns of "
        "episodes too. Otherwise both use the keys and values that older weights computed.",
    )
    update_seconds: Seconds = Field(60, description="Deadline of one update; a server that misses it is evicted.")
    relay_fanout: NotNegative = Field(
        0,
        description="Servers to which each server forwards the weights over gloo, so that the trainer sends them once "
        "for all servers. 0: the trainer sends them to every server.",
    )
    staging_device: Literal["gpu", "host"] = Field(
        "gpu",
        description="Memory for weights that arrive at a server on GPUs: the `gpu`, which then holds weights twice, "
        "or its `host`, from which an update copies them (a second for 50 GB on a GPU). Adapters always use the GPU.",
    )
    kv_cache_bytes: Bytes = Field(1 << 26, description="Memory of the KV cache of each server (CPU).")
    gpu_memory: Fraction = Field(0.85, description="Fraction of the GPU's memory for a server.")
    api_server_count: Positive = Field(
        4,
        description="HTTP processes of each server (GPU); small models use more. Always one if a server loads "
        "adapters.",
    )
    compile: bool = Field(
        True,
        description="Compile the model's layers when a server starts (GPU). Without it a server starts sooner, and "
        "keeps CUDA graphs for decoding (docs/performance.md#a-real-model).",
    )
    max_sequences: Positive = Field(256, description="Largest number of concurrent sequences of a server.")
    compact_logprobs: bool = Field(
        True,
        description="Send log-probabilities from vLLM's engine as plain numbers, which costs the engine less; the "
        "values are the same. With vLLM 0.25 this also sends the policy version of each token.",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="`fp8`: servers on GPUs round the linear layers of each version that arrives to FP8, and compute "
        "them in it (docs/decoding.md#fp8).",
    )
    speculation: SpeculationConfig = SpeculationConfig()
    extra_args: Texts = Field((), description="Additional command-line arguments for the engine's server.")
