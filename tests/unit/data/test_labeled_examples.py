"""Completions with a label for KTO: the forms of their rows, the order of pairs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.train.batching.labeled_rows import LabeledCompletions
from pipeline.train.batching.preference_rows import check_pairs
from tests.unit.data.test_preference_examples import GOOD, RIGHT, USER, config, write

KTO = {"loss": "kto"}
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "1+1=", "completion": "2", "label": True},
    "messages": {"prompt": [USER], "completion": [RIGHT], "label": True},
    "a conversation": {"messages": [USER, RIGHT], "label": True},
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_row_with_its_label(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", FORMS[name], FORMS[name] | {"label": False})
    first, second = LabeledCompletions(config(path, preference=KTO, data={"shuffle": False}))(0, 2)
    (text,) = LabeledCompletions(config(write(tmp_path / "text.jsonl", FORMS["texts"]), preference=KTO))(0, 1)
    assert first.tokens.tolist() == second.tokens.tolist() == text.tokens.tolist()
    assert first.mask.tolist() == second.mask.tolist() == text.mask.tolist()
    assert 0 < first.counted < len(first)
    assert (first.label, second.label) == (True, False)


def test_a_pair_is_two_examples_the_desirable_ones_of_all_pairs_first(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "13"} for n in range(3)]
    rows = LabeledCompletions(config(write(tmp_path / "pairs.jsonl", *pairs), preference=KTO, data={"shuffle": False}))
    assert rows.size == 6
    assert [row.label for row in rows(0, 6)] == [True] * 3 + [False] * 3
    prompts = [tuple(row.tokens[: int(row.mask.argmax())]) for row in rows(0, 6)]
    assert prompts[:3] == prompts[3:]
    assert all(one != other for one, other in zip(prompts, prompts[1:] + prompts[:1], strict=True))


def test_the_digest_depends_on_the_labels(tmp_path: Path) -> None:
    digests = set()
    for label in (True, False):
        made = LabeledCompletions(
            config(write(tmp_path / "rows.jsonl", FORMS["texts"] | {"label": label}), preference=KTO)
        )
        assert made.size == 1
        digests.add(made.digest)
    assert len(digests) == 2


@pytest.mark.parametrize("label", [None, 1, "true"])
def test_a_label_that_is_neither_true_nor_false_is_one_line_with_its_row(label: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", FORMS["texts"], FORMS["texts"] | {"label": label})
    with pytest.raises(ConfigError, match=r"row 1: label is .*, not true or false.*line 2") as caught:
        check_pairs(config(path, preference=KTO))
    assert "\n" not in str(caught.value)
    dropped = LabeledCompletions(config(path, preference=KTO, data={"invalid": "drop"}))
    assert (dropped.size, dropped.rows.counts["invalid"]) == (1, 1)


def test_data_without_labels_and_pairs_are_refused_with_their_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "1", "completion": "2", "good": True})
    with pytest.raises(ConfigError, match=r"data\.columns\.label='label'.*good"):
        check_pairs(config(path, preference=KTO))
    check_pairs(config(path, preference=KTO, data={"columns": {"label": "good"}}))
    path = write(tmp_path / "prompts.jsonl", {"prompt": "1", "label": True})
    with pytest.raises(ConfigError, match=r"data\.columns\.completion"):
        check_pairs(config(path, preference=KTO))
    long = write(tmp_path / "long.jsonl", GOOD, {"prompt": "1+1=", "chosen": "2", "rejected": "3" * 90})
    kept = LabeledCompletions(config(long, preference=KTO))
    assert kept.size == 2, "a pair with a completion that is too long is left out whole"
