"""A dataset's labeled completions as rows, by step.

Owns the rows of labeled completions: one for each, with its label. Both completions of a pair are separate examples, as
in TRL's `unpair_preference_dataset`: first the desirable ones of all pairs, then the undesirable ones, so that
neighbors have different prompts. Order, digest and split are those of `conversation_rows`. Must not know ranks, models
or losses.
"""

from collections.abc import Callable

from pipeline.config import DataConfig, RunConfig
from pipeline.data.dataset_digest import DatasetDigest
from pipeline.data.labeled_examples import LabeledCompletion, LabeledExamples
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

LabeledRows = list[tuple[MaskedText, bool]]


class LabeledPart(ExamplesPart[LabeledExamples, tuple[LabeledCompletion, ...], LabeledRows]):
    """Some rows of a dataset."""

    def make(self, index: int, masker: AssistantMasker) -> tuple[tuple[LabeledCompletion, ...], LabeledRows]:
        """The completions at `index`, and their rows with labels; `RowError` if no token of one can be trained."""
        completions = self.examples[index]
        rows: LabeledRows = []
        for completion in completions:
            try:
                rows += [(text, completion.label) for text in masker.rows(completion.conversation)]
            except MaskError as error:
                raise self.examples.wrong(index, str(error)) from None
        return completions, rows


class LabeledCompletions(Conversations):
    """The rows of a run's labeled completions: callable (step, count) → the rows of `count` completions."""

    def _read_parts(self, masker: AssistantMasker) -> tuple[TokenizedDataset, Callable[[], TokenizedDataset]]:
        train, held_out = labeled_split(self._config.data)
        rows = _read(train, masker, self._config, self._content, self._beat)
        return rows, lambda: _read(held_out, masker, self._config, self._content, self._beat)


def labeled_split(data: DataConfig) -> tuple[LabeledPart, LabeledPart]:
    """The training part and the eval part of the rows; errors as of `split_examples`."""
    train, held_out = split_examples(data, LabeledExamples.open)
    return LabeledPart(*train), LabeledPart(*held_out)


def check_labeled(config: RunConfig) -> None:
    """Raise `ConfigError` unless the first rows of the config's dataset can be trained by the model."""
    check_first_rows(labeled_split(config.data), _read, config, "completions")


def _read(
    part: LabeledPart,
    masker: AssistantMasker,
    config: RunConfig,
    content: DatasetDigest | None = None,
    beat: Callable[[], None] = lambda: None,
) -> TokenizedDataset:
    """The rows of a part; `RowError` for the first row that is refused."""
    rows = TokenizedDataset()
    second: LabeledRows = []  # undesirable completions of pairs, after all others
    for index, completions, labeled in trainable(part, masker, config, rows, beat):
        if content:
            for completion in completions:
                conversation = completion.conversation
                content.add({"messages": conversation.messages, "tools": conversation.tools, "label": completion.label})
        overlong = next((text for text, _ in labeled if not fits(text, config)), None)
        if overlong:
            refused = part.examples.wrong(index, too_long(overlong, config))
            rows.leave_out("longer than model.max_length", config.data.overlong, refused)
            continue
        is_pair = len(completions) > 1
        second += [(text, label) for text, label in labeled if is_pair and not label]
        for text, label in labeled:
            if label or not is_pair:
                rows.add(text, label)
    for text, label in second:
        rows.add(text, label)
    return rows
