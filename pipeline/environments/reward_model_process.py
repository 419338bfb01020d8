"""A process that scores conversations by a reward model, on the CPU.

Owns the model: its loading, the text of a conversation by its own chat template, and the forward pass. Promises the
number that transformers' sequence classifier gives for the same tokens, in float32 and independent of the batch up to
rounding; and one line with the reason for a conversation that cannot be rendered or is too long. It is the only module
of this package that loads torch and transformers. `pipeline.environments.reward_model_queue` starts and ends it.

It receives a `RewardModelConfig` and replies None, or the reason why the model cannot be loaded. Then each list of
`Chat` is answered by one list, with a score or a reason for each chat.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.task_keys import RewardModelConfig
from pipeline.data.chat_messages import Message
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.guarded_call import call_guarded
from pipeline.environments.reward_functions import number
from pipeline.environments.reward_model import KEY, check_reward_model, position_limit, read_settings
from pipeline.environments.worker_process import Channel
from pipeline.errors import ConfigError, RollcallError
from pipeline.utils.subprocesses import adopt_orphans


@dataclass(frozen=True)
class Chat:
    """A prompt and its completion as messages, with the JSON schemas of the prompt's tools."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


class RewardModel:
    """A sequence classifier with one label, in float32."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Load the model; `ConfigError` if its directory is unusable or lacks a weight of the classifier."""
        check_reward_model(config)  # before the seconds of these imports
        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        # The actor's environment has OMP_NUM_THREADS=1, for its event loop.
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        self._torch = torch
        self._limit = config.max_length or position_limit(read_settings(config)) or sys.maxsize
        self._chat = ChatTokenizer(Path(config.path))
        self._network, report = AutoModelForSequenceClassification.from_pretrained(
            config.path, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
        if report["missing_keys"]:
            hint = f"its files lack {', '.join(sorted(report['missing_keys'])[:3])}"
            raise ConfigError(KEY, config.path, "all weights of the classifier", hint)
        self._network.eval()
        self._padding: int | None = self._network.config.get_text_config().pad_token_id

    def scores(self, chats: Sequence[Chat]) -> list[float | str]:
        """The score of each chat, or why it has none, from one forward pass."""
        encoded = [self._tokens(chat) for chat in chats]
        rows = [tokens for tokens in encoded if not isinstance(tokens, str)]
        if self._padding is None:
            # transformers then scores the last token of one row, and refuses several.
            values = iter([value for row in rows for value in self._forward([row])])
        else:
            values = iter(self._forward(rows) if rows else [])
        return [one if isinstance(one, str) else number("reward model's score", next(values)) for one in encoded]

    def _tokens(self, chat: Chat) -> list[int] | str:
        tokens = call_guarded(
            "reward model's chat template raised",
            lambda: self._chat.encode(self._chat.template.render(chat.messages, chat.tools, asks=False)),
        )
        if isinstance(tokens, list) and len(tokens) > self._limit:
            return f"conversation too long for the reward model: {len(tokens)} tokens, at most {self._limit}"
        return tokens

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The logit of each row, of a batch that is padded at the right."""
        torch, width = self._torch, max(map(len, rows))
        tokens_BT = torch.full((len(rows), width), self._padding or 0)
        mask_BT = torch.zeros((len(rows), width), dtype=torch.long)
        for index, row in enumerate(rows):
            tokens_BT[index, : len(row)] = torch.tensor(row)
            mask_BT[index, : len(row)] = 1
        with torch.inference_mode():
            logits_B1 = self._network(input_ids=tokens_BT, attention_mask=mask_BT).logits
        return [float(value) for value in logits_B1.squeeze(1)]


def main() -> None:
    """Score until the parent closes the connection."""
    adopt_orphans()
    channel = Channel()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            model = RewardModel(channel.receive())
        except RollcallError as error:
            channel.reply(str(error))
            sys.exit(error.exit_code)
        channel.reply(None)
        while True:
            chats = channel.receive()
            scores = call_guarded("reward model raised", lambda: model.scores(chats))  # noqa: B023
            channel.reply([scores] * len(chats) if isinstance(scores, str) else scores)


if __name__ == "__main__":
    main()
