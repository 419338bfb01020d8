"""A base model with random weights, on disk.

Trainer and servers of adapters must read the base from the same files, and a model of `conf/models` has no files.
Promises that equal seeds give equal weights, and that a folder with the target's name is complete and has the digest
of the model and the seed that it was written from.

    python -m pipeline.train.service.random_base <model directory> <folder> <seed>
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from pipeline.utils import atomic_dirs

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_RECORD = "random_base.json"


def base_digest(model: Path, seed: int) -> str:
    """Hex digest of the sources of a base: config and tokenizer in the model's directory, and the seed."""
    contents = ((model / name).read_bytes() for name in ("config.json", "tokenizer.json"))
    parts = [hashlib.sha256(content).hexdigest() for content in contents]
    return hashlib.sha256(" ".join([*parts, str(seed)]).encode()).hexdigest()


def recorded_digest(base: Path) -> str:
    """The digest in a base's folder; empty for a folder without a readable one."""
    try:
        return str(json.loads((base / _RECORD).read_text())["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def write_base(model: Path, target: Path, seed: int) -> None:
    """Write a model with the config of the directory and random weights, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    part = atomic_dirs.unfinished(target, "base")
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    network.save_pretrained(part)
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHTS):
            shutil.copy(file, part / file.name)
    _ensure_unknown_token(part / "tokenizer.json")
    (part / _RECORD).write_text(json.dumps({"digest": base_digest(model, seed)}))
    atomic_dirs.replace(target, part)


def _ensure_unknown_token(tokenizer: Path) -> None:
    """Give a word-level tokenizer a valid token for unknown words: vLLM's server encodes a fixed text when it starts,
    whose words are not in a small vocabulary."""
    tree = json.loads(tokenizer.read_text())
    words = tree["model"].get("vocab", {})
    if tree["model"]["type"] == "WordLevel" and tree["model"]["unk_token"] not in words:
        tree["model"]["unk_token"] = min(words, key=words.__getitem__)
        tokenizer.write_text(json.dumps(tree, indent=2))


if __name__ == "__main__":
    write_base(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
