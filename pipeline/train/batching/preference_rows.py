"""A dataset's preference pairs as rows, by step.

Owns the rows of a pair: the chosen completion with its prompt, then the rejected one. Promises that a pair is complete:
if one of its rows is too long or cannot be masked, the pair is left out. Order, digest and split are those of
`conversation_rows`. Must not know ranks, models or losses.

A reward model scores a whole text, up to the last token that is no padding to a sequence classifier
(`padding_token`). A critic's value is that of the tokens before a counted one, so each row for a reward model ends with
one more token, its last one again, and only this token counts: its value is that of all tokens before.
"""

from collections.abc import Callable
from dataclasses import replace

from pipeline.config import DataConfig, RunConfig
from pipeline.config.model_directory import model_directory
from pipeline.data.dataset_digest import DatasetDigest
from pipeline.data.preference_examples import PreferenceExamples, PreferencePair
from pipeline.environments.assistant_masks import AssistantMasker, MaskedText, MaskError
from pipeline.train.batching.conversation_rows import (
    Conversations,
    ExamplesPart,
    TokenizedDataset,
    check_first_rows,
    fits,
    split_examples,
    too_long,
    trainable,
)
from pipeline.train.batching.labeled_rows import check_labeled
from pipeline.train.batching.padding_token import read_padding_token


class PairsPart(ExamplesPart[PreferenceExamples, PreferencePair, list[MaskedText]]):
    """Some pairs of a dataset."""

    def make(self, index: int, masker: AssistantMasker) -> tuple[PreferencePair, list[MaskedText]]:
        """The pair at `index` and its two rows; `RowError` if no token of one can be trained."""
        pair = self.examples[index]
        rows: list[MaskedText] = []
        for name, conversation in zip(("chosen", "rejected"), pair.conversations, strict=True):
            try:
                rows += masker.rows(conversation)
            except MaskError as error:
                raise self.examples.wrong(index, f"{name}: {error}") from None
        return pair, rows


class PreferencePairs(Conversations):
    """The rows of a run's preference pairs: callable (step, count) → the rows of `count` pairs, each chosen row before
    its rejected one."""

    rows_per_example = 2

    def _read_parts(self, masker: AssistantMasker) -> tuple[TokenizedDataset, Callable[[], TokenizedDataset]]:
        train, held_out = pairs_split(self._config.data)
        rows = _read(train, masker, self._config, self._content, self._beat)
        return rows, lambda: _read(held_out, masker, self._config, self._content, self._beat)


def pairs_split(data: DataConfig) -> tuple[PairsPart, PairsPart]:
    """The training part and the eval part of the pairs; errors as of `split_examples`."""
    train, held_out = split_examples(data, PreferenceExamples.open)
    return PairsPart(*train), PairsPart(*held_out)


def check_pairs(config: RunConfig) -> None:
    """Raise `ConfigError` unless the first pairs, or labeled completions, of the config's dataset can be trained by the
    model."""
    if not config.has_preference:
        return
    if config.preference.formula.is_labeled:
        check_labeled(config)
    else:
        check_first_rows(pairs_split(config.data), _read, config, "pairs")


def _read(
    part: PairsPart,
    masker: AssistantMasker,
    config: RunConfig,
    content: DatasetDigest | None = None,
    beat: Callable[[], None] = lambda: None,
) -> TokenizedDataset:
    """The rows of a part's pairs; `RowError` for the first pair that is refused."""
    rows, is_reward_model = TokenizedDataset(), config.preference.formula.is_reward_model
    padding = read_padding_token(model_directory(config.model)) if is_reward_model else None
    for index, pair, texts in trainable(part, masker, config, rows, beat):
        if content:
            content.add({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected, "tools": pair.tools})
        if is_reward_model:
            texts = [_scored(text, padding) for text in texts]
        overlong = next((text for text in texts if not fits(text, config)), None)
        if overlong:
            refused = part.examples.wrong(index, too_long(overlong, config))
            rows.leave_out("longer than model.max_length", config.data.overlong, refused)
            continue
        for text in texts:
            rows.add(text)
    return rows


def _scored(text: MaskedText, padding: int | None) -> MaskedText:
    """The row for a reward model: without padding at its end, and with one more token, which alone counts."""
    end = len(text.tokens)
    while end > 1 and text.tokens[end - 1] == padding:
        end -= 1
    return replace(text, tokens=(*text.tokens[:end], text.tokens[end - 1]), mask=(*(0 for _ in range(end)), 1))
