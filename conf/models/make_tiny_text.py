"""Makes `conf/models/tiny_text`: the tiny model of `make_tiny_qwen3`, with letters and turns.

Owns its vocabulary of printable ASCII and its chat template, which knows systems, tools and what an assistant said;
there are no weights, a run starts from random ones. Promises that a token is exactly one character, one that it does
not know included, and that a second run writes the same files.

    python conf/models/make_tiny_text.py
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

DIRECTORY = Path(__file__).parent / "tiny_text"
SPECIAL = PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY = [*SPECIAL, "\n", *map(chr, range(32, 127))]
MAX_LENGTH = 1024

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "A:{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['role'][0] | upper }}:{{ message['content'] }}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    words = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    )


def make_config() -> Qwen3Config:
    """0.81M parameters, in the shape of `tiny_qwen3`."""
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
        initializer_range=0.1,
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
