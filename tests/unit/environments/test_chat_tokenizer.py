"""The tokens of transformers, from files as transformers and others write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.environments.chat_tokenizer import ChatTokenizer
from tests.fakes.chat_models import CHATML, make_chat_model

TALK = [{"role": "user", "content": "1 + 2 = 3 .\n" * 40}, {"role": "assistant", "content": "the quick brown fox"}]
TOKENS = ("bos", "unk", "sep", "pad", "cls", "mask", "image")
ALL_TOKENS = "|".join(f"{{{{ {name}_token }}}}" for name in TOKENS)
END = {"content": "<|endoftext|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
ADDED = END | {"__type": "AddedToken"}


def tokens_of_transformers(folder: Path) -> tuple[str, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    return text, tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("use", ["truncation", "padding"])
def test_the_truncation_and_padding_of_a_files_last_use_do_not_apply(tmp_path: Path, use: str) -> None:
    folder = make_chat_model(tmp_path / "model", CHATML)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    if use == "truncation":
        stored["truncation"] = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    else:
        padding = {"strategy": {"Fixed": 2048}, "direction": "Right", "pad_to_multiple_of": None}
        stored["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    file.write_text(json.dumps(stored))
    assert ChatTokenizer(folder).prompt(TALK) == tokens_of_transformers(folder)[1]


@pytest.mark.parametrize(
    ("settings", "older"),
    [
        ({"sep_token": "<|endoftext|>", "cls_token": "<|im_start|>", "mask_token": ADDED}, None),
        ({"extra_special_tokens": {"image_token": "<|endoftext|>"}}, None),
        ({"extra_special_tokens": ["<|endoftext|>"]}, None),
        ({"model_specific_special_tokens": {"image_token": "<|endoftext|>"}}, None),
        ({}, {"bos_token": "<|endoftext|>", "unk_token": END}),
        ({"bos_token": "<|im_end|>"}, {"bos_token": END}),
    ],
)
def test_a_template_gets_the_special_tokens_that_transformers_gives_it(
    tmp_path: Path, settings: dict[str, Any], older: dict[str, Any] | None
) -> None:
    folder = make_chat_model(tmp_path / "model", ALL_TOKENS + CHATML)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if older is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
    chat, (text, tokens) = ChatTokenizer(folder), tokens_of_transformers(folder)
    assert chat.render(TALK) == text
    assert chat.prompt(TALK) == tokens
