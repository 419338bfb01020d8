"""Model directories with a byte-level tokenizer and chat templates of the shapes that families have."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n# Tools' }}"
    "{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}{%- endfor %}"
)
_HEAD = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"

CHATML = (
    _TOOLS + "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}" + _CALLS + "{{ '<|im_end|>\n' }}"
    "{%- endfor %}" + _HEAD
)
"""As many families write it; without marks."""

MARKED = (
    _TOOLS + "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}" + _CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{%- endfor %}" + _HEAD
)
"""The same text, with marks."""

THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{%- endfor %}" + _HEAD
)
"""Reasoning of the turns before the last question is dropped, as Qwen3's does."""

TEMPLATES = {"chatml": CHATML, "marked": MARKED, "thinking": THINKING}
_CORPUS = (
    "the quick brown fox jumps over the lazy dog\n",
    "user assistant system tool\n",
    "1 + 2 = 3 .\n\n",
    "  def f(x):\n",
)


def make_chat_model(folder: Path, template: str = CHATML) -> Path:
    """A directory with tokenizer, template and a config; no weights."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    return folder
