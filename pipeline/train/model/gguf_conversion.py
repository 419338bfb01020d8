"""Converts a GGUF file to a Hugging Face directory with bfloat16 weights.

    python -m pipeline.train.model.gguf_conversion FILE.gguf DIRECTORY

Needs the library `gguf`, with which transformers reads such files.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, directory: Path) -> None:
    """Write config, tokenizer and weights of `file` to `directory`; quantized weights are dequantized."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # A config that still names the quantization makes `save_pretrained` refuse the model.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
