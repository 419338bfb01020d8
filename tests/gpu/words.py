"""The work of the measurements on GPUs: prompts of words, completions of words, a model that knows no others.

Random weights and a vocabulary of 32,000 words: what is measured is how fast the loop turns, on any machine, without a
download. The reward can be had from the text alone, and rises when training works.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.environments.task_protocol import Prompt, Task, TaskOptions, user_prompt

if TYPE_CHECKING:
    from tests.gpu.workload import Workload  # imports torch, which launchers and actors that load the task need not

PAD, END = 0, 2
WRITE_SECONDS = 300
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class WordsOptions(TaskOptions):
    """How long prompts are."""

    prompt: Annotated[int, Field(gt=0)] = Field(16, description="Words of a prompt.")


class Words(Task):
    """Reward: the share of words with an even number."""

    name = "words"
    Options = WordsOptions
    options: WordsOptions

    def __len__(self) -> int:
        return 1 << 20

    def prompt(self, index: int) -> Prompt:
        return self._asked(f"{self.seed} {index}")

    def held_out(self) -> Sequence[Prompt]:
        return [self._asked(f"held out {index}") for index in range(8)]

    def reward(self, prompt: Prompt, text: str) -> float:
        words = text.split()
        return sum(word[-1] in "02468" for word in words) / max(len(words), 1)

    def _asked(self, seed: str) -> Prompt:
        draw = Random(seed)
        return user_prompt(" ".join(f"w{draw.randrange(3, 30_000)}" for _ in range(self.options.prompt)))


def write_model(path: Path, workload: "Workload", ends: int = 1) -> None:
    """A directory with a config, a tokenizer of words and no weights; so many token ids, from `END` on, end a sample.

    Random weights draw tokens nearly alike: with a share p of them ending it, a sample has 1/p tokens on average, and
    lengths have the long tail of a geometric distribution.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    workload.write_model(path)
    names = ["<pad>", "<begin>", "<end>", *(f"w{index}" for index in range(3, workload.model["vocab_size"]))]
    tokenizer = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=names[PAD], eos_token=names[END], chat_template=TEMPLATE
    ).save_pretrained(path, save_jinja_files=False)
    GenerationConfig(eos_token_id=[*range(END, END + ends)], pad_token_id=PAD).save_pretrained(path)


def write_whole_model(path: Path, workload: "Workload", ends: int = 1) -> None:
    """`write_model`, and random weights: those who have to begin alike read them, and adapters need a base.

    In a process of its own: the GPU is free when this returns.
    """
    write_model(path, workload, ends)
    subprocess.run([sys.executable, "-m", __name__, str(path)], check=True, timeout=WRITE_SECONDS)


def write_weights(path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    model.save_pretrained(path)


if __name__ == "__main__":
    write_weights(Path(sys.argv[1]))
