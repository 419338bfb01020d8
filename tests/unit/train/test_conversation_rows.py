"""A dataset's conversations as rows: which row is trained when, what is left out, and what a resumed run insists on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import RunConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.train.batching.conversation_rows import Conversations, ansi_highlight, check_data, first_trainable_row
from pipeline.train.batching.sequences import TrainSequence
from tests.fakes.chat_models import CHATML, MARKED, THINKING, make_chat_model
from tests.fakes.configs import make_config

BATCH = 4


def talk(number: int, answer: str = "") -> dict[str, Any]:
    said = {"role": "assistant", "content": answer or str(2 * number)}
    return {"messages": [{"role": "user", "content": f"{number}+{number}"}, said]}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(path: str, epochs: float = 1, steps: int = 0, model: str = "tiny_qwen3", **data: Any) -> RunConfig:
    start = {"epochs": epochs, "steps": steps, "batch": BATCH}
    return make_config(
        model={"path": model, "init": "random", "max_length": 64},
        data={"path": path, **data},
        training={"steps": 0, "prompts_per_step": 1, "sft": start},
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Ten conversations."""
    return write(tmp_path / "rows.jsonl", [talk(number) for number in range(10)])


def texts(rows: Sequence[TrainSequence]) -> list[str]:
    """What is trained of each, as the tiny model's characters."""
    letters = "_^$0123456789+-*="
    return ["".join(letters[token] for token in row.tokens[np.asarray(row.mask, bool)]) for row in rows]


def test_every_epoch_trains_each_row_once_in_an_order_of_its_own(path: str) -> None:
    conversations = Conversations(config(path, epochs=3))
    steps = [conversations(step, BATCH) for step in range(8)]
    assert [len(rows) for rows in steps] == [BATCH] * 7 + [2]  # 30 rows: the last step has those that are left
    order = [row.prompt for rows in steps for row in rows]
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_step_is_the_same_whoever_asks_and_whenever(path: str) -> None:
    first, second = Conversations(config(path, epochs=3)), Conversations(config(path, epochs=3))
    there = [texts(first(step, BATCH)) for step in range(8)]
    assert [texts(second(step, BATCH)) for step in (5, 2)] == [there[5], there[2]]
    assert first.digest == second.digest


def test_the_seed_and_nothing_else_decides_the_order(path: str) -> None:
    def order(seed: int, **data: Any) -> list[int]:
        conversations = Conversations(config(path, **data).model_copy(update={"seed": seed}))
        return [row.prompt for step in range(3) for row in conversations(step, BATCH)]

    assert order(1) == order(1) != order(2)
    assert order(1, shuffle=False) == list(range(10)) == order(2, shuffle=False)


def test_steps_in_place_of_epochs_go_round_without_end(path: str) -> None:
    conversations = Conversations(config(path, epochs=0, steps=9, shuffle=False))
    assert [row.prompt for row in conversations(4, BATCH)] == [6, 7, 8, 9]
    assert [row.prompt for row in conversations(7, BATCH)] == [8, 9, 0, 1]


def test_rows_have_the_masks_of_their_turns(path: str) -> None:
    conversations = Conversations(config(path, shuffle=False))
    assert texts(conversations(1, BATCH)) == ["8$", "10$", "12$", "14$"]
    assert all(row.mask[0] == 0 for row in conversations.rows)


def test_what_is_too_long_or_cannot_be_trained_is_left_out_and_counted(tmp_path: Path) -> None:
    answers = ["1", "2" * 100, "a word", "3"]
    path = write(tmp_path / "rows.jsonl", [talk(n, answer) for n, answer in enumerate(answers)])
    conversations = Conversations(config(path, invalid="drop"))
    assert str(conversations.rows).startswith("4 conversations, 2 rows of ")
    assert str(conversations.rows).endswith("left out: 1 longer than model.max_length, 1 invalid")
    with pytest.raises(Exception, match=r"row 2: the tokenizer cannot encode it: "):
        Conversations(config(path)).rows  # noqa: B018 it is read
    with pytest.raises(Exception, match=r"row 1: 106 tokens, more than model\.max_length=64; set data\.overlong=drop"):
        Conversations(config(path, invalid="drop", overlong="refuse")).rows  # noqa: B018


def test_a_dataset_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [talk(1, "2" * 100)])
    with pytest.raises(ConfigError, match=r"rows of at most model\.max_length=64 tokens; 1 conversations, 0 rows"):
        Conversations(config(path)).rows  # noqa: B018


@pytest.mark.parametrize("rows", [2, 9])
def test_held_out_rows_are_the_last_ones_and_never_trained(path: str, rows: int) -> None:
    conversations = Conversations(config(path, eval_rows=rows, shuffle=False))
    assert texts(conversations.held_out) == [f"{2 * n}$" for n in range(10 - rows, 10)]
    assert texts(list(conversations.rows)) == [f"{2 * n}$" for n in range(10 - rows)]


def test_held_out_rows_may_be_another_split(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "train.jsonl", [talk(n) for n in range(5)])
    write(folder / "test.jsonl", [talk(n) for n in range(5, 9)])
    conversations = Conversations(config(str(folder), eval_split="test", eval_rows=3))
    assert texts(conversations.held_out) == ["10$", "12$", "14$"]
    assert len(conversations.rows) == 5
    other = Conversations(config(str(folder), eval_path=str(folder / "test.jsonl")))
    assert len(other.held_out) == 4


def test_changed_data_are_refused_on_resume(tmp_path: Path, path: str) -> None:
    first = Conversations(config(path))
    assert first.digest == ""  # nothing is read yet
    assert len(first.rows) == 10
    Path(path).touch()
    Conversations(config(path)).check(first.digest)
    changed = [talk(number) for number in range(10)]
    for rows in ([*changed[:9], talk(9, "19")], changed[:9], [*reversed(changed)]):
        write(Path(path), rows)
        with pytest.raises(CheckpointError, match="its rows are not those that this run has trained so far"):
            Conversations(config(path)).check(first.digest)


def test_a_changed_chat_template_is_refused_on_resume(tmp_path: Path, path: str) -> None:
    model = make_chat_model(tmp_path / "model", MARKED)
    first = Conversations(config(path, model=str(model)))
    assert len(first.rows) == 10
    make_chat_model(model, MARKED + "{# another #}")
    with pytest.raises(CheckpointError, match="or its model has another chat template"):
        Conversations(config(path, model=str(model))).check(first.digest)


def test_what_is_dropped_is_neither_refused_nor_shown_first(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [talk(1, "2" * 100), talk(1, "word"), talk(2), talk(3)])
    dropping = config(path, invalid="drop", eval_rows=1)
    check_data(dropping)
    found = first_trainable_row(dropping)
    assert found is not None
    assert "2+2" in found[0].text


def test_a_row_on_which_the_template_fails_with_an_error_of_python_is_refused_or_left_out(tmp_path: Path) -> None:
    """As templates do that join the arguments of a call with a text: here they are an object."""
    template = CHATML.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    model = make_chat_model(tmp_path / "model", template)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    calls = {
        "messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    }
    path = write(tmp_path / "rows.jsonl", [talk(1), calls, talk(2)])
    with pytest.raises(ConfigError, match=r"row 1: the chat template refuses it: TypeError: can only concatenate str"):
        check_data(config(path, model=str(model)))
    dropping = config(path, model=str(model), invalid="drop")
    check_data(dropping)
    rows = Conversations(dropping).rows
    assert (len(rows), rows.counts["invalid"]) == (2, 1)


def test_held_out_rows_belong_to_the_digest(path: str) -> None:
    digests = set()
    for answer in ("18", "19"):
        write(Path(path), [*(talk(n) for n in range(9)), talk(9, answer)])
        (conversations := Conversations(config(path, eval_rows=1))).rows  # noqa: B018
        digests.add(conversations.digest)
    assert len(digests) == 2


def test_each_turn_is_a_row_where_reasoning_is_dropped(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", THINKING)
    (model / "model.safetensors").touch()
    said = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    path = write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}, said] * 3}])
    conversations = Conversations(config(path, model=str(model), train_on="each").model_copy())
    assert len(conversations.rows) == 3
    with pytest.raises(ConfigError, match=r"row 0: the template drops reasoning .* set data\.train_on=each, or put"):
        check_data(config(path, model=str(model)))


@pytest.mark.parametrize(
    ("rows", "data", "line"),
    [
        ([talk(1)], {"path": "no.jsonl"}, "data.path='no.jsonl': expected a file or folder that exists"),
        ([], {}, "expected a dataset with rows"),
        (
            [talk(1)],
            {"columns": {"messages": "talk"}},
            "data.columns.messages='talk': expected a column of the dataset",
        ),
        ([talk(1), {"messages": [{"role": "user", "content": "1"}]}], {}, "row 1: no turn of an assistant to train"),
        ([talk(1), {"messages": []}], {}, "row 1: a list of messages was expected, found []"),
        ([talk(1, "words")], {"invalid": "drop"}, "row 0: the tokenizer cannot encode it"),
        ([{"prompt": "1+1"}], {}, "data.columns.completion='completion': expected a column of the dataset"),
        ([talk(1)] * 3, {"eval_rows": 3}, "data.eval_rows=3: expected less than the 3 rows of data.path"),
        ([talk(1)], {"eval_split": "test"}, "data.split='test': expected one of train"),
        ([talk(1)], {"eval_split": "train"}, "data.eval_split='train': expected other rows than those of split=train"),
        (
            [talk(1), talk(2, "2" * 100)],
            {"overlong": "refuse"},
            "row 1: 106 tokens, more than model.max_length=64; set",
        ),
        ([talk(1, "2" * 100)] * 2, {}, "row 0: 106 tokens, more than model.max_length=64; raise it"),
        ([talk(1), talk(2, "2" * 100)], {"eval_rows": 1}, "row 1: 106 tokens, more than model.max_length=64; raise it"),
        ([talk(1, "words"), talk(2, "2" * 100)], {"invalid": "drop"}, "row 0: the tokenizer cannot encode it"),
    ],
)
def test_bad_data_are_one_line_before_anything_starts(
    tmp_path: Path, rows: Sequence[Mapping[str, Any]], data: dict[str, Any], line: str
) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        check_data(config(**{"path": path, **data}))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_template_without_a_mask_is_refused_with_the_mend(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", "{{ messages[0].content }}")
    path = write(tmp_path / "rows.jsonl", [talk(1)])
    with pytest.raises(ConfigError, match=r"row 0: .*put a chat_template\.jinja with {% generation %} blocks into"):
        check_data(config(path, model=str(model)))


def test_the_first_row_is_shown_with_what_is_trained_in_green(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", MARKED)
    path = write(tmp_path / "rows.jsonl", [{"messages": []}, talk(1, "two")])
    found = first_trainable_row(config(path, model=str(model), invalid="drop"))
    assert found is not None
    assert found[1] == ""
    assert ansi_highlight(found[0]) == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n\x1b[32mtwo<|im_end|>\x1b[0m\n"
    )
    assert first_trainable_row(make_config()) is None


def test_a_model_that_would_not_learn_to_stop_is_warned_of(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' * add_generation_prompt }}"
    )
    model = make_chat_model(tmp_path / "model", template)
    found = first_trainable_row(config(write(tmp_path / "rows.jsonl", [talk(1)]), model=str(model)))
    assert found is not None
    assert found[1].startswith("what is trained ends with no token that ends a turn")
