"""Writes the tables of memory in docs/gpus.md and docs/larger-models.md: python -m docs.memory [--check]

Owns the shapes of a few common models, whose memory `pipeline.topology.gpu_memory` computes. It reads no weights and
takes seconds. With `--check` it fails if a page has other tables than it would write.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from docs.shapes import LARGER_SHAPES
from pipeline.config import ModelConfig, RunConfig, load_config
from pipeline.topology.gpu_memory import trainer_memory
from pipeline.topology.memory_budget import CONTEXT, GIB
from pipeline.topology.memory_fit import max_gpu_memory_utilization
from pipeline.topology.server_memory import kv_bytes, sequences, server_memory
from pipeline.topology.sizes import Sizes
from pipeline.train.model.model_size import sizes_of
from slurm.submission.compose_config import compose_config

PAGE, LARGER_PAGE = (Path(__file__).parent / name for name in ("gpus.md", "larger-models.md"))
BEGIN, END = "<!-- made by python -m docs.memory -->\n", "<!-- end -->\n"
LENGTH, TOKENS = 4096, 16_384
CARDS = {"80 GB": 80 * GIB, "141 GB": 140 * GIB}
"""A card's nominal memory, and its actual memory."""

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
}
_SHAPES: dict[str, tuple[int, int, int, int, bool]] = {
    "0.6B": (1024, 28, 16, 3072, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12_288, False),
    "32B": (5120, 64, 64, 25_600, False),
}
"""Qwen3's hidden size, layers, heads, feed-forward size, and whether the head is tied to the embedding."""


class Measured(NamedTuple):
    """The peak that torch reported of a trainer's step on H200s (`python -m tests.gpu.training --parts speed`)."""

    model: str
    processes: int
    tokens: int
    gib: float
    ways: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Of Qwen3's shape, all with a tied head; the smallest with the vocabulary of `tests/gpu/workload.py`."""
        small = {"vocab_size": 32_000} if self.model == "0.6B" else {}
        return settings_of(self.model) | {"tie_word_embeddings": True} | small


class LargerPlan(NamedTuple):
    """A model, the GPUs that are enough for it, and the keys of its run.

    Attributes:
        shape: a name of `_SHAPES` or `LARGER_SHAPES`.
        nodes, gpus: the machines.
        keys: overrides of the command line, without the experiment.
    """

    shape: str
    nodes: int
    gpus: int
    keys: str

    @property
    def sizes(self) -> Sizes:
        return sizes_from(LARGER_SHAPES.get(self.shape) or settings_of(self.shape))

    def config(self, *overrides: str) -> RunConfig:
        """The run of `experiment=math` with these keys."""
        return compose_config(
            ["experiment=math", f"model.max_length={LENGTH}", "rollout.max_tokens=1024", *self.keys.split(), *overrides]
        )


LARGER = (
    LargerPlan("8B", 1, 8, "model=qwen3_8b resources=gpus_8 training=large"),
    LargerPlan("32B", 2, 8, "model=qwen3_32b resources=gpus_2x8_train12 training=large"),
    LargerPlan("Qwen3-30B-A3B", 2, 8, "model=qwen3_30b_a3b resources=gpus_2x8_tp2 training=large training.mesh.ep=8"),
    LargerPlan("GLM-4.5-Air", 8, 8, "model=glm4.5_air resources=gpus_8x8_tp8 training=large training.mesh.ep=8"),
    LargerPlan(
        "Qwen3-235B-A22B", 16, 8, "model=qwen3_235b_a22b resources=gpus_16x8_tp8 training=large training.mesh.ep=8"
    ),
)
"""Each fits GPUs of 80 GB, which tests check."""

SAVED = ("reshard_after_forward", "activation_checkpointing=full")
MEASURED = (
    Measured("0.6B", 1, 15_600, 39.4),
    Measured("0.6B", 1, 15_600, 9.1, SAVED),
    Measured("0.6B", 2, 13_000, 24.1, ("compile",)),
    Measured("0.6B", 2, 13_000, 23.3, ("compile", "reshard_after_forward")),
    Measured("4B", 2, 15_600, 34.6, ("compile", *SAVED)),
    Measured("8B", 2, 15_600, 63.4, ("compile", *SAVED)),
)


def settings_of(name: str) -> dict[str, Any]:
    """The config.json of a model of that name."""
    hidden, layers, heads, feed_forward, tied = _SHAPES[name]
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _QWEN3 | shape | {"intermediate_size": feed_forward, "tie_word_embeddings": tied}


def sizes_from(settings: dict[str, Any]) -> Sizes:
    """The sizes of the model of a config.json, in bfloat16."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        (Path(folder) / "tokenizer.json").write_text("{}")
        return sizes_of(ModelConfig(path=folder, init="random", dtype="bfloat16"))


def config_of(
    *ways: str, processes: int = 1, gpus: int = 1, tokens: int = TOKENS, memory: str = "", **training: str
) -> RunConfig:
    """A run on GPUs with this memory, with these keys of `training` set (`key` or `key=value`), and servers of `gpus`
    GPUs."""
    return load_config(
        {
            "name": "memory",
            "cluster": {"scheduler": "local"},
            "model": {"path": "any", "init": "random", "dtype": "bfloat16", "max_length": LENGTH},
            "task": {"name": "arithmetic"},
            "loss": {"name": "grpo"},
            "resources": {
                "device": "cuda",
                "gpu_memory": memory,
                "trainer": {"processes": processes, "gpus": 1},
                "inference": {"gpus": gpus},
            },
            "training": {
                "steps": 1,
                "prompts_per_step": 64,
                "micro_batch_tokens": tokens,
                **{key: value or True for key, _, value in (way.partition("=") for way in ways)},
                **training,
            },
        }
    )


def computed(case: Measured) -> float:
    """Computed GiB of a measured case: without CUDA's part, and without servers."""
    config = config_of(*case.ways, processes=case.processes, tokens=case.tokens)
    need = trainer_memory(config, sizes_from(case.settings))
    return (need.total - CONTEXT - need.parts["weights for the servers"]) / GIB


def tables() -> str:
    """All tables: of trainers, of servers, and of measured cases."""
    trainers, servers = [], []
    for name in _SHAPES:
        sizes = sizes_from(settings_of(name))
        trainers += list(_trainer_rows(name, sizes))
        servers += list(_server_rows(name, sizes))
    measured = [_measured_row(case) for case in MEASURED]
    return "\n".join([*_HEADS[0], *trainers, "", *_HEADS[1], *servers, "", *_HEADS[2], *measured, ""])


def larger_table() -> str:
    """The table of the larger models' plans."""
    head = (
        "| model | nodes × GPUs of 80 GB | keys | trainer process, GiB | GPU of a server, at least, GiB | sequences |"
    )
    return "\n".join([head, "|---|---|---|---:|---:|---:|", *(_larger_row(plan) for plan in LARGER), ""])


def _larger_row(plan: LargerPlan) -> str:
    config, sizes = plan.config("resources.gpu_memory=80G"), plan.sizes
    totals = [f"{need(config, sizes).total / GIB:.0f}" for need in (trainer_memory, server_memory)]
    room = sequences(config, sizes, CARDS["80 GB"])
    return f"| {plan.shape} | {plan.nodes} × {plan.gpus} | `{plan.keys}` | {' | '.join(totals)} | {room} |"


_RANKS = (1, 2, 4, 8, 16, 32)
_HEADS = (
    [
        f"| a trainer process, GiB, with this many processes | {' | '.join(map(str, _RANKS))} |",
        "|---|" + "---:|" * len(_RANKS),
    ],
    [
        "| a server, GiB of each GPU | GPUs | weights | incoming weights | minimum | KiB a token | "
        + " | ".join(f"sequences on {card}" for card in CARDS)
        + " |",
        "|---|" + "---:|" * (5 + len(CARDS)),
    ],
    ["| measured | processes | peak GiB | computed |", "|---|---:|---:|---:|"],
)


def _trainer_rows(name: str, sizes: Sizes) -> Iterator[str]:
    saved = ", resharded and recomputed"
    for ways, device, words in (((), "gpu", ", all kept"), (SAVED, "gpu", saved), (SAVED, "host", f"{saved}, host")):
        config = config_of("compile", *ways, staging_device=device)
        totals = [trainer_memory(config, sizes, ranks).total / GIB for ranks in _RANKS]
        yield f"| {name}{words} | " + " | ".join(f"{total:.0f}" for total in totals) + " |"


def _server_rows(name: str, sizes: Sizes) -> Iterator[str]:
    for gpus in (1, 2, 4, 8):
        config = config_of(gpus=gpus)
        need = server_memory(config, sizes)
        parts = [need.parts["weights"], need.parts["weights that arrive"], need.total]
        cells = [f"{part / GIB:.1f}" for part in parts] + [f"{kv_bytes(config, sizes) / 1024:.0f}"]
        cells += [_room(config, sizes, memory) for memory in CARDS.values()]
        yield f"| {name if gpus == 1 else ''} | {gpus} | " + " | ".join(cells) + " |"


def _measured_row(case: Measured) -> str:
    ways = ", ".join(f"`{way}`" for way in case.ways) or "default"
    return f"| {case.model}, {ways} | {case.processes} | {case.gib} | {computed(case):.1f} |"


def _room(config: RunConfig, sizes: Sizes, memory: int) -> str:
    """Sequences, and the server's fraction of the card for them: the default, or the largest possible one."""
    share = min(config.inference.gpu_memory, max_gpu_memory_utilization(config, sizes, memory))
    with_share = config.model_copy(update={"inference": config.inference.model_copy(update={"gpu_memory": share})})
    count = sequences(with_share, sizes, memory)
    return f"{count} ({share})" if count > 0 else "–"


def page(text: str, made: str) -> str:
    """The page with its tables replaced by these; `ValueError` if it lacks the markers."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"the page has no lines {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}{made}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = 0
    for path, made in ((PAGE, tables()), (LARGER_PAGE, larger_table())):
        before = path.read_text()
        after = page(before, made)
        if options.check:
            print(f"{path} is {'as it should be' if before == after else 'stale: python -m docs.memory writes it'}")
        else:
            path.write_text(after)
        stale += before != after
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
