"""Prompts from a dataset: rows become prompts with columns, and what cannot be read is said before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RewardConfig, TaskConfig
from pipeline.environments import load_task
from pipeline.environments.dataset_task import Dataset
from pipeline.environments.rewards import check_rewards
from pipeline.errors import ConfigError, RecordError

ROWS = [{"prompt": f"{n}+1", "answer": str(n + 1), "extra_info": {"index": n}} for n in range(10)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "sums.jsonl", ROWS)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dataset(path: Path, **options: Any) -> Dataset:
    options = {"path": str(path), "eval_rows": 3} | options
    task = load_task(TaskConfig(name="dataset", options=options), 0)
    assert isinstance(task, Dataset)
    return task


def test_a_row_is_a_prompt_with_its_columns_and_the_last_rows_are_held_out(file: Path) -> None:
    task = dataset(file)
    assert len(task) == 7
    assert task.prompt(2).messages == ({"role": "user", "content": "2+1"},)
    assert task.prompt(2).columns == {"answer": "3", "extra_info": {"index": 2}}
    assert [prompt.columns["answer"] for prompt in task.held_out()] == ["8", "9", "10"]


def test_held_out_rows_may_lie_in_another_file(file: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "held_out.jsonl", ROWS[:2])
    task = dataset(file, eval_path=str(other), eval_rows=0)
    assert len(task) == 10
    assert [prompt.columns["answer"] for prompt in task.held_out()] == ["1", "2"]
    assert len(dataset(file, eval_path=str(other), eval_rows=1).held_out()) == 1


def test_the_slice_of_the_training_split_is_not_one_of_another_path(file: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "held_out.jsonl", ROWS[:4])
    task = dataset(file, split="train[:50%]", eval_path=str(other), eval_rows=0)
    assert len(task) == 5
    assert [prompt.columns["answer"] for prompt in task.held_out()] == ["1", "2", "3", "4"]


def test_held_out_rows_that_would_be_trained_too_are_refused(file: Path) -> None:
    for options in ({"eval_split": "train"}, {"split": "train[:5]", "eval_path": str(file)}):
        with pytest.raises(ConfigError, match=r"^task\.options\.eval_split='train': expected other rows than those of"):
            dataset(file, **options)
    task = dataset(file, split="train[:5]", eval_split="train[5:]")
    assert [prompt.columns["answer"] for prompt in task.held_out()] == ["6", "7", "8"]


def test_a_conversation_is_asked_up_to_where_the_policy_speaks_and_a_system_message_comes_first(tmp_path: Path) -> None:
    talk = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    own = [{"role": "system", "content": "own"}, *talk]
    task = dataset(written(tmp_path / "chat.jsonl", [{"messages": talk}, {"messages": own}] * 3), system="be brief")
    assert [message["content"] for message in task.prompt(0).messages] == ["be brief", "u", "a", "u"]
    assert [message["content"] for message in task.prompt(1).messages] == ["own", "u", "a", "u"]


def test_columns_have_the_names_that_the_dataset_gives_them(tmp_path: Path) -> None:
    file = written(tmp_path / "qa.jsonl", [{"question": "1+1", "answer": "2"}] * 5)
    task = dataset(file, columns={"prompt": "question"})
    assert task.prompt(0).messages[0]["content"] == "1+1"
    with pytest.raises(ConfigError, match="did you mean question"):
        dataset(file, columns={"prompt": "questions"})


def test_its_rewards_are_functions_of_columns_that_it_has(file: Path) -> None:
    task, here = dataset(file), "tests.unit.environments.user_rewards"
    check_rewards(RewardConfig(functions=(f"{here}:trl_exact", f"{here}:verl_exact")), task, "dataset")
    with pytest.raises(ConfigError, match="answer, completion_ids, completions, extra_info, prompts; it needs diff"):
        check_rewards(RewardConfig(functions=(f"{here}:needs_question",)), task, "dataset")
    with pytest.raises(ConfigError, match="the task dataset has no reward"):
        check_rewards(RewardConfig(), task, "dataset")


def test_a_row_that_is_no_prompt_fails_alone_with_its_number(tmp_path: Path) -> None:
    task = dataset(written(tmp_path / "odd.jsonl", [{"prompt": "a"}, {"prompt": 7}, *[{"prompt": "b"}] * 4]))
    assert task.prompt(0).messages[0]["content"] == "a"
    with pytest.raises(RecordError, match=r"row 1: .* \(odd\.jsonl, line 2\)$"):
        task.prompt(1)


@pytest.mark.parametrize(("rows", "held_out"), [(2, 1), (9, 1), (100, 10), (256, 25), (2560, 256), (5000, 256)])
def test_a_tenth_is_held_out_of_a_small_dataset_unless_it_is_said(tmp_path: Path, rows: int, held_out: int) -> None:
    task = dataset(written(tmp_path / "rows.jsonl", [{"prompt": "a"}] * rows), eval_rows=None)
    assert (len(task), len(task.held_out())) == (rows - held_out, held_out)


@pytest.mark.parametrize(
    ("rows", "eval_rows", "said"),
    [
        (10, 11, r"options\.eval_rows=11: expected less than the 10 rows of the dataset; lower it, leave it out, or"),
        (10, 10, r"options\.eval_rows=10: expected less than the 10 rows"),
        (
            1,
            None,
            r"options\.path=.*: expected a dataset of 2 rows or more, .* train has 1; set task\.options\.eval_path",
        ),
    ],
)
def test_a_dataset_that_leaves_nothing_to_train_is_refused(
    tmp_path: Path, rows: int, eval_rows: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        dataset(written(tmp_path / "rows.jsonl", [{"prompt": "a"}] * rows), eval_rows=eval_rows)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"path": ""}, "path"),
        ({"path": "/no/such.jsonl"}, "path"),
        ({"eval_rows": 10}, "eval_rows"),
        ({"paht": 1}, "paht"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_key(file: Path, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset(**{"path": file} | options)
    assert caught.value.key == f"task.options.{key}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_conversation_that_begins_with_the_answer_has_no_prompt(tmp_path: Path, system: str) -> None:
    rows = [[{"role": "assistant", "content": "4"}], [{"role": "user", "content": "2+2"}]]
    file = written(tmp_path / "rows.jsonl", [{"messages": row} for row in rows])
    task = dataset(file, system=system, eval_rows=1)
    with pytest.raises(RecordError, match=r"row 0: no message comes before the assistant's \(rows\.jsonl, line 1\)"):
        task.prompt(0)
