"""Datasets as examples: every form that a row may have, and one line for what cannot be used."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.data_keys import ColumnsConfig, SourceConfig
from pipeline.data import Examples
from pipeline.data.dataset_digest import DatasetDigest
from pipeline.data.examples import RowError
from pipeline.errors import ConfigError

ASKED, SAID = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSONL; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def examples(tmp_path: Path, *rows: Mapping[str, Any], **settings: Any) -> Examples:
    return Examples.open(SourceConfig(path=write(tmp_path / "rows.jsonl", rows), **settings))


def test_a_conversation_keeps_its_other_columns_for_a_reward(tmp_path: Path) -> None:
    rows = examples(tmp_path, {"messages": [ASKED, SAID], "answer": 2, "level": "easy"})
    assert len(rows) == 1
    assert rows[0].conversation.messages == (ASKED, SAID)
    assert rows[0].prompt == (ASKED,)
    assert rows[0].columns == {"answer": 2, "level": "easy"}


def test_the_prompt_of_a_conversation_ends_before_its_last_answer(tmp_path: Path) -> None:
    rows = examples(tmp_path, {"messages": [ASKED, SAID, ASKED, SAID]})
    assert rows[0].prompt == (ASKED, SAID, ASKED)
    assert rows[0].conversation.turns == (1, 3)


@pytest.mark.parametrize("completion", ["2", [SAID], SAID], ids=["text", "messages", "message"])
def test_a_prompt_with_its_completion(tmp_path: Path, completion: Any) -> None:
    rows = examples(tmp_path, {"prompt": "1+1", "completion": completion})
    assert rows[0].conversation.messages == (ASKED, SAID)
    assert rows[0].conversation.turns == (1,)
    assert rows.answered


def test_answers_within_a_prompt_are_not_trained(tmp_path: Path) -> None:
    rows = examples(tmp_path, {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]})
    assert rows[0].conversation.turns == (3,)
    assert len(rows[0].prompt) == 3


def test_prompts_alone_are_a_dataset_for_rl(tmp_path: Path) -> None:
    rows = examples(tmp_path, {"question": "1+1", "answer": "2"}, columns=ColumnsConfig(prompt="question"))
    assert rows[0].prompt == (ASKED,)
    assert rows[0].columns == {"answer": "2"}
    assert not rows.answered


def test_a_named_prompt_is_read_beside_messages(tmp_path: Path) -> None:
    row = {"messages": [ASKED, SAID, ASKED, SAID], "question": "1+1"}
    assert examples(tmp_path, row, columns=ColumnsConfig(prompt="question"))[0].prompt == (ASKED,)
    assert len(examples(tmp_path, row)[0].prompt) == 3
    both = ColumnsConfig(messages="talk", prompt="question")
    assert len(examples(tmp_path, {"talk": row["messages"], "question": "1+1"}, columns=both)[0].prompt) == 3


def test_sharegpt_and_parts_of_text_are_understood(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
    rows = [
        {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]},
        {"conversations": [{"role": "user", "content": parts}, SAID]},
    ]
    found = examples(tmp_path, *rows, columns=ColumnsConfig(messages="conversations"))
    assert [found[index].conversation.messages for index in (0, 1)] == [(ASKED, SAID)] * 2


def test_tool_calls_have_objects_as_arguments_and_no_keys_of_other_rows(tmp_path: Path) -> None:
    def calling(arguments: Any) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [schema]}

    tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    schema = {"type": "function", "function": tool}
    rows = examples(tmp_path, calling({"a": 1}), calling('{"b": [2, {"c": 3}]}'), calling({"d": 4}))
    arguments = [rows[index].conversation.messages[1]["tool_calls"][0]["function"]["arguments"] for index in range(3)]
    assert arguments == [{"a": 1}, {"b": [2, {"c": 3}]}, {"d": 4}]
    assert rows[0].conversation.tools == (schema,)
    assert rows[0].conversation.messages[1]["content"] == ""


def test_a_byte_that_is_no_utf_8_is_named_also_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [ASKED, SAID]}).encode()
    path.write_bytes(good + b"\n" + good.replace(b"1+1", b"\xed\xa0\xbd"))
    with pytest.raises(RowError, match=r"row 1: rows\.jsonl, line 2: no JSON: 'utf-8' codec can't decode byte 0xed"):
        Examples.open(SourceConfig(path=str(path)))[1]


def test_null_is_a_value_of_arguments_and_schemas_unless_a_column_added_it(tmp_path: Path) -> None:
    import datasets

    def row(arguments: Any) -> dict[str, Any]:
        call = {"id": None, "type": "function", "function": {"name": "add", "arguments": arguments}}
        schema = {"name": "add", "strict": None, "parameters": {"properties": {"a": {"default": None}}}}
        messages = [ASKED, {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"type": "function", "function": schema}]}

    def arguments(found: Examples) -> list[Any]:
        calls = [found[index].conversation.messages[1]["tool_calls"][0] for index in range(len(found))]
        assert all("id" not in call for call in calls)
        return [call["function"]["arguments"] for call in calls]

    found = examples(tmp_path, row({"a": None, "b": [None]}), row('{"a": null}'), row(None))
    assert arguments(found) == [{"a": None, "b": [None]}, {"a": None}, {}]
    assert found[0].conversation.messages[1].keys() == {"role", "content", "tool_calls"}
    (tool,) = found[0].conversation.tools
    assert tool["function"] == {"name": "add", "parameters": {"properties": {"a": {"default": None}}}}
    table = datasets.Dataset.from_list([row({"a": 1}), row({"b": 2})])
    table.to_parquet(str(tmp_path / "rows.parquet"))
    assert arguments(Examples.open(SourceConfig(path=str(tmp_path / "rows.parquet")))) == [{"a": 1}, {"b": 2}]


def test_a_parquet_file_and_folders_by_split_give_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": [ASKED, SAID], "answer": str(number)} for number in range(5)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "both"))
    write(tmp_path / "folder" / "train.jsonl", rows)
    write(tmp_path / "folder" / "test.jsonl", rows[:2])
    for name in ("rows.parquet", "saved", "both", "folder"):
        found = Examples.open(SourceConfig(path=str(tmp_path / name)))
        assert [found[index].columns["answer"] for index in range(5)] == list("01234"), name
        assert found[0].conversation.messages == (ASKED, SAID), name
    assert len(Examples.open(SourceConfig(path=str(tmp_path / "folder"), split="test"))) == 2
    assert len(Examples.open(SourceConfig(path=str(tmp_path / "rows.parquet"), split="train[1:3]"))) == 2


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset", "splits"])
@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("train", range(10)),
        ("train[:30%]", range(3)),
        ("train[-2:]", [8, 9]),
        ("train[:10%]+train[80%:]", [0, 8, 9]),
    ],
)
def test_every_form_has_the_rows_that_a_split_names(
    tmp_path: Path, form: str, split: str, numbers: Sequence[int]
) -> None:
    import datasets

    rows = [{"messages": [ASKED, SAID], "answer": number} for number in range(10)]
    table, path = datasets.Dataset.from_list(rows), tmp_path / form
    if form == "jsonl":
        path = Path(write(tmp_path / "rows.jsonl", rows))
    elif form == "parquet":
        path = tmp_path / "rows[1].parquet"
        table.to_parquet(str(path))
    elif form == "dataset":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table, "test": table.select([5])}).save_to_disk(str(path))
    found = Examples.open(SourceConfig(path=str(path), split=split))
    assert [found[index].columns["answer"] for index in range(len(found))] == list(numbers)
    with pytest.raises(ConfigError, match=r"^data\.split='dev\[:2\]': expected "):
        Examples.open(SourceConfig(path=str(path), split="dev[:2]"))


def test_a_saved_dataset_has_its_splits_added_and_the_name_of_its_own(tmp_path: Path) -> None:
    import datasets

    write(tmp_path / "test.jsonl", [{"messages": [ASKED, SAID], "answer": number} for number in range(4)])
    both = datasets.load_dataset("json", data_files={"test": str(tmp_path / "test.jsonl")})
    both["test"].save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": both["test"], "test": both["test"]}).save_to_disk(str(tmp_path / "two"))
    assert len(Examples.open(SourceConfig(path=str(tmp_path / "one"), split="test[:3]"))) == 3
    assert len(Examples.open(SourceConfig(path=str(tmp_path / "one")))) == 4
    assert len(Examples.open(SourceConfig(path=str(tmp_path / "two"), split="train+test[:1]"))) == 5


def test_a_folder_whose_path_is_a_pattern_is_refused(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a[1]").mkdir()
    datasets.Dataset.from_list([{"messages": [ASKED, SAID]}]).to_parquet(str(tmp_path / "a[1]" / "train.parquet"))
    with pytest.raises(ConfigError, match=r"expected a folder whose path has none of \* \? \[ \]; rename it"):
        Examples.open(SourceConfig(path=str(tmp_path / "a[1]")))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"split": "train+test"}, "data.split='train+test': expected one of train, or a slice such as train[:10%]"),
        ({"path": "no/such.jsonl"}, "data.path='no/such.jsonl': expected a file or folder that exists"),
        ({"split": "tset"}, "data.split='tset': expected one of train, or a slice such as train[:10%]"),
        (
            {"columns": {"messages": "mesages"}},
            "data.columns.messages='mesages': expected a column of the dataset; did",
        ),
        ({"columns": {"tools": "functions"}}, "data.columns.tools='functions': expected a column of the dataset; "),
        ({"subset": "main"}, "data.subset='main': expected nothing, for data on disk; leave it out"),
    ],
)
def test_what_cannot_be_opened_is_one_line(tmp_path: Path, settings: dict[str, Any], line: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": [ASKED, SAID], "answer": 2}])
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        Examples.open(SourceConfig.model_validate({"path": path} | settings))
    assert str(caught.value).startswith(line)


def test_a_dataset_without_the_columns_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which has text, label; set it, or data\.columns\.prompt"):
        examples(tmp_path, {"text": "a", "label": 1})


@pytest.mark.parametrize("split", ["train", "train[:0]"])
def test_an_empty_dataset_is_refused(tmp_path: Path, split: str) -> None:
    rows = [{"messages": [ASKED, SAID]}] if split != "train" else []
    with pytest.raises(ConfigError, match=r"^data\.path='[^\n]*: expected a dataset with rows; "):
        examples(tmp_path, *rows, split=split)


def test_rows_of_json_are_what_their_lines_say(tmp_path: Path) -> None:
    texts = ["2", "true", "null", '{"a": 1}', [{"type": "text", "text": "2"}], "\u2028", "é\n"]
    rows = examples(tmp_path, *({"messages": [ASKED, {**SAID, "content": text}], "k": text} for text in texts))
    assert [rows[index].columns["k"] for index in range(len(texts))] == texts
    contents = [rows[index].conversation.messages[1]["content"] for index in range(len(texts))]
    assert contents == ["2", "true", "null", '{"a": 1}', "2", "\u2028", "é\n"]


def test_a_json_list_and_several_files_are_one_dataset(tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, SAID], "answer": number} for number in range(5)]
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "a.json").write_text(json.dumps(rows[:2], indent=1))
    write(tmp_path / "list" / "b.jsonl", rows[2:])
    with (tmp_path / "list" / "b.jsonl").open("a") as file:
        file.write("\n\n")
    found = Examples.open(SourceConfig(path=str(tmp_path / "list")))
    assert [found[index].columns["answer"] for index in range(len(found))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("before", ["\N{BYTE ORDER MARK}", "\n" * 100, ""])
def test_a_json_list_may_begin_with_a_byte_order_mark_or_empty_lines(tmp_path: Path, before: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(before + json.dumps([{"messages": [ASKED, SAID]}] * 3, indent=1), "utf-8")
    assert len(Examples.open(SourceConfig(path=str(path)))) == 3


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_half_of_a_surrogate_pair_is_no_text_and_a_whole_pair_is(tmp_path: Path, suffix: str) -> None:
    whole, half = [ASKED, {"role": "assistant", "content": "\N{PARTY POPPER}"}], [ASKED, {**SAID, "content": "\ud83d"}]
    rows, path = [{"messages": whole}, {"messages": half}], tmp_path / f"rows.{suffix}"
    path.write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    found = Examples.open(SourceConfig(path=str(path)))
    assert found[0].conversation.messages[1]["content"] == "\N{PARTY POPPER}"
    with pytest.raises(RowError, match=r"row 1: .*: no text: \\ud83d is half of a surrogate pair$"):
        found[1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON: "),
        ("[1]", "expected an object, found list"),
        ("[" * 100_000, "no JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = Path(write(tmp_path / "rows.jsonl", [{"messages": [ASKED, SAID]}] * 1001))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RowError, match=f"row 1001: .*rows.jsonl, line 1002: {reason}"):
        Examples.open(SourceConfig(path=str(path)))[1001]


def test_lines_are_counted_as_an_editor_does_also_after_empty_ones(tmp_path: Path) -> None:
    good, odd = json.dumps({"messages": [ASKED, SAID]}), json.dumps({"messages": []})
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{good}\n\n\n{odd}\n{good}\n\n{{")
    rows = Examples.open(SourceConfig(path=str(path), split="train[1:]"))
    assert len(rows) == 3
    with pytest.raises(RowError, match=r"row 0: .* \(rows\.jsonl, line 5\)$"):
        rows[0]
    with pytest.raises(RowError, match=r"row 2: rows\.jsonl, line 8: no JSON: .*, column 2"):
        rows[2]


def test_a_broken_line_fails_alone_unless_there_is_no_other(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "rows.jsonl", [{"messages": [ASKED, SAID]}]))
    path.write_text("{\n" + path.read_text())
    rows = Examples.open(SourceConfig(path=str(path)))
    assert rows[1].prompt == (ASKED,)
    with pytest.raises(RowError, match=r"row 0: .*rows\.jsonl, line 1: no JSON: "):
        rows[0]
    path.write_text("{\n[]\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: no JSON: "):
        Examples.open(SourceConfig(path=str(path)))


@pytest.mark.parametrize(
    ("names", "split", "rows"),
    [
        ("train test", "train", 1),
        ("train-0-of-2 train-1-of-2 test", "train", 2),
        ("train.0 train.1 other", "train", 2),
        ("one two", "train", 2),
        ("train_sft test_sft", "train_sft", 1),
        ("training test", "train", "one of test, training"),
        ("a valid-0", "train", "one of a, valid"),
        ("train_sft test_sft", "train", "one of test_sft, train_sft"),
        ("one two", "test", "one of one, train, two"),
    ],
)
def test_files_are_of_the_split_that_they_are_named_by(tmp_path: Path, names: str, split: str, rows: int | str) -> None:
    for name in names.split():
        write(tmp_path / "folder" / f"{name}.jsonl", [{"messages": [ASKED, SAID]}])
    source = SourceConfig(path=str(tmp_path / "folder"), split=split)
    if isinstance(rows, int):
        assert len(Examples.open(source)) == rows
    else:
        with pytest.raises(ConfigError, match=f"^data\\.split='{split}': expected {rows}, or a slice"):
            Examples.open(source)


def test_files_that_are_no_dataset_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"of one kind: \.jsonl, \.json or \.parquet"):
        Examples.open(SourceConfig(path=str(tmp_path / "rows.csv")))
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(ConfigError, match="expected a dataset that can be read; "):
        Examples.open(SourceConfig(path=str(tmp_path / "rows.parquet")))


def test_the_keys_of_an_error_are_those_of_who_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task\.options\.path="):
        Examples.open(SourceConfig(path="no/such.jsonl"), "task.options")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "a list of messages was expected, found []"),
        ([{"content": "a"}], "message 0 has the role None; expected one of system, developer, user, assistant, tool"),
        ([ASKED, {"role": "asistant", "content": "a"}], "message 1 has the role 'asistant'; expected one of "),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "a part of type 'image_url'; text"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "a part of type 'image'"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "a tool call without a function's name"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "message 0 calls f with arguments that are no JSON",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path: Path, messages: Any, reason: str) -> None:
    rows = examples(tmp_path, {"messages": [ASKED, SAID]}, {"messages": messages})
    assert rows[0].prompt == (ASKED,)
    with pytest.raises(RowError) as caught:
        rows[1]
    assert "rows.jsonl (train): row 1: " in str(caught.value)
    assert reason in str(caught.value)


def test_the_digest_depends_on_values_and_order_alone() -> None:
    def digest(*rows: Mapping[str, Any]) -> str:
        content = DatasetDigest()
        for row in rows:
            content.add(row)
        return content.digest

    assert digest({"a": 1, "b": "é"}, {"c": None}) == digest({"b": "é", "a": 1}, {"c": None})
    others = [
        digest({"a": 1}, {"b": 2}),
        digest({"b": 2}, {"a": 1}),
        digest({"a": 1, "b": 2}),
        digest({"a": "1"}, {"b": 2}),
    ]
    assert len(set(others)) == 4
