"""Makes `conf/models/tiny_qwen3` and `conf/models/tiny_text`: the smallest models with the structure of real ones.

Owns their configuration, their character vocabularies and their chat templates. They have no weights; a run starts from
random ones. The vocabulary of `tiny_qwen3` is digits and signs: any other character is an error, never an unknown
token. The vocabulary of `tiny_text` is printable ASCII; its template has turns of system, user, assistant and tools.
Promises that a token is exactly one character, and that a second run writes the same files.

    python conf/models/make_tiny.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

FOLDER = Path(__file__).parent

DIGITS_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}={{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
TEXT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "A:{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['role'][0] | upper }}:{{ message['content'] }}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """The settings of one of the models.

    Attributes:
        special: its special tokens, by the names that transformers gives them.
        characters: its other tokens; their ids follow those of the special tokens.
        template: its chat template.
        max_length: most tokens of a conversation.
        initializer_range: about 1/√hidden_size: with the default 0.02 some seeds learn several times slower.
    """

    special: Mapping[str, str]
    characters: str
    template: str
    max_length: int
    initializer_range: float = 0.1

    @property
    def vocabulary(self) -> list[str]:
        """All tokens, by id."""
        return [*self.special.values(), *self.characters]

    @property
    def special_ids(self) -> dict[str, int]:
        """`pad_token_id` and the like, for the config; an unknown token has none there."""
        ids = {name: index for index, name in enumerate(self.special)}
        return {f"{name}_id": ids[name] for name in ("pad_token", "bos_token", "eos_token")}

    def config(self) -> Qwen3Config:
        """About 0.8M parameters: 4 layers of 4 query heads and 2 key-value heads."""
        return Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=len(self.vocabulary),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=self.max_length,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            initializer_range=self.initializer_range,
            tie_word_embeddings=False,
            use_sliding_window=False,
            dtype="float32",
            **self.special_ids,
        )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a character."""
        words = {token: index for index, token in enumerate(self.vocabulary)}
        unknown = self.special.get("unk_token")
        tokenizer = Tokenizer(WordLevel(words, unk_token=unknown) if unknown else WordLevel(words))
        every = r"[\s\S]" if "\n" in self.characters else "."
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(every), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True) for token in self.special.values() if len(token) > 1]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=self.template,
            model_max_length=self.max_length,
            **self.special,
        )

    def save(self, folder: Path) -> None:
        """Write the model's directory."""
        self.config().save_pretrained(folder)
        self.tokenizer().save_pretrained(folder, save_jinja_files=False)
        GenerationConfig(do_sample=True, **self.special_ids).save_pretrained(folder)


TINY = {
    "tiny_qwen3": TinyModel(
        special={"pad_token": "_", "bos_token": "^", "eos_token": "$"},
        characters="0123456789+-*=",
        template=DIGITS_TEMPLATE,
        max_length=512,
    ),
    "tiny_text": TinyModel(
        special={"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        characters="\n" + "".join(map(chr, range(32, 127))),
        template=TEXT_TEMPLATE,
        max_length=1024,
    ),
}


def main(folder: Path = FOLDER) -> None:
    for name, model in TINY.items():
        model.save(folder / name)


if __name__ == "__main__":
    main()
