"""A base with random weights, on disk.

Owns `write_base`: adapters need a base that trainer and servers read from the same files, and a model of `conf/models`
has none. Promises that equal seeds give equal weights, and that a folder with this name is whole.

    python -m pipeline.train.service.random_base <model directory> <folder> <seed>
"""

import json
import shutil
import sys
from pathlib import Path

from pipeline.utils import atomic_dirs

_SKIPPED = {"config.json"}


def write_base(model: Path, target: Path, seed: int) -> None:
    """Write a model of the directory's shape with random weights, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    part = atomic_dirs.unfinished(target, "base")
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    network.save_pretrained(part)
    for file in model.iterdir():
        if file.is_file() and file.name not in _SKIPPED:
            shutil.copy(file, part / file.name)
    _know_every_text(part / "tokenizer.json")
    atomic_dirs.replace(target, part)


def _know_every_text(tokenizer: Path) -> None:
    """vLLM's server encodes a text of its own when it starts: a tokenizer of words has to have one for those that it
    does not know."""
    tree = json.loads(tokenizer.read_text())
    words = tree["model"].get("vocab", {})
    if tree["model"]["type"] == "WordLevel" and tree["model"]["unk_token"] not in words:
        tree["model"]["unk_token"] = min(words, key=words.__getitem__)
        tokenizer.write_text(json.dumps(tree, indent=2))


if __name__ == "__main__":
    write_base(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
