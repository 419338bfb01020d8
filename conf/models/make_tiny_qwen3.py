"""Makes `conf/models/tiny_qwen3`: the smallest model that is still shaped like a real one.

Owns its configuration, its character vocabulary and its chat template; there are no weights, a run starts from random
ones. Promises that a token is exactly one character, and that a second run writes the same files.

    python conf/models/make_tiny_qwen3.py
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

DIRECTORY = Path(__file__).parent / "tiny_qwen3"
PAD, BOS, EOS = "_", "^", "$"
VOCABULARY = [PAD, BOS, EOS, *"0123456789", *"+-*", "="]
MAX_LENGTH = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}={{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; a character outside the vocabulary is an error, never a silent unknown."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    )


def make_config() -> Qwen3Config:
    """0.79M parameters: 4 layers of 4 query heads and 2 key-value heads."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.1,  # about 1/√hidden_size: with the default 0.02 some seeds learn several times slower
        tie_word_embeddings=False,
        use_sliding_window=False,
        dtype="float32",
        **_special_tokens(),
    )


def _special_tokens() -> dict[str, int]:
    named = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return {name: VOCABULARY.index(token) for name, token in named.items()}


def main() -> None:
    make_config().save_pretrained(DIRECTORY)
    make_tokenizer().save_pretrained(DIRECTORY, save_jinja_files=False)
    GenerationConfig(do_sample=True, **_special_tokens()).save_pretrained(DIRECTORY)


if __name__ == "__main__":
    main()
