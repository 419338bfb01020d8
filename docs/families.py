"""docs/families.md, made anew: python -m docs.families [--check] [FAMILY …]

Owns the table of what becomes of every causal language model of the installed transformers, by its default config: the
check that the trainer makes before it builds a model (`pipeline.training.workers.likeness`). Takes some minutes. With
names it prints those rows only; with `--check` it fails if the page is not what it would write.
"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.errors import ConfigError
from pipeline.training.workers.likeness import TOLERANCE, Likeness, likeness

PAGE = Path(__file__).parent / "families.md"
KEYS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "mistral": {"sliding_window": 4096},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
}
"""Where the default config is no model, or not what the family is known for."""
HEAD = """\
# Model families

Made by `python -m docs.families`, with transformers {version}: every causal language model that it has, by its \
default config. Before the trainer builds a model, a small copy of its architecture with random weights answers about \
three short rows, of which two begin alike, packed, padded, and one by one with transformers' own attention \
([likeness](../pipeline/training/workers/likeness.py)); a difference above {tolerance} nats is no rounding. In the \
copy, vectors that start as zeros or ones are neither, and what changes for long rows, such as windows, selected \
tokens and rotary frequencies, changes for some of these. What is \
*padded* is so with a warning, whatever `training.packing` says: its layers carry a state or a convolution along the \
line, from one packed row into the next. What is *refused* is so before anything is trained, with the reason.

The check is made for each model's own config, so a model may come out otherwise than the default of its family here. \
It says nothing of the servers: whether vLLM serves a family, and takes its weights, is another question.

| family | rows | packed, off by | padded, off by | |
|---|---|---:|---:|---|
"""


def row(family: str) -> str:
    try:
        config = CONFIG_MAPPING[family](**KEYS.get(family, {})).to_dict()
        found = likeness(json.dumps(config | {"model_type": family}))
    except ConfigError as error:
        return f"| {family} | refused | | | {error.value}: expected {error.expected} |"
    except Exception as error:  # noqa: BLE001 (a family whose default config is none is a row as well)
        return f"| {family} | no default config | | | {type(error).__name__} |"
    if isinstance(found, str):
        return f"| {family} | padded: not checked | | | {found.partition(':')[0]} |"
    return f"| {family} | {outcome(found)} | {short(found.packed)} | {short(found.padded)} | |"


def outcome(found: Likeness) -> str:
    if found.packed <= TOLERANCE:
        return "packed"
    return "padded" if found.padded <= TOLERANCE else "refused"


def short(difference: float) -> str:
    """Rounding differs from machine to machine."""
    return "rounding" if difference <= TOLERANCE else f"{difference:.1f}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.families")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("families", nargs="*")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    lines = []
    for family in given.families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        lines.append(row(family))
        print(lines[-1], flush=True)
    if given.families:
        return 0
    page = HEAD.format(version=transformers.__version__, tolerance=TOLERANCE) + "\n".join(lines) + "\n"
    if given.check:
        return int(page != PAGE.read_text())
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
