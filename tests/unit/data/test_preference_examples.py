"""Preference pairs in every form that TRL takes, and one line of error for each mistake."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from pipeline.config import RunConfig
from pipeline.config.cross_checks import check_run
from pipeline.config.data_keys import SourceConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.data.examples import RowError
from pipeline.data.preference_examples import PreferenceExamples
from pipeline.errors import ConfigError
from pipeline.train.batching.padding_token import padding_token
from pipeline.train.batching.preference_rows import PreferencePairs, check_pairs
from tests.fakes.configs import make_config

USER = {"role": "user", "content": "1+1="}
RIGHT, WRONG = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, model: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    tiny = {"path": str(BUILT_IN / "tiny_qwen3"), "init": "random", "max_length": 64}
    data = {"path": str(path), **sections.pop("data", {})}
    preference = {"epochs": 1, "batch": 2, **sections.pop("preference", {})}
    training = {"steps": 0, **sections.pop("training", {})}
    return make_config(model=tiny | (model or {}), data=data, preference=preference, training=training, **sections)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "1+1=", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "1+1=", "chosen": [RIGHT], "rejected": [WRONG], "score": 7},
    ],
)
def test_every_form_gives_the_same_pair(row: dict[str, Any], tmp_path: Path) -> None:
    pair = PreferenceExamples.open(SourceConfig(path=str(write(tmp_path / "pairs.jsonl", row))))[0]
    assert (pair.prompt, pair.chosen, pair.rejected) == ((USER,), (RIGHT,), (WRONG,))


def test_a_conversation_is_split_where_the_answers_differ(tmp_path: Path) -> None:
    turns = [USER, RIGHT, {"role": "user", "content": "2+1="}]
    row = {"chosen": [*turns, WRONG], "rejected": [*turns, RIGHT]}
    pair = PreferenceExamples.open(SourceConfig(path=str(write(tmp_path / "pairs.jsonl", row))))[0]
    assert pair.prompt == tuple(turns)
    same = {"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}
    pair = PreferenceExamples.open(SourceConfig(path=str(write(tmp_path / "same.jsonl", same))))[0]
    assert (pair.prompt, pair.chosen, pair.rejected) == ((USER,), (RIGHT,), (RIGHT,))


def test_a_pair_is_two_rows_with_one_prompt_and_a_step_counts_pairs(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", *({"prompt": f"{n}+1=", "chosen": "2", "rejected": "13"} for n in range(3)))
    pairs = PreferencePairs(config(path))
    assert (pairs.size, len(pairs.rows)) == (3, 6)
    assert [len(pairs(step, 2)) for step in range(2)] == [4, 2], "the last step of an epoch has one pair"
    chosen, rejected = pairs(0, 1)
    assert len(rejected) == len(chosen) + 1
    assert chosen.counted < len(chosen)
    shared = int(chosen.mask.argmax())
    assert list(chosen.tokens[:shared]) == list(rejected.tokens[:shared])


def test_a_row_of_a_reward_model_counts_one_token_after_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    plain = PreferencePairs(config(path))(0, 1)[0]
    scored = PreferencePairs(config(path, preference={"loss": "bradley_terry"}))(0, 1)[0]
    assert list(scored.tokens[:-1]) == list(plain.tokens)
    assert list(scored.mask) == [0] * len(plain) + [1]


def model_with_padding(folder: Path, token: int) -> Path:
    """A model whose padding is `token`."""
    model = shutil.copytree(BUILT_IN / "tiny_qwen3", folder)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"pad_token_id": token}))
    return model


def test_a_submission_reads_the_rows_of_a_reward_model_as_the_trainer_does(tmp_path: Path) -> None:
    """A row of the longest length ends with padding, which the reward model does not read."""
    path = write(tmp_path / "pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    plain = PreferencePairs(config(path))(0, 1)[0]
    model = model_with_padding(tmp_path / "model", int(plain.tokens[-1]))
    length = {"path": str(model), "max_length": len(plain)}
    scored = config(path, length, preference={"loss": "bradley_terry"}, data={"path": str(path), "overlong": "refuse"})
    assert PreferencePairs(scored).size == 1
    check_pairs(scored)


@pytest.mark.parametrize("named", [True, False])
def test_a_reward_model_learns_the_score_of_the_token_that_a_classifier_takes(tmp_path: Path, named: bool) -> None:
    """Where the end of a chat is also the padding, as that of a model that names none, the token before it."""
    path = write(tmp_path / "pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    plain = PreferencePairs(config(path))(0, 1)[0]
    model = shutil.copytree(BUILT_IN / "tiny_qwen3", tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    end = int(plain.tokens[-1])
    padding = {"pad_token_id": end} if named else {"pad_token_id": None, "eos_token_id": [end]}
    (model / "config.json").write_text(json.dumps(settings | padding))
    scored = PreferencePairs(config(path, {"path": str(model)}, preference={"loss": "bradley_terry"}))(0, 1)[0]
    assert list(scored.tokens[:-1]) == list(plain.tokens[:-1])

    exported = AutoConfig.from_pretrained(model, num_labels=1)
    exported.pad_token_id = padding_token(exported)
    classifier = AutoModelForSequenceClassification.from_config(exported).eval()
    tokens_BT = torch.tensor(plain.tokens.tolist())[None]
    with torch.no_grad():
        scores_T = classifier.score(classifier.model(tokens_BT).last_hidden_state)[0, :, 0]
        assert float(classifier(tokens_BT).logits) == float(scores_T[len(scored) - 2])


def test_a_pair_with_one_long_completion_is_left_out_whole(tmp_path: Path) -> None:
    good, long = (
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1", "chosen": "2", "rejected": "3" * 99},
    )
    pairs = PreferencePairs(config(write(tmp_path / "pairs.jsonl", long, good)))
    assert (pairs.size, pairs.rows.counts["longer than model.max_length"]) == (1, 1)


GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
BAD_ROWS = {
    "chosen is empty; correct it": GOOD | {"chosen": ""},
    "rejected is empty; correct it": {"prompt": "1", "chosen": "2", "rejected": None},
    "chosen and rejected have two forms; make both a text": GOOD | {"rejected": [WRONG]},
    "prompt is missing, and the completions have no messages before; add it": {"chosen": "1", "rejected": "2"},
    "begin with different messages; let both begin with the prompt": {
        "chosen": [USER, RIGHT],
        "rejected": [{"role": "user", "content": "1"}, WRONG],
    },
    "chosen: message 0 has the role 'robot'; expected one of": GOOD
    | {"chosen": [{"role": "robot", "content": "2"}], "rejected": [WRONG]},
    "rejected: a list of messages was expected, found 3; correct it": GOOD | {"chosen": [RIGHT], "rejected": 3},
    "chosen: no turn of an assistant to train": {"chosen": [USER, USER], "rejected": [USER, WRONG]},
    "prompt: a list of messages was expected, found 7; correct it": GOOD | {"prompt": 7},
    "chosen: the tokenizer cannot encode it": GOOD | {"chosen": "é"},
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_one_line_with_file_line_column_and_fix(reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", GOOD, BAD_ROWS[reason])
    with pytest.raises(ConfigError) as caught:
        check_pairs(config(path))
    message = str(caught.value)
    assert reason in message
    assert "row 1" in message
    assert "pairs.jsonl, line 2" in message
    assert "\n" not in message
    dropped = PreferencePairs(config(path, data={"invalid": "drop"}))
    assert (dropped.size, dropped.rows.counts["invalid"]) == (1, 1)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", GOOD)
    path.write_text(path.read_text() + '{"prompt": "1", "chosen\n')
    with pytest.raises(ConfigError, match="line 2") as caught:
        check_pairs(config(path))
    assert "\n" not in str(caught.value)


def test_a_missing_column_is_named_with_the_columns_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "1", "accepted": "2", "rejected": "3"})
    with pytest.raises(ConfigError, match=r"data\.columns\.chosen='chosen'.*accepted"):
        check_pairs(config(path))
    check_pairs(config(path, data={"columns": {"chosen": "accepted"}}))
    with pytest.raises(ConfigError, match=r"data\.columns\.prompt='question'"):
        check_pairs(config(path, data={"columns": {"chosen": "accepted", "prompt": "question"}}))
    with pytest.raises(RowError, match="row 0"):
        raise PreferenceExamples.open(
            SourceConfig.model_validate({"path": str(path), "columns": {"chosen": "accepted"}})
        ).wrong(0, "a reason")


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("training.steps", {"training": {"steps": 5}}),
        ("training.sft.epochs", {"training": {"sft": {"epochs": 1}}}),
        ("preference.epochs", {"preference": {"steps": 5}}),
        ("data.path", {"data": {"path": ""}}),
        ("data.train_on", {"data": {"train_on": "each"}}),
        ("model.lora.rank", {"model": {"lora": {"rank": 4}}, "preference": {"loss": "bradley_terry"}}),
        ("preference.label_smoothing", {"preference": {"loss": "ipo", "label_smoothing": 0.1}}),
        ("preference.margin", {"preference": {"margin": 0.5}}),
        ("preference.beta", {"preference": {"loss": "bradley_terry", "beta": 0.5}}),
        ("preference.beta", {"preference": {"beta": 0}}),
        ("preference.loss", {"preference": {"loss": "dpo"}}),
        ("preference.batch", {"preference": {"loss": "kto", "batch": 1}}),
        ("preference.margin", {"preference": {"loss": "kto", "margin": 0.5}}),
        ("preference.desirable_weight", {"preference": {"desirable_weight": 2}}),
        ("preference.label_smoothing", {"preference": {"label_smoothing": 0.7}}),
    ],
)
def test_a_mistaken_key_is_one_line_that_names_it(key: str, sections: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", GOOD)
    with pytest.raises(ConfigError) as caught:
        check_run(config(path, **sections))
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value)
