"""A base with random weights, on disk.

Owns `write_base`: adapters need a base that trainer and servers read from the same files, and a model of `conf/models`
has none. Promises that equal seeds give equal weights, and that a folder with this name is whole.

    python -m pipeline.training.service.base <model directory> <folder> <seed>
"""

import shutil
import sys
from pathlib import Path

from pipeline.system import folders

_SKIPPED = {"config.json"}


def write_base(model: Path, target: Path, seed: int) -> None:
    """Write a model of the directory's shape with random weights, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    part = folders.unfinished(target, "base")
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    network.save_pretrained(part)
    for file in model.iterdir():
        if file.is_file() and file.name not in _SKIPPED:
            shutil.copy(file, part / file.name)
    folders.replace(target, part)


if __name__ == "__main__":
    write_base(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
