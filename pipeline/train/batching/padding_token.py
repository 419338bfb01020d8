"""The token that a sequence classifier of transformers takes for padding.

Owns the rule for models that name none. The classifier scores the last token that is no padding, also if it is given no
mask. So where a conversation ends in this token, as with Mistral's `</s>`, it scores the token before.
"""

from pathlib import Path
from typing import Any


def padding_token(config: Any) -> int | None:
    """The token of a transformers config; its end of text if it names no padding, None if it names neither."""
    settings = config.get_text_config()
    if settings.pad_token_id is not None:
        return int(settings.pad_token_id)
    ends: int | list[int] | None = settings.eos_token_id
    return ends[0] if isinstance(ends, list) else ends


def read_padding_token(directory: Path) -> int | None:
    """The token of the model in a directory."""
    from transformers import AutoConfig  # takes seconds, and only reward models need it

    return padding_token(AutoConfig.from_pretrained(directory))
